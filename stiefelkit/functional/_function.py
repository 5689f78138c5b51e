"""The autograd functions of this folder: composable with torch.func, and light to call."""

from typing import Any

import torch

__all__ = ["Function"]


class Function(torch.autograd.Function):
    """An autograd.Function with `setup_context` and a generated vmap rule."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Applies the function; in plain eager mode without binding arguments by signature, which takes up to 80 us."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

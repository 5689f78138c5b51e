"""The fast scan over one more dimension (torch.func.vmap): folded into the batch where the matrices are shared."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit.scan.activations import find_activation
from stiefelkit.scan.blocks import row_blocks
from stiefelkit.scan.recurrence import Recurrence

__all__ = ["fold", "is_foldable", "one_by_one", "sample_gradients", "unfold"]

ROWS = {"x": 1, "h0": 0, "out": 1, "saved": 1, "g_out": 1, "g_last": 0}
"""Where the batch of an argument stands, for those that have one."""


def is_foldable(in_dims: Sequence[Any], names: Sequence[str], args: Sequence[Any]) -> bool:
    """Whether only rows have the new dimension, and all sequences are of one length."""
    mapped = [name for name, dim, arg in zip(names, in_dims, args, strict=False) if _is_mapped(dim, arg)]
    return args[names.index("recurrence")].sizes is None and all(name in ROWS for name in mapped)


def fold(info: Any, in_dims: Sequence[Any], names: Sequence[str], args: Sequence[Any]) -> list[Any]:
    """Folds the new dimension of every argument with rows into its batch; one that lacks it is repeated."""
    folded = []
    for name, dim, arg in zip(names, in_dims, args, strict=True):
        if name in ROWS and isinstance(arg, Tensor):
            at = ROWS[name]
            if dim is None:
                arg, dim = arg.expand(info.batch_size, *arg.shape), 0
            arg = arg.movedim(dim, at).flatten(at, at + 1)
        folded.append(arg)
    return folded


def unfold(info: Any, result: Tensor, at: int) -> Tensor:
    """Undoes the folding of a result whose batch stands at `at`; the new dimension stands there then."""
    return result.unflatten(at, (info.batch_size, result.shape[at] // info.batch_size))


def one_by_one(call: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Calls a function for each index of the new dimension, and stacks what it returns."""
    results = [
        call(*(arg.select(dim, i) if _is_mapped(dim, arg) else arg for dim, arg in zip(in_dims, args, strict=True)))
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def sample_gradients(
    recurrence: Recurrence, delta: Tensor, x: Tensor, h0: Tensor, u: Tensor | None, out: Tensor, saved: Tensor
) -> dict[str, Tensor]:
    """Gradients of each sample, from those by its pre-activations.

    Args:
        recurrence: the plain one that ran.
        delta: shape (T, V, B, n), as all others with the new dimension V before the batch.
        x: inputs (T, V, B, m).
        h0: first states (V, B, n).
        u: input matrix (n, m), shared.
        out: states (T, V, B, n).
        saved: what the activation kept besides them, (T, V, B, .).

    Returns:
        Gradients by x (T, V, B, m), w (V, n, n), u (V, n, m), bias (V, n) and activation_bias (V, n).
    """
    first = h0.unsqueeze(0)
    before = torch.cat([out[1:], first] if recurrence.reverse else [first, out[:-1]])
    into = delta if u is None else delta @ u.conj()
    activation = find_activation(recurrence.activation, delta.is_complex())

    def outer(rows: Tensor) -> Tensor:
        return torch.einsum("tvbi,tvbj->vij", delta, rows.conj().to(delta.dtype))

    gradients = {
        "x": into if x.is_complex() or not into.is_complex() else into.real,
        "w": outer(before.real if recurrence.half else before),
        "u": outer(x),
        "bias": delta.sum((0, 2)),
    }
    if activation.bias_inside:
        rows = row_blocks(delta)
        # Where the gradients are mapped over once more, what is written to has to be too.
        h = torch.empty_like(rows).copy_(row_blocks(out))
        gradients["activation_bias"] = activation.inner_gradient(h, saved, rows).sum((0, 2))
    return gradients


def _is_mapped(dim: Any, arg: Any) -> bool:
    return isinstance(arg, Tensor) and dim is not None

"""Whether ONNX is what code is traced for: it has neither our operators nor a matrix inverse."""

import torch

__all__ = ["is_exported"]


def is_exported() -> bool:
    """Whether `torch.onnx.export(dynamo=True)` is tracing."""
    if not torch.compiler.is_exporting():
        return False
    from torch.onnx._internal.exporter import _flags

    # Not torch.onnx.is_in_onnx_export(), which Dynamo takes for False.
    return _flags._is_onnx_exporting

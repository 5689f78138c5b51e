"""Rotations that are folded into the linear layers around them, as quantization of language models wants."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stiefelkit._torch import held_parameters
from stiefelkit.dtypes import working_dtype
from stiefelkit.errors import DtypeError, NotAFrameError, ShapeError
from stiefelkit.metrics import frame_tolerance, orthogonality_error

__all__ = ["rotate_"]


@torch.no_grad()
def rotate_(rotation: Tensor, *, readers: Iterable[nn.Module] = (), writers: Iterable[nn.Module] = ()) -> None:
    """Folds a rotation R of features h into the layers around them: what they write and read is R h from then on.

    Writers, whose outputs are added up to h, get R W and R b, readers W R^T: the function of the whole is the same, but
    for rounding. A norm between them must commute with R, as a root mean square without a weight of its own does.
    Everything is worked out in float64 and rounded once, and written after all of it was checked. With R of
    `sk.orthogonal(layer, "weight", "stiefel")` that is layer.weight.

    Args:
        rotation: R, n x n.
        readers: linear layers with n inputs.
        writers: linear layers with n outputs; or embeddings, whose rows are rotated.

    Raises:
        ShapeError: R is not square, or a layer has another size.
        NotAFrameError: R is not orthogonal.
        DtypeError: a layer is neither linear nor, among the writers, an embedding; or its weight is no plain parameter.

    >>> first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    >>> x = torch.randn(5, 3)
    >>> before = last(first(x))
    >>> rotate_(torch.eye(4).flip(0), readers=[last], writers=[first])
    >>> torch.allclose(last(first(x)), before, atol=1e-6)
    True
    """
    if rotation.dim() != 2 or rotation.shape[0] != rotation.shape[1]:
        raise ShapeError(f"rotate_ needs a square matrix, got shape {tuple(rotation.shape)}.")
    n, error = len(rotation), orthogonality_error(rotation).item()
    if not error <= frame_tolerance(n, rotation.dtype):
        raise NotAFrameError(
            f"rotate_ needs an orthogonal matrix, got one with ||R^H R - I||_F = {error:.2g}; "
            "sk.functional.nearest_frame gives the nearest."
        )
    r = rotation.detach().to(working_dtype(rotation.dtype))
    turned: list[tuple[Tensor, Tensor]] = []
    for layer in readers:
        w = _weight(layer, (nn.Linear,), n, 1)
        turned.append((w, _times(w, r.mH)))
    for layer in writers:
        if isinstance(layer, nn.Embedding):
            w = _weight(layer, (nn.Embedding,), n, 1)
            turned.append((w, _times(w, r.mT)))
            continue
        w, bias = _weight(layer, (nn.Linear, nn.Embedding), n, 0), held_parameters(layer).get("bias")
        turned.append((w, _times(w.mT, r.mT).mT))
        if bias is not None:
            turned.append((bias, _times(bias, r.mT)))
    for tensor, value in turned:
        tensor.copy_(value)


def _times(w: Tensor, r: Tensor) -> Tensor:
    """W R, in float64."""
    return w.to(working_dtype(w.dtype)) @ r.to(w.device)


def _weight(layer: nn.Module, kinds: tuple[type, ...], n: int, dim: int) -> nn.Parameter:
    """The weight of a layer, which has n entries along a dimension."""
    w = held_parameters(layer).get("weight") if isinstance(layer, kinds) else None
    if w is None:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise DtypeError(f"rotate_ needs layers of torch.nn.{names} with plain weights, got {type(layer).__name__}.")
    if w.shape[dim] != n:
        raise ShapeError(f"rotate_ needs weights with {n} features along dimension {dim}, got {tuple(w.shape)}.")
    return w

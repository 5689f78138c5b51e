"""What the maps of this folder need of the shape of a matrix."""

from torch import Tensor

from stiefelkit.errors import ShapeError

__all__ = ["check_alike", "check_square", "check_tall"]


def check_tall(who: str, w: Tensor) -> None:
    """Raises ShapeError unless W is of shape (*, n, p), n >= p."""
    if w.dim() < 2 or w.shape[-2] < w.shape[-1]:
        remedy = "; take the adjoint" if w.dim() >= 2 else ""
        raise ShapeError(f"{who} needs matrices of shape (*, n, p), n >= p, got {tuple(w.shape)}{remedy}.")


def check_alike(who: str, w: Tensor, *others: Tensor) -> None:
    """Raises ShapeError unless W is of shape (*, n, p), n >= p, and so are the others."""
    check_tall(who, w)
    for x in others:
        if x.shape[-2:] != w.shape[-2:]:
            raise ShapeError(f"{who} needs matrices of one shape (*, n, p), got {tuple(w.shape)} and {tuple(x.shape)}.")


def check_square(who: str, w: Tensor) -> None:
    """Raises ShapeError unless W is of shape (*, n, n)."""
    if w.dim() < 2 or w.shape[-2] != w.shape[-1]:
        raise ShapeError(f"{who} needs square matrices of shape (*, n, n), got {tuple(w.shape)}.")

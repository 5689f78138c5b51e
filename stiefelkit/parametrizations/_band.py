"""Which coordinates of a skew matrix there are: all, or those of a band around its diagonal."""

from dataclasses import dataclass

from torch import Tensor

from stiefelkit.errors import OptionError
from stiefelkit.functional import band_size, pick_band, skew_size, spread_band

__all__ = ["Band", "check_width"]


def check_width(owner: str, width: int | None, n: int) -> None:
    """Raises OptionError unless a width is None or between 1 and n - 1."""
    if width is not None and (not isinstance(width, int) or isinstance(width, bool) or not 1 <= width < n):
        raise OptionError(f"{owner} needs bandwidth between 1 and n - 1 = {n - 1}, got {width!r}.")


@dataclass(frozen=True)
class Band:
    """The coordinates of `stiefelkit.functional.unpack_skew` that a map has.

    Attributes:
        n: rows of the frame.
        p: its columns.
        is_complex: whether it is complex.
        width: how many places off the diagonal A may differ from zero, None for a whole A.
    """

    n: int
    p: int
    is_complex: bool
    width: int | None

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        if self.width is None:
            return skew_size(self.n, self.p, self.is_complex)
        return band_size(self.n, self.p, self.is_complex, self.width)

    def spread(self, v: Tensor) -> Tensor:
        """All coordinates of A, those off the band zero."""
        return v if self.width is None else spread_band(v, self.n, self.p, self.is_complex, self.width)

    def pick(self, v: Tensor) -> tuple[Tensor, float]:
        """Reads those of the band off all coordinates; returns them and the largest of the rest."""
        if self.width is None:
            return v, 0.0
        band, rest = pick_band(v, self.n, self.p, self.is_complex, self.width)
        return band, rest.max().item()

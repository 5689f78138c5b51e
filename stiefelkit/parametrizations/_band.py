"""Which coordinates of a skew matrix there are: all, or those of a band around its diagonal."""

from dataclasses import dataclass

from torch import Tensor

from stiefelkit.functional import band_size, pick_band, skew_size, spread_band

__all__ = ["Band"]


@dataclass(frozen=True)
class Band:
    """The coordinates of `unpack_skew` of entries at most `width` off the diagonal of A, all if that is None."""

    n: int
    p: int
    is_complex: bool
    width: int | None

    @property
    def size(self) -> int:
        whole = (self.n, self.p, self.is_complex)
        return skew_size(*whole) if self.width is None else band_size(*whole, self.width)

    def spread(self, v: Tensor) -> Tensor:
        """All coordinates of A, those off the band zero."""
        return v if self.width is None else spread_band(v, self.n, self.p, self.is_complex, self.width)

    def pick(self, v: Tensor) -> tuple[Tensor, float]:
        """Reads those of the band off all coordinates; returns them and the largest of the rest."""
        if self.width is None:
            return v, 0.0
        band, rest = pick_band(v, self.n, self.p, self.is_complex, self.width)
        return band, rest.max().item()

"""Near-orthogonal weights whose singular values stay within a margin of 1."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.contract import table
from stiefelkit.contract.composite import Composite, Inner, prefixed
from stiefelkit.contract.param import Parametrization, Position, Traits, check_tensor, rounded
from stiefelkit.errors import NotAFrameError, needs
from stiefelkit.functional import nearest_frame, product
from stiefelkit.metrics import FRAME_TOLERANCE, rounding_limit
from stiefelkit.numbers import at_least
from stiefelkit.parametrizations._charts import component_of_product
from stiefelkit.tensors import coarser, computing_dtype, coordinate_dtype, working_dtype


class Margin(Composite):
    r""":math:`W = U diag(s) V^H` with singular values s in :math:`(1 - m, 1 + m)`.

    They are :math:`s = 1 + 2 m (sigmoid(q) - 1/2)`. U (n x p) and V (p x p) are frames by any parametrizations, whose
    coordinates and charts carry the prefixes `u.` and `v.`; the coordinate `spectrum` is q. With :math:`q = 0` the
    weight is a frame.

    Image: matrices with singular values in that range, as far as U and V reach. Declared inexact: W is no frame, and
    `sk.drift` measures how far its spectrum is from 1. Cost: both maps and one product. Not for weights that must stay
    orthonormal. The papers divide the learning rate of q by 2 m.

    Args:
        shape, dtype, device: of the weight, (*, n, p), real or complex, and where the charts live.
        precision: "exact": both frames are exact, in float32 at least.
        margin: m, :math:`0 ≤ m < 1`.
        u: parametrization of U, a registered name or a class.
        v: parametrization of V.
        u_options: options of U's map.
        v_options: options of V's map.

    References:
        Vorontsov, Trabelsi, Kadoury, Pal, On orthogonality and learning recurrent networks with long term dependencies,
        ICML 2017, equations 3 and 4.

    >>> map = Margin((2, 2), dtype=torch.float32, margin=0.5)
    >>> map(torch.zeros(1), torch.zeros(1), torch.zeros(2))
    tensor([[1., 0.],
            [0., 1.]])
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ("spectrum", "u.*", "v.*")
    stacks: ClassVar[bool] = True
    schemes = property(lambda self: self.u.schemes)
    takes_nearest = property(lambda self: self.u.takes_nearest)

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        precision: str = "exact",
        margin: float = 0.1,
        u: Parametrization = "cayley",
        v: Parametrization = "cayley",
        u_options: Mapping[str, Any] | None = None,
        v_options: Mapping[str, Any] | None = None,
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        self.margin = float(at_least(0, below=1).require("Margin", "margin", margin))
        *batch, _, p = self.shape
        self.u = Inner(u, u_options).build(self, self.shape, device)
        self.v = Inner(v, v_options).build(self, (*batch, p, p), device)

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: Any) -> str | None:
        *batch, _, p = shape
        for name, frame_shape in (("u", tuple(shape)), ("v", (*batch, p, p))):
            inner = Inner(options.get(name, "cayley"), options.get(f"{name}_options"))
            reason = inner.flaw(frame_shape, dtype)
            if reason is not None:
                return f"{reason} for {name}={table.registered.name_of(inner.cls) or inner.cls.__name__!r}"
        return None

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        mixed = {"margin": 0.05, "u": "householder", "u_options": {"reflections": 3}, "v": "matrix_exp"}
        return [
            ((6, 6), {"margin": 0.05}),
            ((1, 1), {"margin": 0.0}),
            ((7, 3), mixed),
            ((2, 5, 4), {"margin": 0.05, "v": "householder"}),
            ((5, 3), {"margin": 0.05, "u": "stiefel"}),
        ]

    @property
    def traits(self) -> Traits:
        u, v = self.u.traits, self.v.traits
        return Traits(
            onto=u.onto,
            invertible=u.invertible and v.invertible,
            exact=False,
            component=component_of_product(u.component, v.component),
            twice_differentiable=u.twice_differentiable and v.twice_differentiable,
            cost_exponent=max(u.cost_exponent, v.cost_exponent),
        )

    def options(self) -> dict[str, Any]:
        return {"margin": self.margin, "u": self.u.options(), "v": self.v.options()}

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        return self._of_parts("coordinates") | {"spectrum": (*self.shape[:-2], self.shape[-1])}

    def error_bound(self, *coordinates: Tensor) -> float:
        """Returns the spectrum's distance from 1, and 10 limits."""
        limit = rounding_limit(self.shape[-1], computing_dtype(self.dtype))
        largest = (1 + self.margin) ** 2
        of_u, of_v, q = self._split(coordinates) if coordinates else ((), (), None)
        rounding = 10 * limit + 2 * super().error_bound()
        rounding += 2 * largest * (self.u.error_bound(*of_u) + self.v.error_bound(*of_v))
        if q is None:
            return (largest - 1) * self.shape[-1] ** 0.5 + rounding
        s = self._singular_values(q.double())
        return torch.linalg.vector_norm(s * s - 1, dim=-1).max().item() + rounding

    def forward(self, *coordinates: Tensor) -> Tensor:
        of_u, of_v, q = self._split(coordinates)
        u, v = self.u(*of_u), self.v(*of_v)
        s = self._singular_values(q.double()).to(u.real.dtype)
        return product(u * s.unsqueeze(-2), v.mH).to(self.dtype)

    def _singular_values(self, q: Tensor) -> Tensor:
        return 1 + 2 * self.margin * (torch.sigmoid(q) - 0.5)

    def _split(self, coordinates: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        first = len(self.u.coordinates)
        return coordinates[:first], coordinates[first:-1], coordinates[-1]

    def project(self, weight: Tensor) -> Tensor:
        """Clamps the singular values."""
        u, s, vh = torch.linalg.svd(weight.to(working_dtype(self.dtype)), full_matrices=False)
        return u * s.clamp(1 - self.margin, 1 + self.margin).unsqueeze(-2) @ vh

    @torch.no_grad()
    def solve(self, w: Tensor) -> Position:
        """Returns the position of a weight whose singular values are in range; raises NotAFrameError for others."""
        check_tensor(self, w)
        exact = w.to(working_dtype(self.dtype))
        slack = FRAME_TOLERANCE * rounding_limit(self.shape[-1], coarser(self.dtype, w.dtype))
        off = (torch.linalg.svdvals(exact) - 1).abs().max().item()
        got = f"one {off:.2g} away; init='project' takes the nearest weight"
        within_margin = off <= self.margin + slack
        needs(within_margin, NotAFrameError, "Margin", f"singular values within {self.margin:g} of 1", got)
        coordinates, chart = self.invert(exact)
        return rounded(self, coordinates), chart

    def invert(self, w: Tensor) -> Position:
        """Takes the singular value decomposition; a frame is U itself, with :math:`V = I`."""
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
        if (s - 1).abs().max().item() <= 4 * rounding_limit(self.shape[-1], computing_dtype(self.dtype)):
            u, s = nearest_frame(w), torch.ones_like(s)
            vh = torch.eye(s.shape[-1], dtype=w.dtype, device=w.device).expand_as(vh)
        if not w.is_complex():
            # A column of U and one of V may change sign together: make det V = 1, or det U where only V's map takes -1.
            for_u = self.u.traits.component == "rotations" != self.v.traits.component
            sign = torch.linalg.det(u if for_u else vh).sign()[..., None]
            u, vh = u.clone(), vh.clone()
            u[..., -1] *= sign
            vh[..., -1, :] *= sign
        nearly = 1 - torch.finfo(coordinate_dtype(self.dtype)).eps
        relative = ((s - 1) / self.margin if self.margin else s * 0).clamp(-nearly, nearly)
        of_u, chart_u = self.u.invert(u)
        of_v, chart_v = self.v.invert(vh.mH)
        return (*of_u, *of_v, 2 * relative.atanh()), prefixed(u=chart_u, v=chart_v)

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws U by the scheme, with V the identity where its map can be that, and :math:`q = 0`."""
        of_u, chart_u = self.u.initial(scheme, generator)
        scheme_of_v = "identity" if "identity" in self.v.schemes else self.v.schemes[0]
        of_v, chart_v = self.v.initial(scheme_of_v, generator)
        q = torch.zeros(self.coordinates["spectrum"], dtype=torch.float64, device=of_u[0].device)
        return (*of_u, *of_v, q), prefixed(u=chart_u, v=chart_v)

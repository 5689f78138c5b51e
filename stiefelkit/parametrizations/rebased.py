"""Dynamic trivialization: any parametrization, moved so that the present weight is its identity."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.contract.composite import Composite, Inner, of_inner, prefixed
from stiefelkit.contract.param import Parametrization, Position, Traits, check_tensor, rounded
from stiefelkit.errors import OptionError, needs
from stiefelkit.functional import nearest_frame, polish, product
from stiefelkit.metrics import rounding_limit
from stiefelkit.parametrizations._charts import (
    check_matrix,
    component,
    component_of_product,
    from_buffer,
    identity_buffer,
    to_buffer,
)
from stiefelkit.tensors import coordinate_dtype, working_dtype


class Rebased(Composite):
    r""":math:`W = B Q` with Q by any parametrization and a fixed orthogonal or unitary B (n x n), the chart `base`.

    `sk.rebase_` takes the present frame into B and the coordinates back to :math:`Q = I`: done every so many steps,
    training stays where the inner map is nearly an isometry (dynamic trivialization). Assigning and drawing put the
    frame into B too.

    Image: every frame, whatever the inner map's. Cost: that of the inner map, a product n x n x p and, in "exact"
    precision, a polish. For tall frames B takes :math:`n^2` numbers. Not for inner maps that cannot be the identity.

    Args:
        shape, dtype, device: of the frame, (*, n, p), real or complex, and where the base lives.
        precision: "exact", or "fast": without the polish, 10 rounding limits beyond the inner map's bound.
        inner: the map that is wrapped, a registered name or a class.
        inner_options: its options.

    References:
        Lezcano-Casado, Trivializations for gradient-based optimization on manifolds, NeurIPS 2019.

    >>> map = Rebased((2, 2), dtype=torch.float32, inner="cayley")
    >>> map(torch.zeros(1))
    tensor([[1., 0.],
            [0., 1.]])
    """

    precisions: ClassVar[tuple[str, ...]] = ("exact", "fast")
    coordinate_names: ClassVar[tuple[str, ...]] = ("*",)
    frame_buffers: ClassVar[tuple[str, ...]] = ("base",)
    stacks: ClassVar[bool] = True
    coordinates = of_inner("coordinates")
    manifolds = of_inner("manifolds")

    base: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        precision: str = "exact",
        inner: Parametrization = "matrix_exp",
        inner_options: Mapping[str, Any] | None = None,
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        self.inner = Inner(inner, inner_options).build(self, self.shape, device)
        got = f"{self.inner.title} with inner_options={dict(inner_options or {})}; the base takes any frame"
        needs("identity" in self.inner.schemes, OptionError, "Rebased", "an inner map that can be the identity", got)
        *batch, n, _ = self.shape
        self.register_buffer("base", identity_buffer(tuple(batch), n, self.dtype, device))

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: Any) -> str | None:
        return Inner(options.get("inner", "matrix_exp"), options.get("inner_options")).flaw(tuple(shape), dtype)

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        return [
            ((6, 6), {}),
            ((1, 1), {}),
            ((7, 3), {"inner": "cayley"}),
            ((2, 5, 4), {"inner": "householder"}),
            ((6, 6), {"inner": "cayley", "precision": "fast"}),
            ((5, 3), {"inner": "stiefel"}),
        ]

    @property
    def traits(self) -> Traits:
        inner = self.inner.traits
        reached = component_of_product(component(self.shape, self.is_complex), inner.component)
        promises = {"onto": True, "invertible": True, "exact": self._is_exact, "component": reached}
        return replace(inner, **promises, cost_exponent=max(3.0, inner.cost_exponent))

    @property
    def _is_exact(self) -> bool:
        return self.precision == "exact" or coordinate_dtype(self.dtype) == torch.float64

    def options(self) -> dict[str, Any]:
        return self.inner.options()

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        return check_matrix(self, chart) or super().check_chart(chart)

    def error_bound(self, *coordinates: Tensor) -> float:
        exact = super().error_bound()
        if self._is_exact:
            return exact
        return exact + self.inner.error_bound(*coordinates) + 10 * rounding_limit(self.shape[-2], torch.float32)

    def forward(self, *coordinates: Tensor) -> Tensor:
        w = self._frame(*coordinates)
        if self._is_exact:
            # A base of float32 is no frame of float64 after one polish.
            w = polish(polish(w) if w.dtype == working_dtype(w.dtype) else w)
        return w.to(self.dtype)

    def _frame(self, *coordinates: Tensor) -> Tensor:
        """Returns B Q before it is polished and rounded."""
        q = self.inner(*coordinates)
        return product(from_buffer(self.base, self.is_complex).to(q.dtype), q)

    def invert(self, w: Tensor) -> Position:
        """Takes W into the base, completed by any other columns, with the coordinates of the identity."""
        coordinates, chart = self.inner.initial("identity", torch.default_generator)
        coordinates = tuple(c.to(w.device) for c in coordinates)
        chart = {name: value.to(w.device) for name, value in chart.items()}
        # Not the first columns of the identity where the inner map cannot be that, as tall blocks on a diagonal.
        q = torch.func.functional_call(self.inner, chart, rounded(self.inner, coordinates)).to(w.dtype)
        base = _completed(w) @ _completed(nearest_frame(q)).mH
        return coordinates, {"base": to_buffer(base)} | prefixed(inner=chart)

    def rebased(self, *coordinates: Tensor) -> Position:
        """Returns the coordinates and the chart that put the present frame into the base."""
        with torch.no_grad():
            w = self._frame(*coordinates)
            check_tensor(self, w)
            return self.invert(nearest_frame(w.to(working_dtype(w.dtype))))


def _completed(w: Tensor) -> Tensor:
    """Returns a square frame whose first columns are W."""
    q, _ = torch.linalg.qr(w, mode="complete")
    q[..., : w.shape[-1]] = w
    return q

"""Growth of time and memory of the parametrizations with sizes and numbers of frames, with steps and batches."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stiefelkit.contract.table import option_names
from stiefelkit.errors import StiefelkitError
from stiefelkit.measuring.races.clock import Run, peak_bytes, product_of
from stiefelkit.measuring.races.contenders import OPERATIONS, FrameProblem, dtype_of, our_contenders
from stiefelkit.measuring.races.field import Field, Race, Row, Watch, quiet, seeded
from stiefelkit.measuring.races.plan import INPUTS, WIDTH, GrowthPlan
from stiefelkit.measuring.races.schedule import NO_TIME, Deadline, deadline_of
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.training.memory import threads
from stiefelkit.weights.attach import available

PRODUCT = "one product"
"""Name of the yardstick, the matrix product of that size."""
LOGARITHM = 0.25
"""The most by which a factor log x raises an exponent fitted beyond x = 55."""


@dataclass(frozen=True)
class PowerLaw:
    """y = c x^k over a range.

    Attributes:
        exponent: k; None from fewer than two points.
        spread: standard error of k; None from two points, which any law fits.
        first, last: smallest and largest x of the fit.
        overhead_until: from the smallest x measured up to this one y hardly grows, and the fit leaves it out; None if
            it grows from the start.
    """

    exponent: float | None = None
    spread: float | None = None
    first: float | None = None
    last: float | None = None
    overhead_until: float | None = None

    def faster_than(self, expected: float) -> bool:
        """Returns whether k is above what was expected by more than twice its spread and what a factor log x adds."""
        return self.exponent is not None and self.exponent - 2 * (self.spread or 0.0) > expected + LOGARITHM


def fit(xs: Sequence[float], ys: Sequence[float], expected: float) -> PowerLaw:
    """Fits log y = log c + k log x by least squares.

    Points at the low end, from which y grows to the next point by less than half of the expected exponent, are
    overhead: what is paid whatever the size. They are left out, but for the last two points. The xs are growing, and
    all are positive.

    >>> fit([1, 2, 4, 8], [5, 5, 20, 80], expected=2).overhead_until
    1
    """
    if len(xs) < 2:
        return PowerLaw()
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    start = 0
    while start < len(xs) - 2 and v[start + 1] - v[start] < expected / 2 * (u[start + 1] - u[start]):
        start += 1
    u, v = torch.tensor([u[start:], v[start:]], dtype=torch.float64)
    u, v = u - u.mean(), v - v.mean()
    width = float(u @ u)
    k = float(u @ v) / width
    spread = math.sqrt(float((v - k * u).square().sum()) / (len(u) - 2) / width) if len(u) > 2 else None
    return PowerLaw(k, spread, xs[start], xs[-1], xs[start - 1] if start else None)


class _Variant(NamedTuple):
    """A parametrization in a precision and a dtype that it has."""

    name: str
    precision: str
    dtype: torch.dtype


def races(plan: GrowthPlan, watch: Watch = quiet, deadline: Deadline | None = None) -> Iterator[Race]:
    """Measures axis by axis, and yields a race for each quantity when one is over: the axis is its subject."""
    deadline = deadline or deadline_of(plan)
    variants = {}
    for name, cls in available().items():
        if not plan.parametrizations or name in plan.parametrizations:
            precision = plan.precision if plan.precision in cls.precisions else cls.precisions[0]
            variants[name] = _Variant(name, precision, dtype_of(cls, getattr(torch, plan.dtype)))
    for done, axis in enumerate(plan.against):
        of_axis, points = deadline.part(1 / (len(plan.against) - done)), plan.points(axis)
        left_out: dict[str, str] = {}
        series: dict[str, dict[str, dict[int, float]]] = {what: {} for what in plan.what}
        for before, x in enumerate(points):
            field = Field(f"{axis} = {x}", (), watch, {}, of_axis, 1 / (len(points) - before))
            with threads(plan.threads):
                for what, values in _point(plan, variants, axis, x, field).items():
                    for name, value in values.items():
                        series[what].setdefault(name, {})[x] = value
            late = [name for name, reason in field.left_out.items() if reason == NO_TIME]
            left_out |= {name: reason for name, reason in field.left_out.items() if reason != NO_TIME}
            shown = late if any(x in values for each in series.values() for values in each.values()) else ["all"]
            left_out |= {f"{name} ({field.subject})": NO_TIME for name in shown if late}
        for what in plan.what:
            names = [name for name in (PRODUCT, *variants) if name in series[what]]
            rows = [_row(plan, what, axis, name, variants.get(name), series[what][name]) for name in names]
            yield Race(axis, what, rows, left_out)


def _point(
    plan: GrowthPlan, variants: Mapping[str, _Variant], axis: str, x: int, field: Field
) -> dict[str, dict[str, float]]:
    """Returns quantity to contender to what was measured at one value of what grows."""
    if axis == "reflections":
        able = [name for name in variants if axis in option_names(available()[name])]
        if plan.parametrizations:
            field.left_out |= {name: "it has no reflectors" for name in variants if name not in able}
        variants = {name: variants[name] for name in able}
    with seeded(plan.seed):
        prepare = _map if axis in ("n", "matrices") else _layer
        runs = field.tried(field.attempt("preparing", variants, lambda name: prepare(plan, variants[name], axis, x)))
    device, values = torch.device(plan.device), {}
    if "time" in plan.what:
        is_map = prepare is _map
        n, frames = plan.sizes_at(axis, x)[:2] if is_map else (WIDTH, 1)
        product = product_of(n, n, frames, getattr(torch, plan.dtype), device)
        unit, timings = field.timed(plan, product, runs, "time")
        values["time"] = {PRODUCT: unit} if is_map and not math.isnan(unit) else {}
        values["time"] |= {name: timing.median for name, timing in timings.items()}
    if "memory" in plan.what:
        # a map to a point that is its own coordinate allocates nothing, which has no logarithm
        peaks = field.attempt("memory of", runs, lambda name: float(peak_bytes(runs[name], device)))
        values["memory"] = {name: size for name, size in peaks.items() if size > 0}
    return values


def _map(plan: GrowthPlan, variant: _Variant, axis: str, x: int) -> Run:
    n, frames, _, _ = plan.sizes_at(axis, x)
    problem = FrameProblem(n, n, frames, variant.dtype, torch.device(plan.device), {}, plan.seed)
    (contender,) = our_contenders([variant.name], [variant.precision], {}).values()
    entry = contender.enter(problem)
    return OPERATIONS["forward_backward"](entry, problem.gradient())


def _layer(plan: GrowthPlan, variant: _Variant, axis: str, x: int) -> Run:
    n, _, steps, batch = plan.sizes_at(axis, x)
    options = {"reflections": x, "factored": True} if axis == "reflections" else {}
    device, source = torch.device(plan.device), torch.Generator().manual_seed(plan.seed)
    layer = OrthogonalRNN(
        INPUTS,
        n,
        parametrization=variant.name,
        precision=variant.precision,
        field="complex" if variant.dtype.is_complex else "real",
        dtype=variant.dtype.to_real(),
        device=device,
        **options,
    )
    parameters = list(layer.parameters())
    inputs = torch.randn(steps, batch, INPUTS, dtype=variant.dtype.to_real(), generator=source).to(device)
    g = (torch.randn(steps, batch, n, dtype=variant.dtype, generator=source) * n**-0.5).to(device)
    return lambda: torch.autograd.grad(layer(inputs)[0], parameters, g)


def _row(
    plan: GrowthPlan, what: str, axis: str, name: str, variant: _Variant | None, measured: Mapping[int, float]
) -> Row:
    expected = 1.0 if axis != "n" else 2.0 if what == "memory" else 3.0
    if variant and axis == "n" and what == "time":
        with contextlib.suppress(StiefelkitError):  # what its traits declare, at one size
            cls = available()[name]
            expected = cls((4, 4), dtype=variant.dtype, precision=variant.precision).traits.cost_exponent
    points, values = list(measured), list(measured.values())
    law = fit(points, values, expected)
    figures = {
        "contender": name,
        "precision": None if variant is None else variant.precision,
        "dtype": plan.dtype if variant is None else str(variant.dtype).removeprefix("torch."),
        **{"device": plan.device, "what": what, "against": axis, "points": points, "values": values},
        **{"expected": expected, **dataclasses.asdict(law), "faster": law.faster_than(expected)},
    }
    return Row(figures)

"""How time and memory of the parametrizations grow with the size of a frame, their number, the steps and the batch."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from stiefelkit.contract.table import option_names
from stiefelkit.errors import StiefelkitError
from stiefelkit.measuring.growth.allocations import peak_bytes
from stiefelkit.measuring.growth.fit import fit
from stiefelkit.measuring.growth.plan import GrowthPlan
from stiefelkit.measuring.races.clock import Run, product_of
from stiefelkit.measuring.races.contenders import OPERATIONS, our_contenders
from stiefelkit.measuring.races.course import Course, Watch
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.training.memory import threads
from stiefelkit.weights.attach import available

__all__ = ["PRODUCT", "GrowthHeat", "GrowthRow", "heats"]

PRODUCT = "one product"
"""Name of the yardstick, the matrix product of that size."""
WIDTH = 64
"""Rows and columns of the frames of which there are many, and of the recurrent weight."""
STEPS, BATCH, INPUTS = 64, 16, 8
"""Of the recurrent layer where they are not what grows."""
WIDE, LONG = 1024, 128
"""Units and steps of the layer whose reflectors grow."""


@dataclass(frozen=True)
class GrowthRow:
    """One contender on one axis.

    Args:
        contender: the parametrization, or "one product".
        precision: of the parametrization; None for the product.
        dtype: of the frames.
        device: cpu or cuda.
        what: "time", in seconds, or "memory", in bytes.
        against: the axis.
        points: what grew.
        values: what was measured there; the medians of times.
        expected: time against n: `traits.cost_exponent`; memory against n: 2, as the frame itself; otherwise 1.
        exponent, spread, first, last, overhead_until: of the `PowerLaw` through them; None where there are fewer than
            two points.
        faster: whether it grows faster than expected, by more than twice the spread and a logarithm.
    """

    contender: str
    precision: str | None
    dtype: str
    device: str
    what: str
    against: str
    points: list[int]
    values: list[float]
    expected: float
    exponent: float | None = None
    spread: float | None = None
    first: float | None = None
    last: float | None = None
    overhead_until: float | None = None
    faster: bool = False


@dataclass(frozen=True)
class GrowthHeat:
    """One quantity on one axis, a row a contender, and for those that could not take part the reason."""

    what: str
    against: str
    rows: list[GrowthRow]
    left_out: dict[str, str]


@dataclass(frozen=True)
class _Variant:
    """A contender: who, in which dtype, and what its trait says of it at one size."""

    name: str
    precision: str
    dtype: torch.dtype

    def cost(self) -> float:
        """The exponent that its traits declare."""
        try:
            return available()[self.name]((4, 4), dtype=self.dtype, precision=self.precision).traits.cost_exponent
        except StiefelkitError:
            return 3.0


def heats(plan: GrowthPlan, watch: Watch = lambda what, done, rounds: None) -> Iterator[GrowthHeat]:
    """Measures axis by axis, and yields a heat for each quantity when it is over."""
    variants = {variant.name: variant for variant in _variants(plan)}
    for axis in plan.against:
        left_out: dict[str, str] = {}
        series: dict[str, dict[str, dict[int, float]]] = {what: {} for what in plan.what}
        for x in plan.points(axis):
            with threads(plan.threads):
                for what, values in _point(plan, variants, axis, x, watch, left_out).items():
                    for name, value in values.items():
                        series[what].setdefault(name, {})[x] = value
        for what in plan.what:
            names = [name for name in (PRODUCT, *variants) if name in series[what]]
            rows = [_row(plan, what, axis, name, variants.get(name), series[what][name]) for name in names]
            yield GrowthHeat(what, axis, rows, left_out)


def _variants(plan: GrowthPlan) -> list[_Variant]:
    dtype, variants = getattr(torch, plan.dtype), []
    for name, cls in available().items():
        if plan.parametrizations and name not in plan.parametrizations:
            continue
        refused = cls.supports((4, 4), dtype) is not None
        precision = plan.precision if plan.precision in cls.precisions else cls.precisions[0]
        variants.append(_Variant(name, precision, dtype.to_complex() if refused else dtype))
    return variants


def _point(
    plan: GrowthPlan, variants: Mapping[str, _Variant], axis: str, x: int, watch: Watch, left_out: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Quantity to contender to what was measured at one value of what grows."""
    course = Course(f"{axis} = {x}", (), watch, left_out)
    if axis == "reflections":
        able = [name for name in variants if axis in option_names(available()[name])]
        if plan.parametrizations:
            left_out |= {name: "it has no reflectors" for name in variants if name not in able}
        variants = {name: variants[name] for name in able}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        prepare = _map if axis in ("n", "matrices") else _layer
        runs = course.attempt("preparing", variants, lambda name: prepare(plan, variants[name], axis, x))
    able = course.attempt("trying", runs, lambda name: runs[name]())
    runs = {name: runs[name] for name in able}
    device, values = torch.device(plan.device), {}
    if "time" in plan.what:
        n, batch = (x, 1) if axis == "n" else (WIDTH, x if axis == "matrices" else 1)
        product = product_of(n, n, batch, getattr(torch, plan.dtype), device)
        unit, timings = course.timed(plan, product, runs, "time")
        values["time"] = {name: timing.median for name, timing in timings.items()}
        if axis in ("n", "matrices"):
            values["time"] = {PRODUCT: unit, **values["time"]}
    if "memory" in plan.what:
        # a map to a point that is its own coordinate allocates nothing, which has no logarithm
        peaks = course.attempt("memory of", runs, lambda name: float(peak_bytes(runs[name], device)))
        values["memory"] = {name: size for name, size in peaks.items() if size > 0}
    return values


def _map(plan: GrowthPlan, variant: _Variant, axis: str, x: int) -> Run:
    n, batch = (x, 1) if axis == "n" else (WIDTH, x)
    problem = FrameProblem(n, n, batch, variant.dtype, torch.device(plan.device), {}, plan.seed)
    (contender,) = our_contenders([variant.name], [variant.precision], {}).values()
    entry = contender.enter(problem)
    return OPERATIONS["forward_backward"](entry, problem.gradient())


def _layer(plan: GrowthPlan, variant: _Variant, axis: str, x: int) -> Run:
    steps, batch, n, options = (x, BATCH, WIDTH, {}) if axis == "T" else (STEPS, x, WIDTH, {})
    if axis == "reflections":
        steps, batch, n, options = LONG, 1, WIDE, {"reflections": x, "factored": True}
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
) -> GrowthRow:
    if axis != "n":
        expected = 1.0
    elif what == "memory":
        expected = 2.0
    else:
        expected = 3.0 if variant is None else variant.cost()
    points, values = list(measured), list(measured.values())
    law = fit(points, values, expected)
    fitted = {} if law is None else dataclasses.asdict(law) | {"faster": law.faster_than(expected)}
    return GrowthRow(
        contender=name,
        precision=None if variant is None else variant.precision,
        dtype=plan.dtype if variant is None else str(variant.dtype).removeprefix("torch."),
        device=plan.device,
        what=what,
        against=axis,
        points=points,
        values=values,
        expected=expected,
        **fitted,
    )

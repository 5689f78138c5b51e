"""One weight under one gradient after the other, for every method at every size; what is written and drawn of it."""

import contextlib
import dataclasses
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stiefelkit import init
from stiefelkit.errors import RunError, StiefelkitError
from stiefelkit.measuring.drift.plan import SUBJECT, UNCONSTRAINED, DriftPlan
from stiefelkit.measuring.moved_frames import peer_optimizers, start
from stiefelkit.measuring.races.contenders import dtype_of
from stiefelkit.measuring.races.field import Field, Watch, quiet
from stiefelkit.measuring.races.schedule import Course, Deadline, deadline_of
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.optim import optimizers, parameter_groups
from stiefelkit.training.figure import (
    COLOURS,
    Figures,
    figure,
    literal,
    reference_line,
    styles,
)
from stiefelkit.training.files import parse_json, writable, write_json
from stiefelkit.training.memory import threads
from stiefelkit.training.tasks import create
from stiefelkit.weights.attach import available, orthogonal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PIXELS, CLASSES, IMAGES = 64, 10, 64
"""Sizes of the handwritten digits: numbers in an image, kinds, and images for each gradient."""
ERROR = r"$\Vert W^H W - I\Vert_F$ / rounding limit"
HIGHEST = 1e9
"""The largest error that is shown: beyond it a weight is lost, and would only squeeze the others."""


@dataclass(frozen=True)
class DriftCurve:
    """Orthogonality of one n x p weight along a run, beside its rounding limit.

    Args:
        steps: optimizer steps done, log-spaced.
        errors: the largest orthogonality error that was seen after the step before, up to this one; NaN from the step
            on after which one was not finite, where the run ends.
    """

    method: str
    n: int
    p: int
    limit: float
    steps: list[int] = field(repr=False)
    errors: list[float] = field(repr=False)
    dtype: str = "float32"

    @property
    def ratios(self) -> list[float]:
        """The errors in multiples of the limit."""
        return [error / self.limit for error in self.errors]

    @property
    def worst(self) -> float:
        """The largest ratio of the run; NaN if an error was."""
        return self.worst_until(self.steps[-1])

    def worst_until(self, step: int) -> float:
        """Returns the largest ratio up to a step."""
        ratios = [ratio for at, ratio in zip(self.steps, self.ratios, strict=True) if at <= step]
        return math.nan if any(map(math.isnan, ratios)) else max(ratios)


@dataclass(frozen=True)
class Skipped:
    """A method that cannot do what was asked of an n x p weight, and the reason."""

    method: str
    n: int
    p: int
    reason: str


@dataclass(frozen=True)
class DriftOutcome:
    """A curve for each method and size in the order of measurement; what was skipped; drift.json and the figure."""

    curves: list[DriftCurve] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


Pace = Mapping[tuple[int, int, str], tuple[float, float]]
"""Size and method to the seconds that its start takes, and one step."""
MARGIN = 0.8
"""The part of the time left that the steps of a quick form are to take."""
PILOT = 3
"""Steps by which a pace is measured."""


def measure(
    plan: DriftPlan,
    out: Path,
    watch: Watch = quiet,
    figures: Figures | None = None,
    deadline: Deadline | None = None,
    begin: Callable[[DriftPlan, Course], None] | None = None,
) -> DriftOutcome:
    """Takes every method through the steps at every size, and writes `drift.json` and `drift.png`.

    `drift.json` is replaced as a whole after each curve, so that an interruption loses only the one at work; its entry
    "finished" says whether all are there. Without a curve there is none.

    The folder `out` is made if missing. After the deadline, that of the plan, from now on, if left out, methods are
    left out. `watch` is called after each look, with the method and the steps done; `begin` with the plan, of as many
    steps as fit before the deadline, and its course, when that is known.

    Raises:
        RunError: there is a `drift.json` already, which is not overwritten, or the folder cannot be written.
    """
    record, done, figures = out / "drift.json", DriftOutcome(), figures or Figures()
    if record.exists():
        raise RunError(f"{SUBJECT} needs a folder without drift.json, got {out}; choose another --out.")
    with writable(SUBJECT, out):
        out.mkdir(parents=True, exist_ok=True)
    deadline = deadline or deadline_of(plan)
    found = pace(plan, deadline.part(1 / 3)) if begin or plan.quick else {}
    plan = fitted(plan, found, deadline)
    course = Course([start + plan.steps * step for start, step in found.values()])
    if begin:
        begin(plan, course)
    try:
        for count, outcome in enumerate(outcomes(plan, watch, deadline), 1):
            course.finished()
            if isinstance(outcome, DriftCurve):
                done.curves.append(outcome)
            else:
                done.skipped.append(outcome)
            content = {
                "plan": dataclasses.asdict(plan),
                "finished": count == len(plan.sizes) * len(plan.methods),
                "curves": [dataclasses.asdict(curve) | {"worst": curve.worst} for curve in done.curves],
                "skipped": [dataclasses.asdict(method) for method in done.skipped],
            }
            if done.curves:
                write_json(record, content)
    finally:
        if done.curves:
            done.files[:] = [record, figures.path(out, "drift")]
            _draw(done.files[-1], done.curves, f"{plan.dtype}, {plan.gradients} gradients", figures.dpi)
    return done


def outcomes(plan: DriftPlan, watch: Watch = quiet, deadline: Deadline | None = None) -> Iterator[DriftCurve | Skipped]:
    """Takes every method through the steps at every size, and yields what became of it; writes nothing."""
    deadline = deadline or deadline_of(plan)

    def measured(n: int, p: int, method: str) -> DriftCurve:
        def looked(step: int) -> None:
            deadline.check()
            watch(f"{method}, {n} x {p}", step, plan.steps)

        return run(plan, method, n, p, looked)

    for (n, p), method in itertools.product(plan.sizes, plan.methods):
        field = Field(f"{n} x {p}", peer_optimizers.names(), quiet, deadline=deadline)
        with threads(plan.threads):
            found = field.attempt("drift of", [method], partial(measured, n, p))
        yield found[method] if found else Skipped(method, n, p, field.left_out[method])


def pace(plan: DriftPlan, deadline: Deadline) -> Pace:
    """Measures how fast every method is at every size, by a few steps; (0, 0) of one that cannot do them."""
    trial, found = dataclasses.replace(plan, steps=min(PILOT, plan.steps), look_every=1), {}
    for (n, p), method in itertools.product(plan.sizes, plan.methods):
        looks = [time.monotonic()]
        with contextlib.suppress(StiefelkitError, RuntimeError, TypeError, ValueError, AttributeError):
            deadline.check()
            with threads(plan.threads):
                run(trial, method, n, p, lambda step, looks=looks: looks.append(time.monotonic()))
        start, *ends = looks
        step = min((after - before for before, after in itertools.pairwise(ends)), default=0.0)
        found[n, p, method] = (ends[0] - start, step) if ends else (0.0, 0.0)
    return found


def fitted(plan: DriftPlan, found: Pace, deadline: Deadline) -> DriftPlan:
    """Returns the plan with 1, 2 or 5 times a power of ten steps, the most that fit before a deadline, at most its own.

    >>> plan = DriftPlan(steps=1000, methods=("cayley",))
    >>> fitted(plan, {(64, 64, "cayley"): (0.1, 0.01)}, Deadline(5.0)).steps
    200
    """
    starts, step = (sum(seconds) for seconds in zip(*found.values(), strict=True)) if found else (0.0, 0.0)
    if not step or starts + plan.steps * step <= MARGIN * deadline.left:
        return plan
    most = max((MARGIN * deadline.left - starts) / step, 1.0)
    power = 10 ** math.floor(math.log10(most))
    return dataclasses.replace(plan, steps=min(plan.steps, max(k for k in (1, 2, 5) if k * power <= most) * power))


def log_grid(steps: int, per_decade: int = 8) -> list[int]:
    """Returns log-spaced step numbers from 0 to `steps`, both included.

    >>> log_grid(10, per_decade=2)
    [0, 1, 3, 10]
    """
    inner = (round(10 ** (k / per_decade)) for k in range(math.ceil(per_decade * math.log10(max(steps, 1)))))
    return sorted({0, steps, *(step for step in inner if step < steps)})


def run(plan: DriftPlan, method: str, n: int, p: int, watch: Callable[[int], None] = lambda step: None) -> DriftCurve:
    """Takes an n x p weight through the steps of a plan, and calls `watch` with their number after each look."""
    dtype: torch.dtype = getattr(torch, plan.dtype)
    torch.manual_seed(plan.seed)
    gradient = _gradients(plan, n, p, torch.Generator().manual_seed(plan.seed))
    weight, step = _started(plan, method, n, p, gradient)

    def error() -> float:
        with torch.no_grad():
            with _surroundings(plan):
                w = weight()
            return float(orthogonality_error(w))

    grid, errors, seen = log_grid(plan.steps), [error()], []
    # At regular looks, what an optimizer does every so many steps would always be seen, or never.
    source, look = random.Random(plan.seed), 0
    for done in range(1, plan.steps + 1):
        if done % plan.look_every == 1 % plan.look_every:
            look = done + source.randrange(plan.look_every)
        with _surroundings(plan):
            with torch.no_grad():
                g = gradient(weight())
            step(g)
        is_due = done == grid[len(errors)]
        if is_due or done == look:
            seen.append(error())
            watch(done)
            if not math.isfinite(seen[-1]):
                errors += [math.nan] * (len(grid) - len(errors))
                break
        if is_due:
            errors.append(max(seen))
            seen = []
    return DriftCurve(method, n, p, rounding_limit(p, dtype), grid, errors, plan.dtype)


@contextlib.contextmanager
def _surroundings(plan: DriftPlan) -> Iterator[None]:
    """Context with autocast and TF32, where the plan asks for them."""
    flags = torch.backends.cuda.matmul
    with contextlib.ExitStack() as stack:
        if plan.tf32:
            stack.callback(setattr, flags, "fp32_precision", flags.fp32_precision)
            flags.fp32_precision = "tf32"
        stack.enter_context(torch.autocast(torch.device(plan.device).type, torch.bfloat16, enabled=plan.autocast))
        yield


def _gradients(plan: DriftPlan, n: int, p: int, source: torch.Generator) -> Callable[[Tensor], Tensor]:
    dtype: torch.dtype = getattr(torch, plan.dtype)

    def drawn(columns: int = p, rows: int = n, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype, generator=source).to(plan.device)

    if plan.gradients == "random":
        return lambda w: drawn()
    if plan.gradients == "fixed":
        g = drawn()
        return lambda w: g.clone()
    if plan.gradients == "digits":
        real = dtype.to_real() if dtype.is_complex else dtype
        return _of_digits(drawn(rows=PIXELS) / PIXELS**0.5, drawn(CLASSES, dtype=real) / n**0.5, plan.seed)
    x = drawn(n)
    a = x - x.mH
    return lambda w: a @ w


def _of_digits(before: Tensor, after: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """Returns the gradient of the cross-entropy of |x R W^T| V by W, a batch of images after the other.

    The weight W is the only layer that is trained; R, shape (PIXELS, p), and V, real, shape (n, CLASSES), stay as they
    are. The modulus makes logits real where the weight is complex.
    """
    task, steps = create("digits", {}), itertools.count()

    def gradient(w: Tensor) -> Tensor:
        x, y = (tensor.to(w.device) for tensor in task.batch(next(steps), IMAGES, seed))
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            hidden = F.linear(x.flatten(1).to(before.dtype) @ before, leaf).abs()
            loss = F.cross_entropy((hidden @ after.to(hidden.dtype)).float(), y)
            return torch.autograd.grad(loss, leaf)[0]

    return gradient


def _started(
    plan: DriftPlan, method: str, n: int, p: int, gradient: Callable[[Tensor], Tensor]
) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """Returns what reads the weight, and what makes a step with a gradient."""
    dtype: torch.dtype = getattr(torch, plan.dtype)
    if method not in (*available(), UNCONSTRAINED):
        frame = init.haar((n, p), working_dtype(dtype)).to(plan.device)
        moved = start(method, frame, gradient(frame.to(dtype)), plan.step_length, dtype)
        return lambda: moved.frame, moved.step
    layer = nn.Linear(p, n, bias=False, dtype=dtype, device=plan.device)
    if method == UNCONSTRAINED:
        layer.weight.data.copy_(init.haar((n, p), working_dtype(dtype)))
    else:
        orthogonal(layer, "weight", method, init=available()[method]((n, p), dtype=dtype).schemes[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* holds no frame")  # as of most maps, on purpose
        optimizer = optimizers.get(plan.optimizer)(parameter_groups(layer, lr=plan.lr))

    def step(g: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        (layer.weight * g.conj()).real.sum().backward()
        optimizer.step()

    return lambda: layer.weight, step


def _draw(path: Path, curves: Sequence[DriftCurve], words: str, dpi: int) -> None:
    """Draws errors over the limit against steps, a panel for each size, with `words` in the titles."""
    sizes = list(dict.fromkeys((curve.n, curve.p) for curve in curves))
    by_size = [[curve for curve in curves if (curve.n, curve.p) == size] for size in sizes]
    look = looks([curve.method for each in by_size for curve in each if curve not in band(each)])
    width, height = 3.8 + 2.0 / len(sizes), max(3.4, 0.19 * len(look))
    with figure(path, len(sizes), width=width, height=height, dpi=dpi) as panels:
        for axes, (n, p), each in zip(panels, sizes, by_size, strict=True):
            draw_panel(axes, each, look)
            axes.set(title=f"{n} x {p}, {words}")
        panels[0].set_ylabel(ERROR)
        shown = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        panels[-1].legend(shown.values(), shown.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5))


def redraw(record: Path, out: Path, figures: Figures) -> Path:
    """Draws the figure of a `drift.json` again, in another format or elsewhere; returns where."""
    try:
        content = parse_json(record.read_bytes())
        names = [field.name for field in dataclasses.fields(DriftCurve)]
        curves = [DriftCurve(**{name: curve[name] for name in names}) for curve in content["curves"]]
        for curve in curves:
            curve.errors[:] = [math.nan if error is None else error for error in curve.errors]
        words = f"{curves[0].dtype}, {content['plan']['gradients']} gradients"
    except (LookupError, TypeError, ValueError) as error:
        raise RunError(f"The figure of drift needs a file as stiefelkit drift writes it, got {record}.") from error
    path = figures.path(out, "drift")
    _draw(path, curves, words, figures.dpi)
    return path


def near_orthogonal() -> list[str]:
    """Returns the maps whose weights are not frames, and not meant to be, by their traits."""
    names = []
    for name, cls in available().items():
        with contextlib.suppress(StiefelkitError):
            names += [] if cls((4, 4), dtype=dtype_of(cls, torch.float32)).traits.exact else [name]
    return names


def band(curves: Sequence[DriftCurve]) -> list[DriftCurve]:
    """Returns the curves of one size that are drawn as one band.

    They are ours, where peers or more curves than colours are beside them. Methods in precision fast, maps that are
    near orthogonal only, and weights that were lost keep lines of their own.
    """
    peers = peer_optimizers.names()
    others = {*peers, *near_orthogonal(), UNCONSTRAINED}
    ours = [curve for curve in curves if not (curve.method in others or ":" in curve.method or math.isnan(curve.worst))]
    ours = [curve for curve in ours if curve.steps == ours[0].steps]
    return ours if len(ours) > (1 if any(curve.method in peers for curve in curves) else len(COLOURS)) else []


def looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns method to the options of its line: dashes for peers, grey for the weight that nothing holds."""
    look: dict[str, dict[str, Any]] = {UNCONSTRAINED: {"color": "0.55"}}
    coloured = [method for method in dict.fromkeys(methods) if method != UNCONSTRAINED]
    look.update(zip(coloured, styles(len(coloured) + 1)[1:], strict=True))  # the first is the band's
    for method in set(coloured) & set(peer_optimizers.names()):
        look[method]["linestyle"] = "--"
    return look


def draw_panel(axes: "Axes", curves: Sequence[DriftCurve], look: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws the curves of one size into axes: those of the band from the least error, 0 aside, to the largest."""
    ours = band(curves)
    if ours:
        errors = [[ratio for ratio in at if ratio] or [math.nan] for at in zip(*(c.ratios for c in ours), strict=True)]
        label, least, most = f"stiefelkit, {len(ours)} methods", [min(at) for at in errors], [max(at) for at in errors]
        axes.fill_between(ours[0].steps, least, most, color=COLOURS[0], alpha=0.5, linewidth=1.5, label=label)
    for curve in curves:
        if curve not in ours:
            axes.plot(curve.steps, curve.ratios, label=literal(curve.method), **look[curve.method])
    axes.set_xscale("symlog", linthresh=1)
    axes.set(xlabel="optimizer step")
    axes.set_xlim(0, max(curve.steps[-1] for curve in curves))
    error_scale(axes)


def error_scale(axes: "Axes") -> None:
    """Makes the y axis one of errors over the rounding limit, which is drawn."""
    reference_line(axes, 1.0, "rounding limit", below=True)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.1), min(max(high, 10), HIGHEST))

"""Orthogonality under many optimizer steps: one weight under one gradient after the other."""

import base64
import contextlib
import dataclasses
import io
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from stiefelkit import init
from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.errors import RunError, needs
from stiefelkit.figure import Figures, figure, literal, reference_line
from stiefelkit.files import writable, write_json
from stiefelkit.machine import threads
from stiefelkit.measuring.clock import WARM_UPS, Run
from stiefelkit.measuring.contest import Contest, DriftCurve, ProgressCallback, Race, Row, Schedule, captured, quiet
from stiefelkit.measuring.implementations import dtype_of, near_orthogonal
from stiefelkit.measuring.moved_frames import imported, own_optimizers, peer_optimizers, start
from stiefelkit.measuring.plans import UNCONSTRAINED, DriftPlan, torch_dtype
from stiefelkit.metrics import bits_lost, orthogonality_error, rounding_limit, working_dtype
from stiefelkit.optim import optimizers, parameter_groups
from stiefelkit.weights.attach import available, orthogonal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ERROR = r"$\Vert W^H W - I\Vert_F$ / rounding limit"
HIGHEST = 1e9  # the largest error that is shown: beyond it a weight is lost, and would only squeeze the others
PIXELS, CLASSES, IMAGES = 64, 10, 64
"""Sizes of the handwritten digits: numbers in an image, kinds, and images for each gradient."""
FRAME_OPTIMIZER = "multiplicative_cayley"
"""Trains a parametrization with a frame as a coordinate, where the optimizer of the plan moves none."""
QUICK_STEPS = 100  # steps of a quick form, at most
LAUNCHED = 100  # steps launched one by one before replays of a graph, which have to come to the same bits


def measure(
    plan: DriftPlan, out: Path, figures: Figures, watch: ProgressCallback = quiet, schedule: Schedule | None = None
) -> Iterator[Race]:
    """Yields the races of a plan, and writes them to `drift.json` and a figure in a folder, if there is a curve.

    `drift.json` is replaced as a whole after each method, so that an interruption loses only the one at work; its entry
    "finished" says whether all are there. One that is there already is not overwritten.
    """
    record, done = out / "drift.json", list[Race]()
    needs(not record.exists(), RunError, plan.subject, "a folder without drift.json; choose another --out", str(out))
    with writable(plan.subject, out):
        out.mkdir(parents=True, exist_ok=True)

    def write(races: list[Race]) -> None:
        done[:] = races
        curves = [curve.figures for race in races for curve in race.curves]
        skipped = [
            {"method": method, "n": n, "p": p, "reason": reason}
            for (n, p), race in zip(plan.sizes, races, strict=False)
            for method, reason in race.left_out.items()
        ]
        is_whole = len(curves) + len(skipped) == len(plan.sizes) * len(plan.methods)
        if curves:
            entries = {"plan": dataclasses.asdict(plan), "finished": is_whole, "curves": curves, "skipped": skipped}
            write_json(record, entries)

    try:
        yield from races(plan, watch, schedule, write)
    finally:
        if curves := [curve for race in done for curve in race.curves]:
            draw_drift(figures.path(out, "drift"), curves, f"{plan.gradients} gradients", figures.dpi)


def races(
    plan: DriftPlan,
    watch: ProgressCallback = quiet,
    schedule: Schedule | None = None,
    after_each: Callable[[list[Race]], None] = lambda races: None,
) -> Iterator[Race]:
    """Takes every method through the steps, in a quick form at most `QUICK_STEPS`, and yields the curves of each size.

    After each method `after_each` gets all races so far, the one at work too.
    """
    schedule, done = schedule or Schedule.of(plan), list[Race]()
    if plan.quick:
        plan = dataclasses.replace(plan, steps=min(plan.steps, QUICK_STEPS))

    def measured(n: int, p: int, method: str) -> DriftCurve:
        def looked(step: int) -> None:
            schedule.check()
            watch(f"{method}, {n} x {p}", step, plan.steps)

        with threads(plan.threads):
            return run(plan, method, n, p, looked)

    for n, p in plan.sizes:
        contest = Contest(f"{n} x {p}", {*peer_optimizers, *plan.imported}, schedule=schedule)
        done.append(Race(f"{n} x {p}, {plan.gradients} gradients", "drift", [], contest.left_out))
        for method in plan.methods:
            for curve in contest.attempt("drift of", [method], partial(measured, n, p)).values():
                done[-1].rows.append(Row({"contender": method, **curve.figures}, is_peer=method in peer_optimizers))
            after_each(done)
        yield done[-1]


def failures(plan: DriftPlan, done: Iterable[Race], bits: float) -> list[str]:
    """Returns who lost more bits than that, or was left out, of the methods given by import path, or of all."""
    found = []
    for race in done:
        lost = {row.name: bits_lost(row["worst"], 1.0) for row in race.rows}
        for name in plan.imported or plan.methods:
            if not lost.get(name, math.nan) <= bits:  # NaN is above every limit
                words = f"lost {lost[name]:.3g} bits, {bits:g} permitted" if name in lost else "was not measured"
                found.append(f"{name}, {race.subject}: {words}.")
    return found


def log_grid(steps: int, per_decade: int = 8) -> list[int]:
    """Returns log-spaced step numbers from 0 to `steps`, both included.

    >>> log_grid(10, per_decade=2)
    [0, 1, 3, 10]
    """
    inner = (round(10 ** (k / per_decade)) for k in range(math.ceil(per_decade * math.log10(max(steps, 1)))))
    return sorted({0, steps, *(step for step in inner if step < steps)})


def run(plan: DriftPlan, method: str, n: int, p: int, watch: Callable[[int], None] = lambda step: None) -> DriftCurve:
    """Takes an n x p weight through the steps of a plan, and calls `watch` with their number after each look."""
    cls = _map_of(plan, method)
    if cls is not None and issubclass(cls, OrthogonalParam):
        own = str(dtype_of(cls, torch_dtype(plan.dtype))).removeprefix("torch.")
        plan = plan if own == plan.dtype else dataclasses.replace(plan, methods=(method,), dtype=own)
    dtype = torch_dtype(plan.dtype)

    def started() -> tuple[Callable[[], Tensor], Run]:
        """Returns what reads the weight, and what makes a step."""
        torch.manual_seed(plan.seed)
        gradient = _gradients(plan, n, p, torch.Generator().manual_seed(plan.seed))
        weight, step = _started(plan, method, n, p, gradient)

        def advance() -> None:
            with _surroundings(plan):
                with torch.no_grad():
                    g = gradient(weight())
                step(g)

        return weight, advance

    def error() -> float:
        with torch.no_grad():
            with _surroundings(plan):
                w = weight()
            return float(orthogonality_error(w))

    weight, advance = started()
    grid, errors, seen = log_grid(plan.steps), [error()], []
    # At regular looks, what an optimizer does every so many steps would always be seen, or never.
    source, look = random.Random(plan.seed), 0
    for done in range(1, plan.steps + 1):
        if done % plan.look_every == 1 % plan.look_every:
            look = done + source.randrange(plan.look_every)
        if plan.replay and done == LAUNCHED + 1:
            launched, (weight, advance) = weight(), started()
            advance = captured(advance, torch.device(plan.device))
            for _ in range(LAUNCHED - WARM_UPS):
                advance()
            needs(torch.equal(weight(), launched), RunError, "A graph", "the bits of launched steps", "others")
        advance()
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
    dtype = torch_dtype(plan.dtype)

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
    """Returns the gradient by W of the cross-entropy of |x R W^T| V, R and V fixed, batch after batch."""
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part).to(before.device) for part in load_digits(return_X_y=True))
    images, source = images.to(before.dtype) / 16, torch.Generator().manual_seed(seed)

    def gradient(w: Tensor) -> Tensor:
        chosen = torch.randint(len(labels), (IMAGES,), generator=source).to(w.device)
        x, y = images[chosen], labels[chosen]
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            hidden = F.linear(x @ before, leaf).abs()
            loss = F.cross_entropy((hidden @ after.to(hidden.dtype)).float(), y)
            return torch.autograd.grad(loss, leaf)[0]

    return gradient


def _map_of(plan: DriftPlan, method: str) -> type[nn.Module] | None:
    """Returns the class of a map, by its name or import path; None for other methods."""
    return imported(plan.subject, method, nn.Module) if method == plan.map else available().get(method)


def _started(
    plan: DriftPlan, method: str, n: int, p: int, gradient: Callable[[Tensor], Tensor]
) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """Returns what reads the weight, and what makes a step with a gradient."""
    dtype = torch_dtype(plan.dtype)
    cls = _map_of(plan, method)
    if cls is None and method != UNCONSTRAINED:
        frame = init.haar((n, p), working_dtype(dtype)).to(plan.device)
        moved = start(method, frame, gradient(frame.to(dtype)), plan.step_length, dtype)
        return lambda: moved.frame, moved.step
    layer = nn.Linear(p, n, bias=False, dtype=dtype, device=plan.device)
    name = "adam" if plan.optimizer in plan.imported else plan.optimizer
    if cls is None or not issubclass(cls, OrthogonalParam):
        layer.weight.data.copy_(init.haar((n, p), working_dtype(dtype)))
        if cls is not None:
            parametrize.register_parametrization(layer, "weight", cls())
    else:
        param = cls((n, p), dtype=dtype)
        if param.manifolds and name not in own_optimizers():
            name = FRAME_OPTIMIZER
        orthogonal(layer, "weight", cls, init=param.schemes[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* holds no frame")  # as of most maps, on purpose
        capturable = {"capturable": True} if plan.replay else {}
        optimizer = optimizers.get(name)(parameter_groups(layer, lr=plan.lr), **capturable)

    def step(g: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        (layer.weight * g.conj()).real.sum().backward()
        optimizer.step()

    return lambda: layer.weight, step


def draw_drift(target: Path | io.BytesIO, curves: Sequence[DriftCurve], words: str, dpi: int = 200) -> None:
    """Draws errors over the limit against steps, a panel for each size, with `words` in the titles."""
    sizes = list(dict.fromkeys((curve.n, curve.p) for curve in curves))
    with figure(target, len(sizes), dpi) as panels:
        for axes, (n, p) in zip(panels, sizes, strict=True):
            draw_panel(axes, [curve for curve in curves if (curve.n, curve.p) == (n, p)])
            axes.set(title=f"{n} x {p}, {words}")
            axes.legend(fontsize="small")
        panels[0].set_ylabel(ERROR)


def draw_panel(axes: "Axes", curves: Sequence[DriftCurve]) -> None:
    """Draws the curves of one size into axes."""
    others = {*peer_optimizers, *near_orthogonal(), UNCONSTRAINED}
    ours = [curve for curve in curves if not (curve.method in others or ":" in curve.method or math.isnan(curve.worst))]
    ours = ours if len(ours) < len(curves) and any(curve.method in peer_optimizers for curve in curves) else []
    for number, curve in enumerate(ours):
        label = f"stiefelkit, {len(ours)} methods" if number == 0 else None
        axes.plot(curve.steps, curve.ratios, color="C0", label=label)
    alone = [curve for curve in curves if curve not in ours]
    for number, curve in enumerate(alone, 1):
        colour = "0.55" if curve.method == UNCONSTRAINED else f"C{number % 10}"
        line = "--" if curve.method in peer_optimizers else "-"
        axes.plot(curve.steps, curve.ratios, color=colour, linestyle=line, label=literal(curve.method))
    axes.set_xscale("symlog", linthresh=1)
    axes.set(xlabel="optimizer step")
    reference_line(axes, 1.0, "rounding limit")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.1), min(max(high, 10), HIGHEST))


def chart(race: Race) -> tuple[str, str, str]:
    """Returns heading, what a reader hears who cannot see it, and address of the image of a race of drift."""
    content = io.BytesIO()
    draw_drift(content, race.curves, race.subject.partition(", ")[2])
    worst = "; ".join(f"{curve.method} at most {curve.worst:.3g} rounding limits" for curve in race.curves)
    source = f"data:image/svg+xml;base64,{base64.b64encode(content.getvalue()).decode()}"
    return race.subject, f"{race.subject}: {worst}.", source

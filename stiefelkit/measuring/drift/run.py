"""One weight under one gradient after the other."""

import contextlib
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stiefelkit import init
from stiefelkit.measuring.drift.plan import UNCONSTRAINED, DriftPlan
from stiefelkit.measuring.moved_frames import start
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.optim import optimizers, parameter_groups
from stiefelkit.training.tasks import create
from stiefelkit.weights.attach import available, orthogonal

__all__ = ["DriftCurve", "log_grid", "run"]

Step = Callable[[Tensor], None]
PIXELS, CLASSES, IMAGES = 64, 10, 64
"""Of the handwritten digits: numbers in an image, kinds, and images for each gradient."""


@dataclass(frozen=True)
class DriftCurve:
    """Orthogonality of one weight along a run.

    Args:
        method: its name.
        n: rows of the weight.
        p: columns.
        limit: the rounding limit.
        steps: optimizer steps done, log-spaced.
        errors: the largest orthogonality error that was seen after the step before, up to this one; NaN from the step
            on after which one was not finite, where the run ends.
        dtype: of the weight.
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


def log_grid(steps: int, per_decade: int = 8) -> list[int]:
    """Returns log-spaced step numbers from 0 to `steps`, both included.

    >>> log_grid(10, per_decade=2)
    [0, 1, 3, 10]
    """
    count = math.ceil(per_decade * math.log10(steps)) if steps > 1 else 0
    inner = {round(10 ** (k / per_decade)) for k in range(count)}
    return sorted({0, steps} | {step for step in inner if step < steps})


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
    before = flags.fp32_precision
    if plan.tf32:
        flags.fp32_precision = "tf32"
    try:
        with torch.autocast(torch.device(plan.device).type, torch.bfloat16, enabled=plan.autocast):
            yield
    finally:
        if plan.tf32:
            flags.fp32_precision = before


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
) -> tuple[Callable[[], Tensor], Step]:
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

"""How orthogonality fares under many optimizer steps, for every parametrization."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit.errors import OptionError, RunError, StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.experiments.checks import at_least, at_most, finite_positive
from stiefelkit.experiments.config import optimizers
from stiefelkit.experiments.figure import figure, log_scale, reference_line, styles
from stiefelkit.experiments.files import write_atomically
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype

__all__ = ["DTYPES", "UNCONSTRAINED", "Curve", "Plan", "Skipped", "measure"]

DTYPES = {
    "complex128": torch.complex128,
    "complex64": torch.complex64,
    "float32": torch.float32,
    "float64": torch.float64,
}
UNCONSTRAINED = "unconstrained"
"""The name of the reference: an ordinary weight that starts orthogonal and is held by nothing."""


@dataclass(frozen=True)
class Curve:
    """Orthogonality of one weight along a run.

    Args:
        method: name of the parametrization.
        size: n of the n x n weight.
        limit: the rounding limit.
        steps: optimizer steps done, log-spaced.
        errors: the orthogonality error at those steps.
    """

    method: str
    size: int
    limit: float
    steps: list[int]
    errors: list[float]

    @property
    def ratios(self) -> list[float]:
        """Errors in multiples of the limit."""
        return [error / self.limit for error in self.errors]


@dataclass(frozen=True)
class Skipped:
    """A method that cannot do what was asked.

    Args:
        method: name of the parametrization.
        size: n of the n x n weight.
        reason: why not.
    """

    method: str
    size: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        steps: optimizer steps under random gradients.
        methods: names of parametrizations, or "unconstrained"; all of them if empty.
        sizes: n of the n x n weights.
        dtype: float32, float64, complex64 or complex128.
        optimizer: as in training.
        lr: learning rate.
        seed: fixes the initial weights and the gradients.
    """

    steps: int = 1000
    methods: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (64,)
    dtype: str = "float32"
    optimizer: str = "adam"
    lr: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        from stiefelkit import available

        at_least("The drift experiment", "steps", self.steps, 1)
        at_least("The drift experiment", "seed", self.seed, 0)
        at_most("The drift experiment", "seed", self.seed, 2**63 - 1)
        finite_positive("The drift experiment", "lr", self.lr)
        if not self.sizes:
            raise OptionError("The drift experiment needs one size or more, got none.")
        for size in self.sizes:
            at_least("The drift experiment", "size", size, 1)
        if self.dtype not in DTYPES:
            raise OptionError(f"The drift experiment has no dtype {self.dtype!r}{did_you_mean(self.dtype, DTYPES)}")
        optimizers.get(self.optimizer)
        known = [*available(), UNCONSTRAINED]
        for method in self.methods:
            if method not in known:
                raise UnknownNameError(f"No parametrization is named {method!r}{did_you_mean(method, known)}")
        if not self.methods:
            object.__setattr__(self, "methods", tuple(known))


def measure(
    plan: Plan, out: Path, watch: Callable[[str, int], None] = lambda method, size: None
) -> tuple[list[Curve], list[Skipped], list[Path]]:
    """Trains every method at every size, and writes `drift.json` and `drift.png`.

    Args:
        plan: what to measure.
        out: folder for the two files; made if missing.
        watch: called with method and size before each.

    Returns:
        The curves, the methods that were skipped, and the files.

    Raises:
        RunError: there is a `drift.json` already, which is not overwritten.
    """
    record, picture = out / "drift.json", out / "drift.png"
    if record.exists():
        raise RunError(f"The drift experiment needs a folder without drift.json, got {out}; choose another --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"The drift experiment needs a place that can be written, got {out}: {error.strerror}."
        ) from error
    curves: list[Curve] = []
    skipped: list[Skipped] = []
    for size in plan.sizes:
        for method in plan.methods:
            watch(method, size)
            try:
                curves.append(_curve(plan, method, size))
            except StiefelkitError as error:
                skipped.append(Skipped(method, size, str(error)))
            except RuntimeError as error:
                if "alloc" not in str(error):
                    raise
                skipped.append(Skipped(method, size, "it does not fit into memory."))
    content = {
        "plan": dataclasses.asdict(plan),
        "curves": [dataclasses.asdict(curve) for curve in curves],
        "skipped": [dataclasses.asdict(each) for each in skipped],
    }
    try:
        write_atomically(record, (json.dumps(_finite(content), indent=2, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise RunError(
            f"The drift experiment needs a place that can be written, got {out}: {error.strerror}."
        ) from error
    files = [record]
    if curves:
        _draw(plan, curves, picture)
        files.append(picture)
    return curves, skipped, files


def _finite(value: Any) -> Any:
    """JSON has no word for NaN and infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def log_grid(steps: int, per_decade: int = 8) -> list[int]:
    """Returns log-spaced step numbers from 0 to `steps`, both included.

    >>> log_grid(10, per_decade=2)
    [0, 1, 3, 10]
    """
    count = math.ceil(per_decade * math.log10(steps)) if steps > 1 else 0
    inner = {round(10 ** (k / per_decade)) for k in range(count)}
    return sorted({0, steps} | {step for step in inner if step < steps})


def _curve(plan: Plan, method: str, size: int) -> Curve:
    from stiefelkit import orthogonal
    from stiefelkit.optim import parameter_groups

    dtype = DTYPES[plan.dtype]
    torch.manual_seed(plan.seed)
    layer = nn.Linear(size, size, bias=False, dtype=dtype)
    if method == UNCONSTRAINED:
        frame, _ = torch.linalg.qr(torch.randn(size, size, dtype=working_dtype(dtype)))
        layer.weight.data.copy_(frame)
    else:
        orthogonal(layer, "weight", method)
    optimizer = optimizers.get(plan.optimizer)(parameter_groups(layer, lr=plan.lr))
    source = torch.Generator().manual_seed(plan.seed)
    grid = log_grid(plan.steps)
    errors = [_error(layer)]
    for step in range(1, plan.steps + 1):
        gradient = torch.randn(size, size, dtype=dtype, generator=source)
        optimizer.zero_grad(set_to_none=True)
        (layer.weight * gradient.conj()).real.sum().backward()
        optimizer.step()
        if step == grid[len(errors)]:
            errors.append(_error(layer))
    return Curve(method, size, rounding_limit(size, dtype), grid, errors)


def _error(layer: nn.Linear) -> float:
    with torch.no_grad():
        weight: Tensor = layer.weight
        return float(orthogonality_error(weight))


def _draw(plan: Plan, curves: list[Curve], path: Path) -> None:
    bound = [method for method in plan.methods if method != UNCONSTRAINED]
    look: dict[str, dict[str, Any]] = {UNCONSTRAINED: {"color": "0.55"}}
    look.update(zip(bound, styles(len(bound)), strict=True))
    with figure(path, len(plan.sizes), width=3.8, height=3.2) as panels:
        for axes, size in zip(panels, plan.sizes, strict=True):
            for curve in (curve for curve in curves if curve.size == size):
                axes.plot(curve.steps, curve.ratios, label=curve.method, **look[curve.method])
            reference_line(axes, 1.0, "rounding limit", below=True)
            axes.set_xscale("symlog", linthresh=1)
            axes.set(title=f"{size} x {size}, {plan.dtype}", xlabel="optimizer step")
            axes.set_yscale("log")
            axes.set_xlim(0, plan.steps)
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.1), max(high, 10))
            log_scale(axes)
        panels[0].set_ylabel(r"$\Vert W^H W - I\Vert_F$ / rounding limit")
        panels[-1].legend(loc="best")

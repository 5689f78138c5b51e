"""Cases of the laws of optimizers: an optimizer with settings, frames in a dtype, and gradients."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from stiefelkit import init
from stiefelkit.errors import OptionError
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.testing import seeds
from stiefelkit.weights.optimizer_hooks import MANIFOLDS

SHAPES = ((6, 6), (7, 3), (2, 5, 4), (6, 6), (4, 1))
_DTYPES = (torch.float32, torch.complex64, torch.float64, torch.complex128)
RATE = 0.05
SAME = 1e-6  # largest difference of two roads to one frame of a few rows, in single precision


@dataclass(frozen=True)
class OptimizerCase:
    """One optimizer of frames with settings, the dtype of the frames that it moves, and where."""

    cls: type[Optimizer]
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...] = ()
    device: str = "cpu"

    @property
    def is_wide(self) -> bool:
        """True if frames are in float64 or complex128."""
        return self.dtype == working_dtype(self.dtype)

    def __str__(self) -> str:
        options = "".join(f"-{key}={value}" for key, value in self.options)
        return f"{self.cls.__name__}-{str(self.dtype).removeprefix('torch.')}{options}"

    def frames(self, *shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
        """Draws frames, the same ones in every dtype of a field."""
        drawn = [init.haar(shape, working_dtype(self.dtype), seeds.generator(i)) for i, shape in enumerate(shapes)]
        return [nn.Parameter(w.to(self.device, dtype or self.dtype)) for w in drawn]

    def make(self, groups: ParamsT, **settings: object) -> Optimizer:
        """Makes the optimizer, with these settings before those of the case."""
        make: Callable[..., Optimizer] = self.cls
        return make(groups, **{"lr": RATE, **dict(self.options), **settings})

    def on(self, ws: Sequence[Tensor], manifold: str = MANIFOLDS[0], **settings: object) -> Optimizer:
        """Makes the optimizer on one group of frames."""
        return self.make([{"params": list(ws), "manifold": manifold}], **settings)


def give_gradients(ws: Iterable[Tensor], number: int, size: float = 1.0) -> None:
    """Gives each parameter a gradient of some norm at most, the same numbers in every dtype of a field."""
    for i, w in enumerate(ws):
        g = torch.randn(w.shape, dtype=working_dtype(w.dtype), generator=seeds.generator(1000 * number + i))
        w.grad = (g * (size / (1 + i % 3) / g.norm())).to(w.device, w.dtype)


def walk(optimizer: Optimizer, ws: Sequence[Tensor], numbers: Iterable[int], size: float = 1.0) -> None:
    """Makes a step for each number, with the gradients that belong to it."""
    for number in numbers:
        give_gradients(ws, number, size)
        optimizer.step()


def snapshot(optimizer: Optimizer) -> tuple[list[Tensor], list[dict[str, object]]]:
    """Returns everything that a step may write: parameters and states."""
    members = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.detach().clone() for p in members], [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in members]


def equal(a: object, b: object) -> bool:
    """Returns whether two trees of tensors and numbers have the same bits."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def error_and_bound(w: Tensor, promised: float) -> tuple[float, float]:
    """Returns ||W^H W - I||_F, the largest of a batch, and so many rounding limits, plus eps."""
    limit = rounding_limit(w.shape[-1], w.dtype)
    return orthogonality_error(w).max().item(), promised * limit + torch.finfo(w.dtype).eps


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Returns the largest Frobenius norm of the differences, in double precision."""
    return max(
        torch.dist(x.to(working_dtype(x.dtype)), y.to(working_dtype(y.dtype))).item() for x, y in zip(a, b, strict=True)
    )


def mixed(case: OptimizerCase) -> tuple[list[nn.Parameter], Optimizer]:
    """Returns two groups of frames, of either manifold, and one of a free parameter."""
    ws = case.frames(*SHAPES)
    ws.append(nn.Parameter(torch.linspace(-1, 1, 5, device=case.device)))
    groups = [{"params": ws[:3], "manifold": MANIFOLDS[0]}, {"params": ws[3:5], "manifold": MANIFOLDS[1]}]
    return ws, case.make([*groups, {"params": ws[5:], "lr": 0.01}])


def optimizer_cases(cls: type[Optimizer], device: str = "cpu") -> list[OptimizerCase]:
    """Returns the first example of an optimizer, `cls`, on a device in every dtype, others in one by turns."""
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise OptionError(f"The laws of optimizers need a subclass of torch.optim.Optimizer, got {cls!r}.")
    return [
        OptimizerCase(cls, dtype, tuple(options.items()), device)
        for i, options in enumerate(getattr(cls, "examples", ({},)))
        for dtype in (_DTYPES[i % 2 : i % 2 + 1] if i else _DTYPES)
    ]

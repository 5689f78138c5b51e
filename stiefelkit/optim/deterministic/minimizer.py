"""The base of optimizers of deterministic losses: parameters, settings, the closure, when to stop, checkpoints."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit._torch import write_count
from stiefelkit.errors import CheckpointError, NonFiniteError, OptimizerError, OptionError, needs, shown
from stiefelkit.functional._arithmetic.product import FullPrecision
from stiefelkit.metrics import working_dtype
from stiefelkit.numbers import as_python_number
from stiefelkit.optim import checks
from stiefelkit.optim.batch import Group
from stiefelkit.optim.deterministic.objective import Objective, Position
from stiefelkit.optim.deterministic.space import Space
from stiefelkit.optim.settings import Setting, at_least, document_settings, integer, is_number, signature
from stiefelkit.tensors import is_sharded

OF_ALL = (
    Setting("max_iter", 20, integer(1), "iterations of a step at most, as those of torch.optim.LBFGS."),
    Setting(
        "tolerance_grad",
        1e-10,
        at_least(0),
        "length of the Riemannian gradient at which a step ends, times that of the Euclidean one at the start of the "
        "step, if that is below 1.",
    ),
)
"""Settings of every minimizer."""
Memory = dict[str, Any]  # of `Minimizer.iterate`: numbers, and real tensors whose last axis is that of flat vectors
_IDLE = 20  # iterations without progress after which rounding is measured; twice as many next time
_KEPT = ("manifold", "name", "params", "param_names", "weight_decay", "lr")
"""Keys in which groups may differ; settings are the same in all."""

_EXAMPLE = """\
>>> import torch, stiefelkit as sk
>>> a = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
>>> w = torch.nn.Parameter(sk.init.haar((6, 2)))
>>> optimizer = {name}(sk.optim.frames(w), max_iter=100)
>>> _ = optimizer.step(lambda: -torch.trace(w.mT @ a @ w))
>>> round(optimizer.progress.loss, 12)
-11.0
"""


@dataclass(frozen=True)
class Progress:
    """How far a minimizer has come.

    Attributes:
        loss: where it is.
        gradient_norm: length of the Riemannian gradient there.
        iterations: how many the last step took.
        evaluations: how often it asked the closure.
        products: how many products with the Hessian it needed.
        is_done: whether the gradient is as short as was asked for, or as rounding lets it be.
        stopped: why the last step ended. "gradient": it is as short as `tolerance_grad` asks for; "rounding": it is as
            short as the rounding of the loss, in its dtype, lets it be; "max_iter": as many iterations as allowed are
            made; "no_descent": nothing lower was found, though the gradient is longer than rounding, as at a kink of
            the loss, or where the gradient is not that of the values.
    """

    loss: float
    gradient_norm: float
    iterations: int
    evaluations: int
    products: int
    is_done: bool
    stopped: str


class Minimizer(torch.optim.Optimizer, ABC):
    """Minimises a loss that is the same whenever it is asked for; frames stay frames, other parameters move freely.

    All parameters are one point of one product of manifolds. `step(closure)` takes iterations until the gradient is
    short enough, nothing lower is found or `max_iter` of them are made, goes to the best point that it saw, and returns
    what the closure gave first, as torch.optim.LBFGS does. The closure returns the loss; it may call `backward()`,
    after clearing the gradients, or leave that to the step. `progress` tells how far the last step has come, and why it
    ended. Whatever the dtype, points and vectors are worked with in float64.

    A subclass has settings, and `iterate`. Losses are read on the host, on every device; this is no optimizer for
    batches that are drawn anew, for frames that are sharded (FSDP2), or for graphs that are captured.
    """

    moves_frames: ClassVar[bool] = True
    """Declares that frames stay on their manifold, so that the optimizer may hold them."""
    settings: ClassVar[tuple[Setting, ...]] = OF_ALL
    """The settings, from which signature and docstring are made."""
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """Settings that the laws run with."""
    needs_products: ClassVar[bool] = False
    """Whether it asks for products with the Hessian."""
    progress: Progress | None = None
    """How far the last step has come."""
    watch: Callable[[list[Tensor], float, float], object] | None = None
    """Called after each iteration with the points, in float64, the loss, and the length of the gradient."""
    _call: ClassVar[inspect.Signature]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = cls._call = signature(cls.settings)
        document_settings(cls, cls.settings, _EXAMPLE)

    def __init__(self, params: Iterable[Any], *args: Any, **settings: Any):
        self._versions: dict[int, int] = {}
        name = type(self).__name__
        params, chosen = checks.read_arguments(name, self.settings, self._call, params, *args, **settings)
        super().__init__(params, {"manifold": None, **chosen})

    @abstractmethod
    def iterate(self, objective: Objective, here: Position, memory: Memory) -> Position | None:
        """Goes on to the next point, or returns `here` where a step was refused, or None if nothing is to be gained.

        `memory` is what this method has kept, empty at first; its vectors are tangent where `here` is.
        """

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group after its checks; all need the same settings, one precision and one device."""
        name = type(self).__name__
        for group in checks.by_manifold(name, param_group):
            if isinstance(group, dict):
                checks.check_spelling(name, set(group), [*self.defaults, *_KEPT])
                full = {**self.defaults, **group}
                self._check_group(full, self.param_groups[0] if self.param_groups else full)
                group = {key: full[key] for key in group}
                checks.check_members(name, full["manifold"], checks.members_of(full))
            super().add_param_group(group)
            kinds = {(working_dtype(p.dtype).to_real(), p.dtype.to_real(), p.device) for p in self._params()}
            if len(kinds) > 1 or any(map(is_sharded, self._params())):
                self.param_groups.pop()
                got = f"{len(kinds)} of them" if len(kinds) > 1 else "sharded ones"
                raise OptionError(f"{name} needs whole parameters of one precision on one device, got {got}.")
            checks.watch_loose_frames(self.param_groups[-1])

    def _check_group(self, group: Group, first: Mapping[str, Any]) -> None:
        """Makes the numbers of a group Python's; raises OptionError unless in range and those of the first group."""
        name = type(self).__name__
        for setting in self.settings:
            key = setting.name
            group[key] = setting.check.require(name, key, group[key])
            got = f"{shown(first[key])} and {shown(group[key])}"
            needs(first[key] == group[key], OptionError, name, f"one {key} for all groups", got)
        if group["manifold"] is not None:
            checks.check_manifold(name, group["manifold"])
        decay = group.get("weight_decay")
        needs(not decay, OptionError, name, "weight_decay=0, for it belongs to the loss", decay)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Takes iterations, and returns what the closure, which computes the loss, returned at first.

        Raises NonFiniteError if the loss or a gradient is not finite at the start; nothing is changed then.
        """
        name = type(self).__name__
        if closure is None or not callable(closure):
            raise OptimizerError(f"{name} needs a closure that computes the loss, got {shown(closure)}.")
        for group in self.param_groups:
            self._check_group(group, self.param_groups[0])
        params, settings = self._params(), self.param_groups[0]
        before = [p.detach().clone() for p in params]
        manifolds = [group["manifold"] for group in self.param_groups for _ in group["params"]]
        likes = [p.detach().to(working_dtype(p.dtype)) for p in params]
        memory = self._recall(params)
        unit = memory.pop("unit", 1.0) if memory else None  # what is kept is in units of it
        objective = Objective(name, closure, params, Space(likes, manifolds), self.needs_products, unit)
        iterations, idle, patience, stopped = 0, 0, _IDLE, ""
        try:
            with FullPrecision(params[0].device):
                first = here = objective.start()
                # Relative to gradients that are small from the start, but for numbers that are not normal.
                tolerance = settings["tolerance_grad"] * min(1 / objective.scale, objective.steepest)
                tolerance = max(tolerance, torch.finfo(params[0].dtype).tiny / objective.scale)
                for iterations in range(settings["max_iter"] + 1):
                    stopped = _verdict(here, tolerance)
                    if stopped or iterations == settings["max_iter"]:
                        break
                    best, objective.reached = objective.best, min(objective.reached, here.loss)
                    there = self.iterate(objective, here, memory)
                    idle = idle + 1 if objective.best is best else 0
                    if there is not None and self.watch is not None:
                        self.watch(there.points, there.loss * objective.scale, there.norm * objective.scale)
                    if there is not None and idle < patience:
                        here = there
                        continue
                    # Nothing is gained any more, as far as the losses tell.
                    shortest, has_grown = objective.measured(objective.best or here)
                    stopped = _verdict(shortest, tolerance)
                    if stopped or (there is None and not has_grown):
                        here, stopped = objective.on_manifold(shortest), stopped or "no_descent"
                        memory.clear()
                        break
                    if has_grown:
                        memory.clear()
                    idle, patience = 0, 2 * patience
                    here = objective.at((there or here).points)
                if objective.best and here.loss > objective.lowest + here.noise:
                    here = objective.on_manifold(objective.best)
                    memory.clear()
                    stopped = stopped and (_verdict(here, tolerance) or "no_descent")
                objective.write(here.points)
        except BaseException:
            for p, w in zip(params, before, strict=True):
                p.copy_(w)
            raise
        if memory and objective.scale != 1:
            memory["unit"] = objective.scale
        self._keep(params, memory)
        self.progress = Progress(
            here.loss * objective.scale,
            here.norm * objective.scale,
            iterations,
            objective.evaluations,
            objective.products,
            is_done=stopped in ("gradient", "rounding"),
            stopped=stopped or "max_iter",
        )
        return first.returned

    def _recall(self, params: list[Tensor]) -> Memory:
        """Returns what was kept at the last step, unless somebody else has moved the parameters since."""
        if any(write_count(p) != self._versions.get(id(p), write_count(p)) for p in params):
            return {}
        return _cast(self.state.get(params[0], {}), working_dtype(params[0].dtype).to_real())

    def _keep(self, params: list[Tensor], memory: Memory) -> None:
        # torch casts what it loads to the dtype of the parameter.
        self.state[params[0]] = _cast(memory, params[0].dtype.to_real())
        self._versions = {id(p): write_count(p) for p in params}

    def state_dict(self) -> dict[str, Any]:
        """Returns groups and states, with numbers that are Python's."""
        return as_python_number(super().state_dict(), keep=Tensor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, after all of it was checked; what is refused changes nothing."""
        state_dict = as_python_number(state_dict, keep=Tensor)
        checks.check_states(self, state_dict, torch.optim.LBFGS)
        name = type(self).__name__
        names = {setting.name for setting in self.settings}
        groups = [
            {key: value for key, value in group.items() if key in names} | saved
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        for group in groups:
            self._check_group(group, groups[0])
        size = sum(p.numel() * (1 + p.is_complex()) for p in self._params())
        for entry in state_dict["state"].values():
            for key, value in entry.items():
                _check_kept(f"{name}: {key}", value, size)
        super().load_state_dict({**state_dict, "param_groups": groups})
        self._versions = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what copies, and what loads a state dict."""
        super().__setstate__(state)
        self._versions = {}
        for group in self.param_groups:
            checks.watch_loose_frames(group)


def _cast(kept: Mapping[str, Any], dtype: torch.dtype) -> Memory:
    return {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in kept.items()}


def _verdict(here: Position, tolerance: float) -> str:
    """Returns why a gradient is short enough, or nothing where it is not."""
    return "gradient" if here.norm <= tolerance else "rounding" if here.norm <= here.floor else ""


def _check_kept(who: str, value: object, size: int) -> None:
    """Raises unless a value is a finite number, or a real tensor (*, size)."""
    if not isinstance(value, Tensor):
        needs(is_number(value) and math.isfinite(value), CheckpointError, who, "a finite number", shown(value))
        return
    fits = value.is_floating_point() and value.shape[-1:] == (size,)
    needs(fits, CheckpointError, who, f"a real tensor of {size} columns", f"{tuple(value.shape)} in {value.dtype}")
    needs(bool(torch.isfinite(value).all()), NonFiniteError, who, "finite numbers", "NaN or infinity")

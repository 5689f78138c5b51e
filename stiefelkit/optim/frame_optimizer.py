"""The base of optimizers of frames: settings, groups and their checks, checkpoints, and steps all or nothing."""

import inspect
import math
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit._torch import check_capture, unhooked_step
from stiefelkit.errors import CheckpointError, needs
from stiefelkit.functional._arithmetic.devices import without_reads
from stiefelkit.numbers import as_python_number
from stiefelkit.optim import checks
from stiefelkit.optim.batch import Bucket, Group, Sorted, begin_buckets
from stiefelkit.optim.settings import RATE, WEIGHT_DECAY, Setting, document_settings, signature

_EXAMPLE = """\
>>> import torch, stiefelkit as sk
>>> layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "stiefel")
>>> optimizer = {name}(sk.optim.parameter_groups(layer, lr=1e-3, stiefel=dict(lr={lr})))
>>> layer(torch.ones(4)).square().sum().backward()
>>> optimizer.step()
"""


class FrameOptimizer(torch.optim.Optimizer, ABC):
    """Moves the frames in groups that name a manifold along it; a torch optimizer moves all other groups.

    Frames of one shape, dtype and group are moved as one batch. Sharded frames (FSDP2) are gathered, moved on each
    rank and scattered. A gradient with NaN or infinity raises before anything is written. On devices beside CPUs no
    value is read: there nothing of the group moves then, and "refused" in the states of its frames, a number on the
    device, counts that.

    A subclass is data, its settings and the torch optimizer of all other groups, and `move`, how frames go. Those that
    go along a tangent vector derive from `TangentOptimizer`, which has that. It is called with groups, as
    `sk.optim.parameter_groups` gives them: those of frames have "manifold"; with the rate, and other settings by name.
    """

    moves_frames: ClassVar[bool] = True
    """Declares that frames stay on their manifold, so that the optimizer may hold them."""
    free_optimizer: ClassVar[type[torch.optim.Optimizer]]
    """Moves the parameters of groups without a manifold."""
    settings: ClassVar[tuple[Setting, ...]] = ()
    """The rate and the other settings of a group, from which signature and docstring are made."""
    positional: ClassVar[int] = 1
    """How many of them, the rate first, may be given without their names."""
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """Settings that the laws run with: they cover every branch, and the last makes every state that there can be."""
    steady: ClassVar[Mapping[str, Any]] = {}
    """Settings that leave steps as long as the rate makes them: no momentum, no bound."""
    _call: ClassVar[inspect.Signature]
    _names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._call = signature(cls.settings, cls.positional)
        cls._names = tuple(setting.name for setting in cls.settings if setting.name != "lr")
        cls.__signature__ = cls._call
        if cls.__init__ is not FrameOptimizer.__init__:  # or what a base has would hold for it
            constructor = inspect.signature(cls.__init__)
            cls.__signature__ = constructor.replace(parameters=[*constructor.parameters.values()][1:])
        document_settings(cls, cls.settings, _EXAMPLE)

    def __init__(self, params: Iterable[Any], *args: Any, **settings: Any):
        params, chosen = checks.read_arguments(
            type(self).__name__, self.settings, self._call, params, *args, **settings
        )
        self._begin()
        defaults = {**self._free.defaults, "manifold": None, **chosen}
        self._checked(defaults)  # also those that every group has its own of
        super().__init__(params, defaults)
        if all(group["manifold"] is None for group in self.param_groups):
            warnings.warn(
                f"{type(self).__name__} holds no frame and moves all parameters as torch.optim."
                f"{self.free_optimizer.__name__} does; sk.optim.frames([w]) makes a group of frames, "
                "sk.optim.parameter_groups(model, lr=...) those of a model.",
                stacklevel=2,
            )
        elif WEIGHT_DECAY in self.settings and all(group["manifold"] is not None for group in self.param_groups):
            self._checked({**self.param_groups[0], **chosen})  # for the decay that no group would have

    def _begin(self) -> None:
        """Makes what no state dict holds: how frames were sorted and written last, and what moves the other groups."""
        self._writes: dict[int, int] = {}
        self._sorted: dict[int, Sorted] = {}
        self._validated: dict[int, list[Any]] = {}
        self._free = _probing(self.free_optimizer)
        self._step_of_free = unhooked_step(self.free_optimizer)

    def _checked(self, group: Group) -> Group:
        return checks.check_group(type(self).__name__, self.settings, group)

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group after its checks; tensors that name a manifold themselves become a group of their own."""
        name = type(self).__name__
        groups = checks.by_manifold(name, param_group)
        for i, group in enumerate(groups):
            if isinstance(group, dict):
                checks.check_spelling(name, set(group), [*self.defaults, "params", "name", "param_names"])
                full = self._checked({**self.defaults, **group})
                groups[i] = {key: full[key] for key in group}
                checks.check_members(name, full["manifold"], checks.members_of(full))
        for group in groups:
            super().add_param_group(group)
            checks.watch_loose_frames(self.param_groups[-1])
            self._validated[id(self.param_groups[-1])] = [*map(self.param_groups[-1].get, self._names)]

    def state_dict(self) -> dict[str, Any]:
        """Returns groups and states, of every parameter once one has any, which is {} where nothing is kept.

        `torch.distributed.checkpoint` takes all parameters to have a state, or none. Numbers are Python's, whatever a
        scheduler has written, since `torch.load` refuses others by default.
        """
        full = as_python_number(super().state_dict(), keep=Tensor)
        if full["state"]:
            for group in full["param_groups"]:
                for key in group["params"]:
                    full["state"].setdefault(key, {})
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, after all of it was checked; what is refused changes nothing."""
        needs(isinstance(state_dict, Mapping), CheckpointError, type(self).__name__, "a state dict", state_dict)
        # As the last of the hooks, since those before it may mend what they are given.
        check = self.register_load_state_dict_pre_hook(lambda _, loaded: self._check_state_dict(loaded))
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            check.remove()

    def _check_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a state dict with settings as they are called here."""
        state_dict = as_python_number(dict(state_dict), keep=Tensor)
        checks.check_states(self, state_dict, self.free_optimizer)
        # Copies, as a state is written to; torch.optim.SGD has None for a momentum that is not there.
        states = {
            key: {
                k: v.clone() if isinstance(v, Tensor) else v
                for k, v in entry.items()
                if v is not None or k != "momentum_buffer"
            }
            for key, entry in state_dict["state"].items()
        }
        groups, dtypes = [], {}
        for i, (group, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=True)):
            who, is_frame = f"{type(self).__name__}, group {i}", group["manifold"] is not None
            kind = saved.get("gradient", "exact")  # of 0.1, which had a part of it as well
            needs(kind == "exact", CheckpointError, who, "the exact gradient, in a new run", f"gradient={kind!r}")
            full = self._checked({**self.defaults, **group, **saved})
            checks.check_entries(who, group["params"], saved["params"], states, is_frame)
            groups.append({key: full[key] for key in saved})
            dtypes |= {key: p.dtype for key, p in zip(saved["params"], group["params"], strict=True)}
        return {**state_dict, "state": checks.without_remainders(states, dtypes), "param_groups": groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what copies, and what loads a state dict; what is refused changes nothing."""
        defaults = state["defaults"] if "defaults" in state else self.defaults
        for group in state["param_groups"]:
            for key, value in defaults.items():
                # Groups of earlier versions need not have the latter, unless torch's optimizer of the rest reads it.
                if key != "capturable" or value or key in inspect.signature(self.free_optimizer).parameters:
                    group.setdefault(key, value)
            checks.check_members(type(self).__name__, group["manifold"], group["params"])
        super().__setstate__(state)
        self._begin()
        for group in self.param_groups:
            checks.watch_loose_frames(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Does one step, after a closure that computes the loss and the gradients again, and returns what that does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._validate_groups()
        free, on_host, on_device = [], [], []
        for group in self.param_groups:
            if group["manifold"] is None:
                free.append(group)
                continue
            for bucket in begin_buckets(self._sorted, group, self.state):
                (on_host if bucket.may_sync_host else on_device).append((group, bucket))
        if free and self.free_optimizer not in checks.TAKE_ANY_GRADIENT:
            checks.check_free_gradients(type(self).__name__, free)
        if len(on_host) > 1:  # a single one is checked on the way
            checks.check_gradients(type(self).__name__, [bucket for _, bucket in on_host])
        for group, bucket in on_host:
            bucket.run(self.move, group, self._writes)
        if on_device:
            self._step_on_device(on_device)
        if free:  # loading a state dict replaces both
            self._free.param_groups, self._free.state = free, self.state
            self._step_of_free(self._free)
        return loss

    def _validate_groups(self) -> None:
        """Checks settings that a scheduler, or anybody, has written since they were checked last."""
        name = type(self).__name__
        for group in self.param_groups:
            lr = group["lr"]
            if not ((lr.__class__ is float and 0 <= lr < math.inf) or RATE.holds(lr)):
                group["lr"] = RATE.require(name, "lr", lr)
            validated, values = self._validated.get(id(group), ()), [*map(group.get, self._names)]
            if len(validated) == len(values) and all(map(operator.is_, values, validated)):
                continue
            for setting in self.settings:
                if setting.name != "lr" and setting.name in group:
                    group[setting.name] = setting.check.require(name, setting.name, group[setting.name])
            self._validated[id(group)] = [*map(group.get, self._names)]

    def _step_on_device(self, batches: list[tuple[Group, Bucket]]) -> None:
        """Moves frames whose values are not read; those of a group all or none."""
        check_capture(self)
        with without_reads():
            for group in self.param_groups:
                own = [bucket for other, bucket in batches if other is group]
                checks.require_finite(own)
                for bucket in own:
                    bucket.run(self.move, group, self._writes)

    @abstractmethod
    def move(self, group: Group, bucket: Bucket) -> None:
        """Moves frames of one shape along their manifold, and writes nothing before all of it is known to be finite.

        The gradients of several buckets are known to be finite, those of a single one are not. Where no value may be
        read, on devices beside CPUs and with `capturable=True`, `bucket.may_sync_host` is False: norms are tensors
        then, and what has to hold, told to `bucket.require`, is no error but decides whether anything is written.
        """


def _probing(kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Returns a torch optimizer of a number that nobody needs, for its defaults and its step."""
    return kind([torch.zeros(1, device="cpu")])

"""Several optimizers as one, each with parameters of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit.errors import CheckpointError, OptionError, needs
from stiefelkit.numbers import as_python_number
from stiefelkit.optim.batch import Group
from stiefelkit.optim.checks import listed
from stiefelkit.weights.optimizer_hooks import moves_frames


class MixedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers one after the other, as papers train coordinates by others than the rest.

    Its groups are theirs, so that schedulers and `clip_grad_norm_` reach all of them; `OneCycleLR` and `CyclicLR` cycle
    a momentum, or betas, if all of them have such. Its state dict is the list of theirs.

    Args:
        optimizers: one or more, no two of which hold the same parameter.

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "cayley")
    >>> plain, skew = sk.optim.parameter_groups(layer, lr=1e-3, skew=1e-4)
    >>> optimizer = MixedOptimizer([torch.optim.Adam([plain]), torch.optim.RMSprop([skew])])
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.001, 0.0001]
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = listed("MixedOptimizer", optimizers)
        for optimizer in self.optimizers:
            is_torchs = isinstance(optimizer, torch.optim.Optimizer)
            needs(is_torchs, OptionError, "MixedOptimizer", "optimizers of torch's kind", optimizer)
        members = [id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if not members or len(set(members)) < len(members):
            got = "one parameter in two of them" if members else "none"
            raise OptionError(f"MixedOptimizer needs optimizers with parameters of their own, got {got}.")
        self.moves_frames = any(map(moves_frames, self.optimizers))
        first, *others = [optimizer.defaults for optimizer in self.optimizers]  # of which schedulers read what all have
        shared = {key: value for key, value in first.items() if all(key in each for each in others)}
        super().__init__(self.param_groups, shared)

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        """The groups of the optimizers as they are now: some are added and loaded later."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:  # torch's __init__ begins with none
        for group in groups:
            self.add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles, with the optimizers."""
        held = {**super().__getstate__(), "optimizers": self.optimizers, "moves_frames": self.moves_frames}
        del held["param_groups"]
        return held

    def add_param_group(self, param_group: Group) -> None:
        """Refuses a group that none of its optimizers has, which none would move."""
        if all(param_group is not group for group in self.param_groups):
            raise OptionError("MixedOptimizer needs groups of its optimizers, got another; add it to one of them.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Does one step of each; returns what the closure, called once, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # those of frames first, since they may refuse a step
        for optimizer in sorted(self.optimizers, key=moves_frames, reverse=True):
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dicts of the optimizers, in their order, with numbers that are Python's."""
        return {"optimizers": [as_python_number(optimizer.state_dict(), keep=Tensor) for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave; what one of the optimizers refuses leaves all as they were."""
        states = state_dict.get("optimizers") if isinstance(state_dict, Mapping) else None
        if not isinstance(states, list) or len(states) != len(self.optimizers):
            got = f"one of {len(states)}" if isinstance(states, list) else "one of a single optimizer"
            raise CheckpointError(f"MixedOptimizer needs a state dict of {len(self.optimizers)} optimizers, got {got}.")
        for state in states:
            is_one = isinstance(state, Mapping) and {"state", "param_groups"} <= {*state}
            needs(is_one, CheckpointError, "MixedOptimizer", "state dicts of optimizers", state)
        before = [optimizer.state_dict() for optimizer in self.optimizers]
        try:
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        except Exception:
            for optimizer, state in zip(self.optimizers, before, strict=True):
                optimizer.load_state_dict(state)
            raise

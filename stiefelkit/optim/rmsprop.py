"""RMSprop as others define it: an accumulator that does not start at zero, epsilon inside the root."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import unhooked_step
from stiefelkit.errors import OptionError, needs
from stiefelkit.numbers import FLAG, as_python_number, at_least
from stiefelkit.optim.batch import Group

_OWN = {"init_acc": at_least(0), "eps_inside": FLAG}


class RMSprop(torch.optim.RMSprop):
    r"""torch's RMSprop with two more settings, by which implementations differ; without them it is torch's, bit by bit.

    :math:`v ← alpha v + (1 - alpha) g^2`, then :math:`p ← p - lr g / (√{v} + eps)`, or :math:`g / √{v + eps}` with
    `eps_inside`. TensorFlow's: `alpha=0.9, eps=1e-10, init_acc=1.0, eps_inside=True`. A start at one makes the first
    steps |g| times as long as one at zero, which is a warm-up of about :math:`log(g^2) / log(alpha)` steps.

    Args:
        params: parameters or groups.
        lr: learning rate.
        alpha: how much of v is kept.
        eps: added to the root, or under it.
        weight_decay: added to the gradient, times the parameter.
        momentum: of the steps.
        centered: divide by the root of the variance; v less the squared mean of g.
        capturable: as torch's; not with `eps_inside`.
        foreach: as torch's.
        maximize: go along the gradient, not against it.
        differentiable: as torch's; not with `eps_inside`.
        init_acc: what v is at first, >= 0.
        eps_inside: add `eps` under the root.

    >>> p = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = RMSprop([p], 0.1, alpha=0.9, eps=1e-10, init_acc=1.0, eps_inside=True)
    >>> p.grad = torch.full((1,), 1e-3)
    >>> optimizer.step()
    >>> round((1 - p).item(), 6)
    0.000105
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        init_acc: float = 0.0,
        eps_inside: bool = False,
    ):
        self._own = _checked({"init_acc": init_acc, "eps_inside": eps_inside})
        rates = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        flags = {"centered": centered, "capturable": capturable, "foreach": foreach, "differentiable": differentiable}
        super().__init__(params, **_checked(rates | flags | {"maximize": maximize}))
        self.defaults.update(self._own)

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group after its settings were checked."""
        param_group = _checked({**self._own, **param_group})
        full = {**self.defaults, **param_group}
        is_torchs = not full["eps_inside"] or not (full["capturable"] or full["differentiable"])
        needs(is_torchs, OptionError, "RMSprop", "eps_inside=False with capturable or differentiable", "True")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what loads a state dict, of torch's RMSprop as well."""
        super().__setstate__(state)
        self._own = {key: self.defaults.get(key, value) for key, value in (("init_acc", 0.0), ("eps_inside", False))}
        for group in self.param_groups:
            for key, value in self._own.items():
                group.setdefault(key, value)
            group.update(_checked(group))

    def state_dict(self) -> dict[str, Any]:
        """Returns groups and states, with numbers that are Python's."""
        return as_python_number(super().state_dict(), keep=Tensor)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Does one step, and returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        with torch.no_grad():
            for group in groups:
                for p in group["params"] if group["eps_inside"] or group["init_acc"] else ():
                    if p.grad is not None:
                        self.state[p] = {**_begun(p, group), **self.state[p]}
                        if group["eps_inside"]:
                            _move(p, group, self.state[p])
        self.param_groups = [group for group in groups if not group["eps_inside"]]
        try:
            unhooked_step(torch.optim.RMSprop)(self)  # not super().step(), which would run the hooks of the step twice
        finally:
            self.param_groups = groups
        return loss


def _checked(group: Group) -> Group:
    """Returns a group with Python's numbers; raises OptionError unless our own settings are in range."""
    group = {key: value if key in ("params", "lr") else as_python_number(value) for key, value in group.items()}
    for key, check in _OWN.items():
        if key in group:
            group[key] = check.require("RMSprop", key, group[key])
    return group


def _begun(p: Tensor, group: Group) -> dict[str, Any]:
    """Returns the state that torch's RMSprop begins with, but for the accumulator."""
    zeros = torch.zeros_like(p, memory_format=torch.preserve_format)
    start = complex(group["init_acc"], group["init_acc"]) if p.is_complex() else group["init_acc"]
    step = torch.zeros((), device=p.device if group["capturable"] else "cpu")
    state = {"step": step, "square_avg": torch.full_like(zeros, start)}
    if group["momentum"] > 0:
        state["momentum_buffer"] = zeros.clone()
    if group["centered"]:
        state["grad_avg"] = zeros.clone()
    return state


def _move(p: Tensor, group: Group, state: dict[str, Any]) -> None:
    """One step of one parameter; real and imaginary parts of a complex one each for itself, as torch's."""
    assert p.grad is not None
    state["step"] += 1
    lr, alpha, eps = float(group["lr"]), group["alpha"], group["eps"]
    g = -p.grad if group["maximize"] else p.grad
    if group["weight_decay"]:
        g = g.add(p, alpha=group["weight_decay"])
    moments = {key: value for key, value in state.items() if key != "step"}
    if p.is_complex():
        p, g = torch.view_as_real(p), torch.view_as_real(g)
        moments = {key: torch.view_as_real(value) for key, value in moments.items()}
    v = moments["square_avg"].mul_(alpha).addcmul_(g, g, value=1 - alpha)
    if group["centered"]:
        moments["grad_avg"].lerp_(g, 1 - alpha)
        # A gradient that stays leaves no variance, and by rounding less than none.
        v = v.addcmul(moments["grad_avg"], moments["grad_avg"], value=-1).clamp_(min=0)
    root = v.add(eps).sqrt_() if group["eps_inside"] else v.sqrt().add_(eps)
    if group["momentum"] > 0:
        moments["momentum_buffer"].mul_(group["momentum"]).addcdiv_(g, root)
        p.add_(moments["momentum_buffer"], alpha=-lr)
    else:
        p.addcdiv_(g, root, value=-lr)

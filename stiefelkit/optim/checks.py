"""What settings and members of groups must be."""

import difflib
import inspect
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from stiefelkit.errors import NotAFrameError, OptimizerError, OptionError, ShapeError, did_you_mean
from stiefelkit.guard import MANIFOLDS, frames
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.param import FRAME_TOLERANCE
from stiefelkit.sharding import is_sharded

__all__ = [
    "check_bound",
    "check_choice",
    "check_common",
    "check_members",
    "check_moments",
    "check_number",
    "check_rate",
    "check_spelling",
    "check_torch_settings",
    "is_number",
]


SWITCHES = (
    "amsgrad",
    "capturable",
    "centered",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "nesterov",
)
"""Settings of torch's optimizers that are True, False or None."""


def is_number(value: Any) -> bool:
    """Whether a value is a number, and one that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def check_rate(name: str, lr: Any) -> None:
    """Raises OptionError unless a learning rate is a finite number, not negative."""
    if isinstance(lr, Tensor) and lr.numel() == 1:
        lr = lr.item()
    if not is_number(lr) or not 0 <= lr < math.inf:
        raise OptionError(f"{name} needs a finite lr >= 0, got {lr!r}.")


def check_number(name: str, group: dict[str, Any], key: str, low: float = 0.0, below: float = math.inf) -> None:
    """Raises OptionError unless a setting is a number, low <= number < below."""
    value = group[key]
    if not is_number(value) or not low <= value < below:
        upper = "" if below == math.inf else f" and < {below:g}"
        raise OptionError(f"{name} needs {key} >= {low:g}{upper}, got {value!r}.")


def check_choice(name: str, group: dict[str, Any], key: str, known: Collection[Any]) -> None:
    """Raises OptionError unless a setting is one of those known."""
    if not any(type(group[key]) is type(each) and group[key] == each for each in known):
        raise OptionError(f"{name} needs {key} in {tuple(known)}, got {group[key]!r}.")


def check_bound(name: str, group: dict[str, Any]) -> None:
    """Raises OptionError unless the bound of the step and the tolerance are positive."""
    q, tolerance = group["q"], group["tolerance"]
    if not isinstance(q, int | float) or not q > 0:
        raise OptionError(f"{name} needs q > 0, got {q!r}.")
    if tolerance is not None and not (isinstance(tolerance, float) and 0 < tolerance < 1):
        raise OptionError(f"{name} needs a tolerance between 0 and 1, or None, got {tolerance!r}.")


def check_moments(name: str, group: dict[str, Any]) -> None:
    """Raises OptionError unless the decays of two moments and what is added to the second are in range."""
    betas = group["betas"]
    two = isinstance(betas, tuple | list) and len(betas) == 2 and all(isinstance(b, int | float) for b in betas)
    if not (two and all(0 <= b < 1 for b in betas)):
        raise OptionError(f"{name} needs two betas in [0, 1), got {betas!r}.")
    check_number(name, group, "eps")


def check_common(name: str, group: dict[str, Any], precisions: Collection[str]) -> None:
    """Raises OptionError unless what all optimizers of frames have is in range."""
    check_rate(name, group["lr"])
    check_choice(name, group, "precision", precisions)
    check_choice(name, group, "maximize", (False, True))
    check_number(name, group, "weight_decay")
    for key in SWITCHES:
        if not isinstance(group.get(key), bool | None):
            raise OptionError(f"{name} needs {key} to be True, False or None, got {group[key]!r:.40}.")
    for key in ("dampening", "momentum", "alpha", "eps"):
        if not is_number(group.get(key, 0.0)) or not math.isfinite(group.get(key, 0.0)):
            raise OptionError(f"{name} needs a finite number for {key}, got {group[key]!r:.40}.")
    manifold = group["manifold"]
    if manifold is None:
        return
    if manifold not in MANIFOLDS:
        raise OptionError(f"{name} knows no manifold {manifold!r}{did_you_mean(manifold, MANIFOLDS)}")
    if group["weight_decay"]:
        raise OptionError(
            f"{name} needs weight_decay=0 for frames, which cannot shrink, got {group['weight_decay']!r}; "
            "sk.optim.parameter_groups(model, weight_decay=...) gives it to the other parameters only."
        )


def check_torch_settings(name: str, plain: type[torch.optim.Optimizer], group: dict[str, Any]) -> None:
    """Raises OptionError unless torch's optimizer takes the settings of a group without a manifold."""
    known = inspect.signature(plain.__init__).parameters
    settings = {key: value for key, value in group.items() if key in known and key != "params"}
    try:
        plain([torch.zeros(1)], **settings)  # type: ignore[call-arg]
    except (TypeError, ValueError, RuntimeError, IndexError, AssertionError, OverflowError) as error:
        raise OptionError(
            f"{name} needs settings that torch.optim.{plain.__name__} takes, got one that it refuses: {error}."
        ) from error


def check_spelling(name: str, given: Collection[str], known: Collection[str]) -> None:
    """Raises OptionError for a key that is nearly one of those known; others are the user's own."""
    for key in given:
        if key not in known and difflib.get_close_matches(key, known, n=1, cutoff=0.85):
            raise OptionError(f"{name} has no setting {key!r}{did_you_mean(key, known)}")


def check_members(name: str, manifold: str | None, params: list[Any]) -> None:
    """Raises unless the frames of a group are frames, and a group without a manifold holds none.

    Raises:
        OptimizerError: a group without a manifold holds a frame of some module.
        ShapeError, OptionError, NotAFrameError: a parameter of a manifold is no frame.
    """
    if manifold is None:
        known = frames()
        for p in params:
            if id(p) in known:
                alone = known[id(p)].carrier is None
                remedy = "sk.optim.frames([w])" if alone else "sk.optim.parameter_groups(model, lr=...)"
                raise OptimizerError(
                    f"{name} needs groups that name the manifold of frames, got {known[id(p)].title} in one without; "
                    f"give it {remedy}."
                )
        return
    if len({id(p) for p in params}) != len(params):
        raise OptionError(f"{name} needs each frame once in a group, got one of them twice.")
    for p in params:
        if not isinstance(p, Tensor) or p.is_meta or is_sharded(p):
            continue
        if p.dim() < 2 or p.shape[-2] < p.shape[-1] or p.numel() == 0:
            wide = p.dim() >= 2 and p.shape[-2] < p.shape[-1] and p.numel() > 0
            remedy = "; make the frame its adjoint, torch.nn.Parameter(w.detach().mH.contiguous())" if wide else ""
            raise ShapeError(f"{name} needs frames of shape (*, n, p) with n >= p, got {tuple(p.shape)}{remedy}.")
        if p.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
            raise OptionError(f"{name} needs frames in float32 or better, got {p.dtype}.")
        if 0 in p.stride():
            raise OptionError(f"{name} needs frames with memory of their own, got an expanded one; .clone() it.")
        permitted = FRAME_TOLERANCE * rounding_limit(p.shape[-1], p.dtype)
        error = orthogonality_error(p).max().item()
        if not error <= permitted:
            raise NotAFrameError(
                f"{name} needs frames, ||W^H W - I||_F <= {permitted:.2g}, got {error:.2g}; "
                "sk.functional.nearest_frame gives the nearest."
            )

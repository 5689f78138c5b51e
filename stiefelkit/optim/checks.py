"""Checks of the settings, members and gradients of groups."""

import difflib
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit.errors import (
    NonFiniteError,
    NotAFrameError,
    OptimizerError,
    OptionError,
    ShapeError,
    did_you_mean,
    needs,
    shown,
)
from stiefelkit.functional._arithmetic.norms import norms_of
from stiefelkit.metrics import FRAME_TOLERANCE, orthogonality_error
from stiefelkit.numbers import as_python_number, one_of
from stiefelkit.optim.batch import Bucket, Group, limit_of
from stiefelkit.optim.settings import OF_TORCH, Setting
from stiefelkit.tensors import is_sharded
from stiefelkit.weights.optimizer_hooks import MANIFOLDS, Frame, frames, manifold_of, name_of_manifold, watch_frame

TAKE_ANY_GRADIENT = (torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch that take sparse gradients, and know no capturing."""

_FEW = 4
"""Buckets of a group whose gradients are looked at one by one."""


def check_group(name: str, settings: Sequence[Setting], group: Group) -> Group:
    """Returns a group with Python's own numbers; raises OptionError unless its settings are in range."""
    group = as_python_number(group, keep=Tensor)
    checks = {setting.name: setting.check for setting in settings}
    for key, check in {**OF_TORCH, **checks}.items():
        if key in group:
            group[key] = check.require(name, key, group[key])
    momentum, dampening = group.get("momentum", 0), group.get("dampening", 0)
    is_damped = bool(group.get("nesterov") and (dampening or not momentum))
    got = f"momentum={shown(momentum)} and dampening={shown(dampening)}"
    needs(not is_damped, OptionError, name, "a momentum and no dampening for nesterov=True", got)
    manifold = group["manifold"]
    if manifold is None:
        return group
    check_manifold(name, manifold)
    decay = group.get("weight_decay")
    words = "weight_decay=0 for frames, which cannot shrink, as parameter_groups(model, weight_decay=...) gives it"
    needs(not decay, OptionError, name, words, decay)
    return group


def check_free_gradients(name: str, groups: Sequence[Group]) -> None:
    """Raises OptimizerError for what torch's optimizer would refuse when the frames have moved already."""
    for group in groups:
        for p in group["params"]:
            if p.grad is not None and p.grad.is_sparse:
                got = "a sparse one; sparse=False of the embedding makes it dense"
                raise OptimizerError(f"{name} needs dense gradients outside of frames, got {got}.")
            if p.grad is not None and group.get("capturable") and p.device.type == "cpu":
                raise OptimizerError(f"{name} needs capturable=False outside of frames on a CPU, got True.")


def check_manifold(name: str, manifold: object) -> None:
    """Raises OptionError unless it is the name of a manifold."""
    if not one_of(*MANIFOLDS).holds(manifold):
        near = did_you_mean(name_of_manifold(manifold) or manifold, MANIFOLDS)
        raise OptionError(f"{name} needs the name of a manifold, got {shown(manifold)}{near}")


def check_spelling(name: str, keys: Collection[str], names: Collection[str]) -> None:
    """Raises OptionError for a key that is nearly one of those known; others are the user's own."""
    for key in keys:
        if key not in names and difflib.get_close_matches(key, names, n=1, cutoff=0.85):
            raise OptionError(f"{name} has no setting {shown(key)}{did_you_mean(key, names)}")


def read_arguments(
    name: str, known: Sequence[Setting], call: inspect.Signature, params: object, /, *args: object, **settings: object
) -> tuple[Any, dict[str, Any]]:
    """Returns the parameters that an optimizer is called with, and its settings, with Python's own numbers."""
    try:
        bound = call.bind(params, *args, **settings)
    except TypeError as error:
        unknown = [key for key in settings if key not in call.parameters]
        near = did_you_mean(unknown[0], call.parameters) if unknown else ""
        raise TypeError(f"{name}.__init__() {error}{near}") from None
    bound.apply_defaults()
    chosen = {each.name: each.check.convert(bound.arguments[each.name]) for each in known}
    return params if isinstance(params, Tensor) else listed(name, params), chosen  # a tensor, which torch refuses


def listed(name: str, params: Any) -> list[Any]:
    """Returns what holds parameters as a list; raises OptionError for a set, and what cannot be gone through."""
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, set | frozenset):
        raise OptionError(f"{name} needs parameters in an order that checkpoints can count on, got a set; pass a list.")
    try:
        return list(params)
    except Exception as error:
        raise OptionError(f"{name} needs parameters or groups of them, got {shown(params)}.") from error


def members_of(group: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors of a group, which may stand alone or have names with them."""
    entries = group["params"] if isinstance(group["params"], list) else [group["params"]]
    return [p[1] if isinstance(p, tuple) else p for p in entries]


def by_manifold(name: str, group: Any) -> list[Any]:
    """Splits a group that names no manifold by those that its tensors name, frames without weight decay."""
    if not isinstance(group, dict) or isinstance(group.get("params"), set):
        return [group]  # which torch refuses
    params = listed(name, group.get("params"))
    are_tensors = all(isinstance(entry, Tensor) or (isinstance(entry, tuple) and len(entry) == 2) for entry in params)
    needs(are_tensors, OptionError, name, "tensors, or names with them", params)
    group = {**group, "params": params}
    if "manifold" in group:
        return [group]
    parts: dict[str | None, list[Any]] = {}
    for entry in params:
        manifold = manifold_of(entry[1] if isinstance(entry, tuple) else entry)
        if manifold not in (None, *MANIFOLDS):
            raise OptimizerError(
                f"{name} needs frames and parameters that may move freely, got one on the manifold {manifold}; "
                "geoopt.optim.RiemannianAdam moves it."
            )
        parts.setdefault(manifold, []).append(entry)
    return [
        {**group, "params": members}
        if manifold is None
        else {"name": "frames", **group, "params": members, "manifold": manifold, "weight_decay": 0.0}
        for manifold, members in (parts or {None: []}).items()
    ]


def check_members(name: str, manifold: str | None, params: Sequence[Tensor]) -> None:
    """Accepts frames in a group with a manifold, and refuses them in one without."""
    if manifold is None:
        watched = frames()
        for p in params:
            frame = watched.get(id(p)) or (Frame(None, "stiefel", "") if manifold_of(p) in MANIFOLDS else None)
            if frame is not None:
                alone = frame.coordinate_list is None
                remedy = "sk.optim.frames([w])" if alone else "sk.optim.parameter_groups(model, lr=...)"
                raise OptimizerError(
                    f"{name} needs groups that name the manifold of frames, got {frame.title} in one without; give it "
                    f"{remedy}."
                )
        return
    needs(len({id(p) for p in params}) == len(params), OptionError, name, "each frame once in a group", "one twice")
    for p in params:
        if not isinstance(p, Tensor) or p.is_meta or is_sharded(p):
            continue
        if p.dim() < 2 or p.shape[-2] < p.shape[-1] or p.numel() == 0:
            wide = p.dim() >= 2 and p.shape[-2] < p.shape[-1] and p.numel() > 0
            remedy = "; make the frame its adjoint, torch.nn.Parameter(w.detach().mH.contiguous())" if wide else ""
            raise ShapeError(f"{name} needs frames of shape (*, n, p) with n >= p, got {tuple(p.shape)}{remedy}.")
        is_single = p.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
        needs(is_single, OptionError, name, "frames in float32 or better", p.dtype)
        needs(0 not in p.stride(), OptionError, name, "frames with memory of their own, as clone() gives it", "a view")
        permitted = FRAME_TOLERANCE * limit_of(p.shape[-1], p.dtype)
        error = orthogonality_error(p).max().item()
        words = f"frames, ||W^H W - I||_F <= {permitted:.2g}, as sk.functional.nearest_frame gives them"
        needs(error <= permitted, NotAFrameError, name, words, f"{error:.2g}")


def watch_loose_frames(group: Group) -> None:
    """Tracks the frames of a group that no module reads."""
    if group["manifold"] is not None:
        watched = frames()
        for p in group["params"]:
            if id(p) not in watched:
                watch_frame(p, group["manifold"])


def check_gradients(who: str, buckets: Sequence[Bucket]) -> None:
    """Raises NonFiniteError unless all gradients, and the squares of their norms, are finite."""
    shares = torch.cat([bucket.shares_of_overflow() for bucket in buckets])
    if not (shares.max().item() < 1 and math.isfinite(shares.sum().item())):
        raise not_finite(who, buckets)


def require_finite(buckets: Sequence[Bucket]) -> None:
    """Has buckets that are not read written together, if all gradients, and the squares of their norms, are finite."""
    sizes = [(norms[0], most) for norms, most in map(Bucket.gradient_sizes, buckets)]
    for bucket in buckets:
        device = bucket.params[0].device
        bounds = [(size.to(device), most) for size, most in sizes]
        if len(bounds) > _FEW:
            bounds = [(torch.cat([size / most for size, most in bounds]), 1.0)]
        bucket.bounds += bounds


def not_finite(who: str, buckets: Sequence[Bucket]) -> NonFiniteError:
    """Returns the error for gradients that are not finite, or whose squares are not, and names theirs."""
    watched, bad = frames(), []
    for bucket in buckets:
        for p, share in zip(bucket.params, bucket.shares_of_overflow(), strict=True):
            coordinate_list = watched[id(p)].coordinate_list if id(p) in watched else None
            name = f"a frame of shape {tuple(p.shape)}" if coordinate_list is None else coordinate_list.weight
            if not torch.isfinite(share):
                bad.append(f"NaN or infinity in that of {name}")
            elif not share < 1:
                bad.append(f"one so large that its square overflows in that of {name}")
    return NonFiniteError(f"{who} needs finite gradients, got {'; '.join(bad) or 'another one'}; nothing was changed.")


def too_long(who: str, group: Group, bucket: Bucket, length: float) -> NonFiniteError:
    """Returns the error for a step so long that no frame comes of it."""
    norm = max(norms_of(bucket.g)[0])
    return NonFiniteError(
        f"{who} needs shorter steps, got one of length {length:.2g} of lr={float(group['lr']):.2g} and a gradient of "
        f"norm {norm:.2g}, which does not end at a frame; lower the learning rate; the frame was not changed."
    )

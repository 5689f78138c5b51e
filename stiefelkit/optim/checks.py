"""Checks of the settings, members and gradients of groups, and of the states of parameters before any is loaded."""

import difflib
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stiefelkit.errors import (
    CheckpointError,
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
from stiefelkit.optim.settings import OF_TORCH, Setting, is_number
from stiefelkit.tensors import is_sharded, local_part
from stiefelkit.weights.optimizer_hooks import MANIFOLDS, Frame, frames, manifold_of, name_of_manifold, watch_frame

TAKE_ANY_GRADIENT = (torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch that take sparse gradients, and know no capturing."""

_FEW = 4  # buckets of a group whose gradients are looked at one by one
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "rotation_sq", "square_avg")  # means of squares: not negative
MOMENTS = ("momentum_buffer", "exp_avg", "grad_avg", "lo")  # of the shape of their parameter
_KNOWN = (*SQUARES, *MOMENTS, "step")
_OF_ADAM = {"exp_avg", "exp_avg_sq", "step"}  # of which there are all, or no two


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


def check_states(optimizer: Optimizer, state_dict: object, free: type[Optimizer]) -> None:
    """Raises CheckpointError unless a state dict has the groups and parameters of an optimizer, each once."""
    name = type(optimizer).__name__
    loaded = state_dict if isinstance(state_dict, Mapping) else {}
    state, groups = loaded.get("state"), loaded.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        raise CheckpointError(f'{name} needs a state dict with "state" and a list "param_groups", got another object.')
    frames = any(group["manifold"] is not None for group in optimizer.param_groups)
    if frames and groups and not any(isinstance(group, Mapping) and "manifold" in group for group in groups):
        raise CheckpointError(
            f"{name} needs a state dict of an optimizer of frames, whose groups name a manifold, got one of an "
            f"optimizer without frames, such as torch.optim.{free.__name__}; load the model alone, and start {name} "
            "without a state."
        )
    count = len(optimizer.param_groups)
    needs(len(groups) == count, CheckpointError, name, f"a state dict of {count} groups", len(groups))
    seen: set[object] = set()
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        ids = saved.get("params") if isinstance(saved, Mapping) else None
        own = len(group["params"])
        ids = ids if isinstance(ids, list) and {*map(type, ids)} <= {int, str} else []
        are_own = len({*map(str, ids)}) == len(ids) == own and not seen.intersection(ids)
        who = f"{name} (group {i})"
        needs(are_own, CheckpointError, who, f"a state dict with {own} parameters of its own", ids)
        manifold = saved.get("manifold")
        fits = one_of(group["manifold"]).holds(manifold)
        needs(fits, CheckpointError, who, f"a state dict with the manifold {group['manifold']!r}", manifold)
        seen.update(ids)
    for key, entry in state.items():
        is_own = key in seen and isinstance(entry, Mapping)
        kind = f"a {entry.layout} tensor" if isinstance(entry, Tensor) else type(entry).__name__
        needs(is_own, CheckpointError, name, "the states of its own parameters", f"{shown(key)} with {kind}")


def check_entries(
    who: str,
    params: Sequence[Tensor],
    ids: Sequence[object],
    states: Mapping[object, Mapping[str, Any]],
    is_frame: bool,
) -> None:
    """Raises unless each entry of the states of parameters is one that such a parameter may have."""
    for p, key in zip(params, ids, strict=True):
        entry = states.get(key, {})
        name = f"{who} (parameter {key})"
        lacking = sorted(_OF_ADAM - entry.keys()) if len(_OF_ADAM & entry.keys()) == 2 else []
        needs(not lacking, CheckpointError, name, f"a state of {', '.join(sorted(_OF_ADAM))}", f"one without {lacking}")
        for each, value in entry.items():
            is_real = each == "step" or (is_frame and each in ("exp_avg_sq", "rotation_sq"))
            _check_entry(name, each, value, p, p.is_complex() and not is_real, len(entry) == 1 and not is_frame)


def without_remainders(
    state: Mapping[object, Mapping[str, Any]], dtypes: Mapping[object, torch.dtype]
) -> dict[object, Mapping[str, Any]]:
    """Returns states without the remainders and accumulated errors of frames in another dtype."""
    return {
        key: {name: value for name, value in entry.items() if name not in ("lo", "wear")}
        if "lo" in entry and entry["lo"].dtype != dtypes[key]
        else entry
        for key, entry in state.items()
    }


def _check_entry(who: str, key: str, value: object, p: Tensor, is_complex: bool, may_be_sparse: bool) -> None:
    who = f"{who}: {key}"
    if not isinstance(value, Tensor):
        needs(is_number(value) and value >= 0, CheckpointError, who, "a tensor, or a number >= 0", shown(value))
        return
    is_dense = value.layout == torch.strided or (may_be_sparse and value.is_sparse)  # as SGD makes it of such gradients
    needs(is_dense, CheckpointError, who, "a dense tensor", f"{value.layout}")
    shapes = {p.shape} if key in MOMENTS else {p.shape, p.shape[:-2], (*p.shape[:-2], *2 * p.shape[-1:]), torch.Size()}
    needs(value.shape in shapes, CheckpointError, who, f"shape {tuple(p.shape)}", tuple(value.shape))
    is_of_field = value.is_complex() == is_complex and (is_complex or value.is_floating_point())
    needs(is_of_field or key not in _KNOWN, CheckpointError, who, f"a dtype of the field of {p.dtype}", value.dtype)
    local = local_part(value.coalesce().values() if value.is_sparse else value)
    if local.is_meta:
        return
    parts = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
    needs(bool(torch.isfinite(parts).all()), NonFiniteError, who, "finite numbers", "NaN or infinity")
    is_positive = key in SQUARES or key == "step"
    needs(not (is_positive and (parts < 0).any()), CheckpointError, who, "numbers >= 0", "a negative one")
    most = torch.finfo(parts.dtype).eps if key == "lo" else math.inf
    is_small = most == math.inf or bool((parts.abs() <= most).all())
    needs(is_small, CheckpointError, who, f"remainders of rounding, entries of at most {most:.2g}", "a larger")

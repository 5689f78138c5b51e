"""What the state of an optimizer must be before anything of it is loaded."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stiefelkit._torch import step_inside
from stiefelkit.errors import CheckpointError, NonFiniteError, needs, shown
from stiefelkit.optim.batch import Group
from stiefelkit.optim.settings import is_number, one_of
from stiefelkit.tensors import local_part

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "rotation_sq", "square_avg")
"""Means of squares: not negative."""
LATE = ("momentum_buffer", "square_avg", "exp_avg_sq", "rotation_sq", "step", "lo", "wear", "refused")
"""May be missing in that of a frame, as from other settings or another dtype, and begins anew."""


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
        ids = ids if isinstance(ids, list) else []
        are_own = len({*map(str, ids)}) == len(ids) == own and not seen.intersection(ids)
        who = f"{name} (group {i})"
        needs(are_own, CheckpointError, who, f"a state dict with {own} parameters of its own", ids)
        manifold = saved.get("manifold")
        fits = one_of(group["manifold"]).holds(manifold)
        needs(fits, CheckpointError, who, f"a state dict with the manifold {group['manifold']!r}", manifold)
        seen.update(ids)
    for key, entry in state.items():
        is_own = key in seen and isinstance(entry, Mapping)
        needs(is_own, CheckpointError, name, "the states of its own parameters", f"{shown(key)} with {_kind(entry)}")


def check_entries(
    optimizer: Optimizer, i: int, group: Group, ids: list[object], state: Mapping[object, Mapping[str, Any]]
) -> None:
    """Raises unless the states of a group are such as a step of a small parameter of the same kind leads to."""
    templates: dict[tuple[int, torch.dtype], dict[str, object]] = {}
    for p, key in zip(optimizer.param_groups[i]["params"], ids, strict=True):
        entry = state.get(key)
        if not entry:  # no step yet
            continue
        kind = (p.dim(), p.dtype)
        if kind not in templates:
            templates[kind] = _made(optimizer, group, p)
        who = f"{type(optimizer).__name__} (group {i}, parameter {key})"
        _check_entry(who, entry, templates[kind], p, group["manifold"] is not None)


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


def _made(optimizer: Optimizer, group: Group, p: Tensor) -> dict[str, object]:
    """Returns the state of a small parameter after one step of length 0, each tensor by what its shape follows."""
    shape = (*(2 for _ in p.shape[:-2]), 4, 3)[-p.dim() :] if p.dim() else ()
    if group["manifold"] is not None:
        small = nn.Parameter(torch.eye(4, 3, dtype=p.dtype, device="cpu").expand(shape).clone())
    else:
        dtype = torch.complex64 if p.is_complex() else torch.float32
        small = nn.Parameter(torch.zeros(shape, dtype=dtype, device="cpu"))
    small.grad = torch.ones_like(small)
    own_group = {**group, "params": [small], "lr": 0.0}
    if group["manifold"] is None:
        own_group["capturable"] = False  # which torch has on a GPU alone
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin._begin()
    vars(twin).update(state=defaultdict(dict), param_groups=[own_group])
    step_inside(twin)
    return {key: _shape_of(value, small) for key, value in twin.state[small].items() if value is not None}


def _shape_of(value: object, p: Tensor) -> object:
    """Returns a type; or of a tensor what it is like: the parameter, its real part, its columns, the batch, none."""
    if not isinstance(value, Tensor):
        return type(value)
    if value.shape == p.shape:
        return "parameter" if value.is_complex() == p.is_complex() else "real"
    shapes = {"columns": (*p.shape[:-2], *2 * p.shape[-1:]), "batch": p.shape[:-2]}
    return next((kind for kind, shape in shapes.items() if value.shape == shape), "number")


def _check_entry(who: str, entry: Mapping[str, Any], template: dict[str, object], p: Tensor, is_frame: bool) -> None:
    is_of_sgd = not is_frame and set(template) == {"momentum_buffer"}  # which makes it when it is first needed
    late = LATE if is_frame else template if is_of_sgd else ()
    missing = sorted(key for key in template if key not in entry and key not in late)
    if is_frame and ("step" in entry) != ("exp_avg_sq" in entry) and {"step", "exp_avg_sq"} <= template.keys():
        missing.append("step" if "exp_avg_sq" in entry else "exp_avg_sq")
    if missing:
        raise CheckpointError(f"{who} needs a state of {', '.join(sorted(template))}, got one without {missing[0]!r}.")
    columns = torch.Size((*p.shape[:-2], *2 * p.shape[-1:]))
    shapes = {"parameter": p.shape, "real": p.shape, "columns": columns, "batch": p.shape[:-2], "number": torch.Size()}
    for key, value in entry.items():
        if key not in template and key != "lo":  # the user's own, or of other settings
            continue
        kind = template.get(key, "parameter")
        if key == "step" and template[key] is int and isinstance(value, Tensor) and value.numel() == 1:
            value = int(value) if value == value.round() else value  # as steps count where no value is read
        if isinstance(kind, str) and not (key == "step" and is_number(value)):  # older versions of torch had numbers
            shape = shapes[kind]
            if is_of_sgd and isinstance(value, Tensor) and value.is_sparse and value.shape == p.shape:
                value = value.coalesce().values()
                shape = value.shape
            _check_tensor(f"{who}: {key}", key, value, shape, p, is_real=kind != "parameter")
        elif not is_number(value):
            raise CheckpointError(f"{who} needs a number for {key}, got {_kind(value)}.")
        elif not value >= 0 or (kind is int and not isinstance(value, int)):
            raise CheckpointError(f"{who} needs {key} >= 0{', an integer' if kind is int else ''}, got {shown(value)}.")


def _check_tensor(who: str, key: str, value: object, shape: torch.Size, p: Tensor, is_real: bool) -> None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise CheckpointError(f"{who} needs a dense tensor, got {_kind(value)}.")
    needs(value.shape == shape, CheckpointError, who, f"shape {tuple(shape)}", tuple(value.shape))
    if not (value.is_floating_point() or value.is_complex()) or value.is_complex() != (p.is_complex() and not is_real):
        raise CheckpointError(f"{who} needs a dtype of the field of {p.dtype}, got {value.dtype}.")
    local = local_part(value)
    if local.is_meta:
        return
    needs(bool(torch.isfinite(local).all()), NonFiniteError, who, "finite numbers", "NaN or infinity")
    parts = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
    is_positive = key in SQUARES or key == "step"
    needs(not (is_positive and (parts < 0).any()), CheckpointError, who, "numbers >= 0", "a negative one")
    most = torch.finfo(value.dtype).eps
    is_too_large = key == "lo" and bool((parts.abs() > most).any())
    needs(not is_too_large, CheckpointError, who, f"remainders of rounding, entries of at most {most:.2g}", "a larger")


def _kind(value: object) -> str:
    return f"a {value.layout} tensor" if isinstance(value, Tensor) else type(value).__name__

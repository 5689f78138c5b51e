"""Checks of the state of an optimizer before anything of it is loaded."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stiefelkit.errors import CheckpointError, NonFiniteError, needs, shown
from stiefelkit.optim.settings import is_number, one_of
from stiefelkit.tensors import local_part

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "rotation_sq", "square_avg")
"""Means of squares: not negative."""
MOMENTS = ("momentum_buffer", "exp_avg", "grad_avg", "lo")
"""Of the shape of their parameter."""
_KNOWN = (*SQUARES, *MOMENTS, "step")
_OF_ADAM = {"exp_avg", "exp_avg_sq", "step"}
"""Of which there are all, or no two."""


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

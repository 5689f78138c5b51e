"""Clipping in the norm of the tangent space."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit.errors import NonFiniteError
from stiefelkit.functional import riemannian_gradient
from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.functional._arithmetic.norms import norms_without_sync
from stiefelkit.functional._arithmetic.product import FullPrecision
from stiefelkit.numbers import FLAG, Check, is_number
from stiefelkit.optim.batch import buckets
from stiefelkit.optim.checks import listed
from stiefelkit.tensors import check_tensors, full_tensor
from stiefelkit.weights.optimizer_hooks import MANIFOLDS, frames, manifold_of

_MOST = Check("{key} >= 0", lambda value: is_number(value) and value >= 0)
_SMALLEST = 64.0  # unit that complex numbers are divided by at least, over the smallest normal number


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | nn.Module | torch.optim.Optimizer | Iterable[Any],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients down together so that their norm is at most `max_norm`, and returns the norm before.

    That is a float64 tensor without dimensions, on the device of the gradients, which is not waited for unless a norm
    that is not finite shall be an error. A frame counts with its Riemannian gradient in the norm of its metric,
    since what is normal to the manifold moves nothing; any other parameter with its 2-norm.

    Args:
        parameters: a module, an optimizer, parameter groups, parameters, or one parameter; frames are known by their
            group's manifold, because a module holds them, or as they are geoopt's parameters on a Stiefel manifold.
        max_norm: the largest norm that is left as it is; infinity to measure only.
        error_if_nonfinite: raise if the norm is NaN or infinite; else the gradients get a factor of 0 or NaN, as from
            torch.nn.utils.clip_grad_norm_.

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(nn.Linear(4, 4, bias=False), "weight", "stiefel")
    >>> (layer.weight.square().sum()).backward()  # constant on the manifold
    >>> clip_grad_norm_(layer, 1.0).item() < 1e-5
    True
    """
    error_if_nonfinite = FLAG.require("clip_grad_norm_", "error_if_nonfinite", error_if_nonfinite)
    max_norm = _MOST.require("clip_grad_norm_", "max_norm", max_norm)
    free, by_manifold = _sorted(parameters)
    norms = [_norm(full_tensor(p.grad)) for p in free if p.grad is not None]
    for manifold, members in by_manifold.items():
        for bucket in buckets(members, {p: {} for p in members}):
            metric = manifold.partition(":")[2]
            with FullPrecision(bucket.params[0].device):
                w, g = bucket.frames(), bucket.gradients()
                # In units of the largest entry, since products may overflow; by less no complex number can be divided.
                least, largest = _SMALLEST * torch.finfo(g.dtype).tiny, g.abs().amax()
                if not bucket.may_sync_host:
                    unit = largest.clamp(min=least)
                    (norm,) = riemannian_gradient(w, g / unit, metric).norms(metric)
                    norms.append(_norm(norm) * unit)
                    continue
                largest = largest.item()
                lengths = riemannian_gradient(w, g / max(largest, least), metric).norms(metric)
            size = max(largest, least) * math.hypot(*lengths) if largest < math.inf else largest
            norms.append(torch.tensor(size, dtype=torch.float64, device="cpu"))
    where = next((norm.device for norm in norms if not norm.is_cpu), torch.device("cpu"))
    total = _norm(torch.stack([norm.to(where) for norm in norms])) if norms else torch.zeros((), device="cpu").double()
    if error_if_nonfinite and not math.isfinite(total):
        raise NonFiniteError(f"clip_grad_norm_ needs finite gradients, got a norm of {total.item()}.")
    # an infinite norm stays unscaled if it is only to be measured
    if max_norm < math.inf and not (may_sync_host(total) and max_norm >= total.item() + 1e-6):
        scaled = [*free, *itertools.chain(*by_manifold.values())]
        for p in scaled:  # the gradient of one that was read as its adjoint is a lazy conjugate, which foreach refuses
            if p.grad is not None and p.grad.is_conj():
                p.grad = p.grad.resolve_conj()
        nn.utils.clip_grads_with_norm_(scaled, max_norm, total)
    return total


def _norm(x: Tensor) -> Tensor:
    """Returns the 2-norm of all entries in float64, of any size, which is not waited for."""
    return norms_without_sync(x.reshape(1, 1, -1)).squeeze(0).double()


def _sorted(parameters: object) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Returns the parameters that have a gradient, each once: free ones, and frames by their manifold."""
    manifolds = {key: frame.manifold for key, frame in frames().items()}
    if isinstance(parameters, torch.optim.Optimizer):
        parameters = parameters.param_groups
    elif isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    free: list[Tensor] = []
    by_manifold: dict[str, list[Tensor]] = {}
    seen: set[int] = set()
    for entry in listed("clip_grad_norm_", parameters):
        group: dict[str, Any] = entry if isinstance(entry, dict) else {}
        members = [entry] if isinstance(entry, Tensor) else listed("clip_grad_norm_", group.get("params", [entry]))
        if not isinstance(entry, Tensor):
            check_tensors("clip_grad_norm_", *members)
        for p in members:
            if p.grad is None or id(p) in seen:
                continue
            seen.add(id(p))
            manifold = group.get("manifold") or manifolds.get(id(p)) or manifold_of(p)
            (free if manifold not in MANIFOLDS else by_manifold.setdefault(manifold, [])).append(p)
    return free, by_manifold

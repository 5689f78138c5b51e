"""Derivatives against finite differences, with the figure when they differ."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.metrics import working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import Case
from stiefelkit.testing.require import require, require_within

__all__ = ["of_free", "require_derivatives", "require_second_derivatives"]

_RELATIVE, _ABSOLUTE, _STEP = 1e-5, 1e-7, 1e-6
_ENTRIES = 25
"""Up to as many entries of a frame each derivative is compared with a difference; beyond, one random direction."""

Function = Callable[..., Tensor]


def of_free(param: OrthogonalParam, coordinates: tuple[Tensor, ...]) -> tuple[Function, tuple[Tensor, ...]]:
    """The map of free leaves: its coordinates, with X at 0 in place of each frame S, which is exp(X - X^H) S then."""
    bound = [name in param.manifolds for name in param.coordinates]

    def leaf(c: Tensor, is_bound: bool) -> Tensor:
        n = c.shape[-2] if is_bound else 0
        return (c.new_zeros(*c.shape[:-2], n, n) if is_bound else c).requires_grad_()

    def fn(*leaves: Tensor) -> Tensor:
        moved = zip(leaves, coordinates, bound, strict=True)
        return param(*(_turned(c, x) if is_bound else x for x, c, is_bound in moved))

    return fn, tuple(map(leaf, coordinates, bound))


def _turned(s: Tensor, x: Tensor) -> Tensor:
    """exp(X - X^H) S, in float64, which no flag lowers."""
    wide = x.to(working_dtype(x.dtype))
    return (torch.matrix_exp(wide - wide.mH) @ s.to(wide.dtype)).to(s.dtype)


def require_derivatives(case: Case, fn: Function, leaves: tuple[Tensor, ...]) -> None:
    """Requires gradcheck, which says where the Jacobian is off the most; of large frames along one direction."""

    def values(*c: Tensor) -> tuple[Tensor, ...]:
        return (fn(*c),)

    if math.prod(case.shape) <= _ENTRIES:
        _check(torch.autograd.gradcheck, fn, leaves, values, leaves)
    else:
        _check_along(values, leaves)


def require_second_derivatives(case: Case, fn: Function, leaves: tuple[Tensor, ...]) -> None:
    """The same for second derivatives, by gradgradcheck."""
    g = case.normal(13)
    count = len(leaves)

    def gradient(*both: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            both = tuple(x if x.requires_grad else x.requires_grad_() for x in both)
            return torch.autograd.grad(fn(*both[:count]), both[:count], both[count], create_graph=True)

    if math.prod(case.shape) <= _ENTRIES:
        _check(torch.autograd.gradgradcheck, fn, leaves, gradient, (*leaves, g.requires_grad_()))
    else:
        _check_along(lambda *c: gradient(*c, g), leaves)


def _check_along(fn: Callable[..., tuple[Tensor, ...]], leaves: tuple[Tensor, ...]) -> None:
    generator = seeds.generator(12)
    along = [torch.randn(c.shape, generator=generator, dtype=c.dtype).to(c.device) for c in leaves]
    ys = fn(*leaves)
    gs = [torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device) for y in ys]

    def value(step: float) -> float:
        with torch.no_grad():
            moved = fn(*(c + step * d for c, d in zip(leaves, along, strict=True)))
            return sum((y * g.conj()).sum().real.item() for y, g in zip(moved, gs, strict=True))

    grads = torch.autograd.grad(ys, leaves, gs)
    ours = sum((a.conj() * d).sum().real.item() for a, d in zip(grads, along, strict=True))
    size = sum((a.norm() * d.norm()).item() for a, d in zip(grads, along, strict=True))
    difference = (value(1e-5) - value(-1e-5)) / 2e-5
    what = f"{ours:.8g} along a direction, where a difference gives {difference:.8g}: off by"
    require_within(abs(ours - difference), 1e-6 * size, what)


def _check(
    check: Callable[..., bool],
    fn: Function,
    leaves: tuple[Tensor, ...],
    measured: Callable[..., tuple[Tensor, ...]],
    inputs: tuple[Tensor, ...],
) -> None:
    options: dict[str, Any] = {"rtol": _RELATIVE, "atol": _ABSOLUTE}

    def plain(*c: Tensor) -> Tensor:
        return fn(*c)

    if check(plain, leaves, raise_exception=False, **options):
        return
    figure, bound, entry = _worst(measured, inputs)
    require_within(figure, bound, f"{check.__name__} fails, {entry} is off by")
    try:
        check(plain, leaves, **options)
    except Exception as error:
        require(False, f"{check.__name__} fails: {str(error).partition(chr(10))[0]}")
    require(False, f"{check.__name__} fails, and passes when it is asked again")


def _worst(fn: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> tuple[float, float, str]:
    """The entry of the Jacobian over real numbers that is furthest beyond its bound: by how much, the bound, where."""
    sizes = [_real(c).numel() for c in inputs]

    def of(v: Tensor) -> Tensor:
        return torch.cat([_real(y) for y in fn(*map(_like, v.split(sizes), inputs))])

    v = torch.cat([_real(c.detach()) for c in inputs]).requires_grad_()
    y = of(v)
    ours = torch.stack([torch.autograd.grad(y_i, v, retain_graph=True)[0] for y_i in y])
    steps = _STEP * torch.eye(v.numel(), dtype=v.dtype, device=v.device)
    columns = [(of(v + step).detach() - of(v - step).detach()) / (2 * _STEP) for step in steps]
    differences = torch.stack(columns, dim=1)
    off, bound = (ours - differences).abs(), _ABSOLUTE + _RELATIVE * differences.abs()
    i, j = divmod(int((off / bound).nan_to_num(torch.inf).argmax()), v.numel())
    entry = f"d y[{i}] / d x[{j}] = {ours[i, j].item():.8g}, by differences {differences[i, j].item():.8g},"
    return off[i, j].item(), bound[i, j].item(), entry


def _real(c: Tensor) -> Tensor:
    return (torch.view_as_real(c.resolve_conj()) if c.is_complex() else c).flatten()


def _like(v: Tensor, c: Tensor) -> Tensor:
    return torch.view_as_complex(v.view(*c.shape, 2)) if c.is_complex() else v.view(c.shape)

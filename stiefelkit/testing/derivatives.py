"""Derivatives against finite differences, and the laws of modes but plain reverse."""

from collections.abc import Callable

import torch
from torch import Tensor

from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.metrics import working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import Case, double, in_double, require_close
from stiefelkit.testing.suite import require_within

_DIRECTIONS = 3
"""Random directions along which a derivative is compared with a difference."""

Function = Callable[..., Tensor]
Tensors = tuple[Tensor, ...]


def of_free(param: OrthogonalParam, coordinates: Tensors) -> tuple[Function, Tensors]:
    """Returns the map of free leaves: X at 0 stands for each frame S, which is exp(X - X^H) S then, and the leaves."""
    bound = [name in param.manifolds for name in param.coordinates]

    def leaf(c: Tensor, is_bound: bool) -> Tensor:
        n = c.shape[-2] if is_bound else 0
        return (c.new_zeros(*c.shape[:-2], n, n) if is_bound else c).requires_grad_()

    def fn(*leaves: Tensor) -> Tensor:
        moved = zip(leaves, coordinates, bound, strict=True)
        return param(*(_turned(c, x) if is_bound else x for x, c, is_bound in moved))

    return fn, tuple(map(leaf, coordinates, bound))


def _turned(s: Tensor, x: Tensor) -> Tensor:
    """Returns exp(X - X^H) S, in float64, which no flag lowers."""
    wide = x.to(working_dtype(x.dtype))
    return (torch.matrix_exp(wide - wide.mH) @ s.to(wide.dtype)).to(s.dtype)


def require_derivatives(fn: Callable[..., Tensors], leaves: Tensors) -> None:
    """Requires derivatives along random directions to be those of finite differences."""
    for number in range(_DIRECTIONS):
        generator = seeds.generator(12 + 100 * number)
        along, ys = _normal_like(leaves, generator), fn(*leaves)
        gs = _normal_like(ys, generator)

        def value(step: float, along: Tensors = along, gs: Tensors = gs) -> float:
            with torch.no_grad():
                return _inner(gs, fn(*(c + step * d for c, d in zip(leaves, along, strict=True))))

        grads = torch.autograd.grad(ys, leaves, gs)
        ours = _inner(grads, along)
        size = sum((a.norm() * d.norm()).item() for a, d in zip(grads, along, strict=True))
        difference = (value(1e-5) - value(-1e-5)) / 2e-5
        what = f"{ours:.8g} along a direction, where a difference gives {difference:.8g}: off by"
        require_within(abs(ours - difference), 1e-6 * size + 1e-9, what)  # a map of one entry may be constant


# Other modes than plain reverse


def law_forward_mode(case: Case) -> None:
    """Forward mode is the adjoint of reverse mode, to first and second order, and in float32 that of float64."""
    param, coordinates = case.random(1.0)
    fn, leaves = of_free(param, coordinates)
    leaves = tuple(c.detach() for c in leaves)
    if not any(c.numel() for c in leaves):
        return
    tangents = _normal_like(leaves, seeds.generator(16))
    try:
        w, tangent = torch.func.jvp(fn, leaves, tangents)  # type: ignore[misc]
    except NotImplementedError:  # it has none
        return
    g = seeds.normal(w.shape, 17, w.dtype, w.device)
    if not case.is_wide:
        exact, doubled = of_free(in_double(case, param), double(coordinates))
        expected = torch.func.jvp(exact, tuple(c.detach() for c in doubled), double(tangents))[1]
        tolerance = 1e-3 if param.precision == "fast" else 1e-5
        return require_close(tangent, expected, tolerance, "the tangent is off that in float64 by")
    pulled = torch.func.vjp(fn, *leaves)[1](g)
    forward, reverse = _inner((tangent,), (g,)), _inner(pulled, tangents)
    # A reflector of one entry has the tangent 0, up to rounding.
    size = (1 + torch.linalg.vector_norm(tangent).item()) * torch.linalg.vector_norm(g).item()
    require_within(abs(forward - reverse), 1e-10 * size, "the tangent is off reverse mode by")
    if not param.traits.twice_differentiable:
        return

    def gradient(*leaves: Tensor) -> Tensors:
        return torch.func.vjp(fn, *leaves)[1](g)

    second = torch.func.jvp(gradient, leaves, tangents)[1]
    expected = torch.func.vjp(gradient, *leaves)[1](tangents)
    for a, b in zip(second, expected, strict=True):
        # The Hessian is its own adjoint.
        size = torch.linalg.vector_norm(g).item()
        require_close(a, b, 1e-9, "forward over reverse mode is off reverse mode twice by", size)


def law_batched_gradients(case: Case) -> None:
    """Several gradients in one batched call (`is_grads_batched`, `vectorize=True`) are those of the loop."""
    param, coordinates = case.random(1.0)
    fn, leaves = of_free(param, coordinates)
    w = fn(*leaves)
    gs = seeds.normal((3, *w.shape), 18, w.dtype, w.device)
    together = torch.autograd.grad(w, leaves, gs, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(w, leaves, g, retain_graph=True) for g in gs]
    for a, *bs in zip(together, *alone, strict=True):
        tolerance = 1e-10 if case.is_wide else 1e-4
        require_close(a, torch.stack(bs), tolerance, "batched gradients are off those of the loop by")


def _normal_like(tensors: Tensors, generator: torch.Generator) -> Tensors:
    return tuple(torch.randn(c.shape, generator=generator, dtype=c.dtype).to(c.device) for c in tensors)


def _inner(a: Tensors, b: Tensors) -> float:
    return sum((x.conj() * y).sum().real.item() for x, y in zip(a, b, strict=True))

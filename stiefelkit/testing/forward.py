"""The laws of derivatives in other modes than plain reverse: forward, forward over reverse, batched."""

import torch
from torch import Tensor

from stiefelkit.metrics import working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import Case
from stiefelkit.testing.derivatives import of_free
from stiefelkit.testing.require import double, in_double, require_within

__all__ = ["law_batched_gradients", "law_forward_mode"]

_SMALL = 64
"""Entries of a frame up to which derivatives in other modes are asked for: these laws are about modes, not sizes."""


def law_forward_mode(case: Case) -> None:
    """Forward mode is the adjoint of reverse mode, and second derivatives by it those of reverse mode; or it raises.

    In float32 tangents are within 1e-5 of float64's. A map that has none raises NotImplementedError.
    """
    if _entries(case) > _SMALL:
        return
    param, coordinates = case.random(1.0)
    fn, leaves = of_free(param, coordinates)
    leaves = tuple(c.detach() for c in leaves)
    if not any(c.numel() for c in leaves):
        return
    tangents = _like(leaves, 16)
    try:
        w, tangent = torch.func.jvp(fn, leaves, tangents)  # type: ignore[misc]
    except NotImplementedError:
        return
    g = seeds.normal(w.shape, 17, w.dtype, w.device)
    if case.dtype != working_dtype(case.dtype):
        exact, doubled = of_free(in_double(case, param), double(coordinates))
        expected = torch.func.jvp(exact, tuple(c.detach() for c in doubled), double(tangents))[1]
        off = torch.linalg.vector_norm(tangent.to(expected.dtype) - expected).item()
        tolerance = 1e-3 if param.precision == "fast" else 1e-5
        permitted = tolerance * torch.linalg.vector_norm(expected).item() + torch.finfo(torch.float32).tiny
        require_within(off, permitted, "the tangent is off that in float64 by")
        return
    pulled = torch.func.vjp(fn, *leaves)[1](g)
    forward, reverse = _inner((tangent,), (g,)), _inner(pulled, tangents)
    # A reflector of one entry has the tangent 0, up to rounding.
    size = (1 + torch.linalg.vector_norm(tangent).item()) * torch.linalg.vector_norm(g).item()
    require_within(abs(forward - reverse), 1e-10 * size, "the tangent is off reverse mode by")
    if not param.traits.twice_differentiable:
        return

    def gradient(*leaves: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(fn, *leaves)[1](g)

    second = torch.func.jvp(gradient, leaves, tangents)[1]
    expected = torch.func.vjp(gradient, *leaves)[1](tangents)
    for a, b in zip(second, expected, strict=True):
        # The Hessian is its own adjoint.
        off, size = torch.linalg.vector_norm(a - b).item(), torch.linalg.vector_norm(b).item()
        permitted = 1e-9 * (size + torch.linalg.vector_norm(g).item())
        require_within(off, permitted, "forward over reverse mode is off reverse mode twice by")


def law_batched_gradients(case: Case) -> None:
    """Several gradients in one batched call (`is_grads_batched`, `vectorize=True`) are those of the loop."""
    if _entries(case) > _SMALL:
        return
    param, coordinates = case.random(1.0)
    fn, leaves = of_free(param, coordinates)
    w = fn(*leaves)
    gs = seeds.normal((3, *w.shape), 18, w.dtype, w.device)
    together = torch.autograd.grad(w, leaves, gs, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(w, leaves, g, retain_graph=True) for g in gs]
    tolerance = 1e-10 if case.dtype == working_dtype(case.dtype) else 1e-4
    for a, *bs in zip(together, *alone, strict=True):
        b = torch.stack(bs)
        off, size = torch.linalg.vector_norm(a - b).item(), torch.linalg.vector_norm(b).item()
        permitted = tolerance * (size + torch.finfo(torch.float32).tiny)
        require_within(off, permitted, "batched gradients are off those of the loop by")


def _entries(case: Case) -> int:
    return torch.Size(case.shape).numel()


def _like(leaves: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    generator = seeds.generator(seed)
    return tuple(torch.randn(c.shape, generator=generator, dtype=c.dtype).to(c.device) for c in leaves)


def _inner(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    return sum((x.conj() * y).sum().real.item() for x, y in zip(a, b, strict=True))

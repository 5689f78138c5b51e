"""The laws of the numbers: orthogonality, gradients, purity, inverses, precision."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.errors import ImageError, StiefelkitError
from stiefelkit.metrics import orthogonality_error, permitted_return, working_dtype
from stiefelkit.param import OrthogonalParam
from stiefelkit.testing.cases import Case, LawBroken, carrier_of, layer_of, special_frames
from stiefelkit.testing.require import double, in_double, require, require_frame, require_frame_of, same_frame, slack


def law_frames(case: Case) -> None:
    """Columns are orthonormal to the rounding limit, at zero, random and equal coordinates up to 1e4."""
    drawn = [case.random(scale) for scale in (0.0, 1.0, 100.0, 1e4)]
    # Equal coordinates make blocks of low rank, in which a large part can swamp a small one.
    drawn += [case.equal(fill) for fill in (1.0, 100.0, 1e4)]
    for param, coordinates in drawn:
        w = param(*coordinates)
        require("frames", case, tuple(w.shape) == case.shape and w.dtype == case.dtype, f"{w.shape}, {w.dtype}")
        if param.traits.exact:
            require_frame("frames", case, w, lambda param=param, c=coordinates: in_double(case, param)(*double(c)))
        else:
            error, bound = orthogonality_error(w).max().item(), param.error_bound(*coordinates)
            require("frames", case, error <= bound, f"||W^H W - I||_F = {error:.3g}, its own bound {bound:.3g}")


def law_gradients(case: Case) -> None:
    """In float64 gradients equal finite differences; in float32 those of float64, at coordinates x 1, x 100, x 1e4."""
    if case.dtype in (torch.float64, torch.complex128):
        param, coordinates = case.random(1.0)
        fn, leaves = _of_free(param, coordinates)
        if math.prod(case.shape) <= 64:
            require("gradients", case, _agrees(torch.autograd.gradcheck, fn, leaves), "gradcheck fails")
        else:
            _check_direction(case, fn, leaves)
        return
    fast = case.build().precision == "fast"
    for scale, tolerance in ((1.0, 1e-3),) if fast else ((1.0, 1e-5), (100.0, 1e-5), (1e4, 1e-3)):
        param, coordinates = case.random(scale)
        g = torch.randn(case.shape, generator=torch.Generator().manual_seed(2), dtype=working_dtype(case.dtype))
        _compare_gradients(case, param, coordinates, g, scale, tolerance)
    # Nearly normal to the manifold: the tangent part is small, so the yardstick is the whole of dL/dW.
    param, coordinates = case.random(1.0)
    w = param(*coordinates).detach().to(g.dtype)
    _compare_gradients(
        case, param, coordinates, w + 1e-4 * g, 1.0, 1e-3 if fast else 1e-5, against=torch.linalg.vector_norm(w).item()
    )


def law_second_derivatives(case: Case) -> None:
    """Second derivatives equal finite differences of the first, or raise; they are never silently wrong."""
    if case.dtype not in (torch.float64, torch.complex128) or case.shape[-1] * case.shape[-2] > 40:
        return
    param, coordinates = case.random(1.0)
    fn, leaves = _of_free(param, coordinates)
    if param.traits.twice_differentiable:
        require("second_derivatives", case, _agrees(torch.autograd.gradgradcheck, fn, leaves), "gradgradcheck fails")
        return
    first = torch.autograd.grad(fn(*leaves).abs().square().sum(), leaves, create_graph=True)
    try:
        torch.autograd.grad(torch.stack([f.square().sum() for f in first]).sum(), leaves)
    except RuntimeError:
        return
    raise LawBroken(f"second_derivatives: {case} declares none and gives some.")


def law_pure(case: Case) -> None:
    """Same coordinates, same bits; inputs untouched; NaN propagates without a word."""
    param, coordinates = case.random(1.0)
    before = [c.clone() for c in coordinates]
    chart = {name: value.clone() for name, value in param.chart.items()}
    first = param(*coordinates)
    param(*(2 * c for c in coordinates))
    require("pure", case, torch.equal(first, param(*coordinates)), "two calls that differ")
    same = all(torch.equal(a, b) for a, b in zip(before, coordinates, strict=True))
    same = same and all(torch.equal(value, param.chart[name]) for name, value in chart.items())
    require("pure", case, same, "inputs or chart changed by forward")
    for i, c in enumerate(coordinates):
        if c.numel():
            poisoned = c.clone().flatten()
            poisoned[-1] = float("nan")
            w = param(*coordinates[:i], poisoned.view(c.shape), *coordinates[i + 1 :])
            require("pure", case, bool(torch.isnan(w).any()), f"NaN swallowed in {list(param.coordinates)[i]}")


def law_batch(case: Case) -> None:
    """A batch equals the loop over its members to 4 limits, 100 in float64."""
    if len(case.shape) == 2:
        return
    param, coordinates = case.random(1.0)
    w = param(*coordinates).flatten(0, -3)
    single = case.build(case.shape[-2:])
    depth = len(case.shape) - 2
    for i, own in enumerate(zip(*(c.flatten(0, depth - 1) for c in coordinates), strict=True)):
        single.load_chart_({name: value.flatten(0, depth - 1)[i] for name, value in param.chart.items()})
        off = torch.linalg.matrix_norm((single(*own) - w[i]).to(working_dtype(case.dtype))).item()
        permitted = same_frame(case) + slack(param, coordinates)
        require("batch", case, off <= permitted, f"{off:.2g} off the loop")


def law_round_trip(case: Case) -> None:
    """||forward(right_inverse(W)) - W||_F <= 8 limits + ||W^H W - I||_F for any frame, singular ones included.

    In float64 and complex128, with nothing finer to compute in, and where a map's `return_bound` says so, 100 limits
    for every 64 rows.
    """
    limit = min(case.build().return_bound, permitted_return(case.shape, case.dtype, unspared=True))
    if not case.build().traits.invertible:
        param, coordinates = case.drawn()
        try:
            param.right_inverse(param(*coordinates))
        except ImageError:
            return
        raise LawBroken(f"round_trip: {case} declares no right inverse and gives one.")
    for name, exact in special_frames(case):
        param = case.build()
        w = exact.to(case.dtype)
        try:
            coordinates = param.right_inverse(w)
        except ImageError:
            require("round_trip", case, not param.traits.onto, f"no preimage of {name}, though declared onto")
            continue
        dtypes = [c.dtype for c in coordinates]
        declared = list(param.coordinate_dtypes.values())
        require("round_trip", case, dtypes == declared, f"coordinates of {dtypes}, declared {declared}")
        off = torch.linalg.matrix_norm((param(*coordinates) - w).to(exact.dtype)).max().item()
        permitted = limit + orthogonality_error(w).max().item() + slack(param, coordinates)
        require("round_trip", case, off <= permitted, f"{name} comes back {off:.2g} away, permitted {permitted:.2g}")
    param, coordinates = case.drawn()
    w = param(*coordinates).detach()
    kept = w.clone()
    coordinates = param.right_inverse(w)
    back = param(*coordinates)
    off = torch.linalg.matrix_norm((back - w).to(working_dtype(case.dtype))).max().item()
    permitted = limit + orthogonality_error(w).max().item() + slack(param, coordinates)
    require("round_trip", case, off <= permitted, f"its own frame comes back {off:.2g} away")
    require("round_trip", case, torch.equal(w, kept), "right_inverse changes its argument")
    chart = {name: value.clone() for name, value in param.chart.items()}
    poisoned = w.clone()
    poisoned[..., 0, 0] = float("nan")
    for name, wrong in (("1.1 W", 1.1 * w), ("NaN", poisoned), ("a larger shape", torch.cat([w, w], dim=-2))):
        try:
            param.right_inverse(wrong)
        except StiefelkitError:
            same = all(torch.equal(value, param.chart[key]) for key, value in chart.items())
            require("round_trip", case, same, f"refusing {name} changes the chart")
            continue
        raise LawBroken(f"round_trip: {case} takes {name}, which is no frame of its shape.")


def law_finite_gradients(case: Case) -> None:
    """Gradients are finite at zero, equal and huge coordinates."""
    for fill in (0.0, 1.0, 1e4):
        param, coordinates = case.equal(fill)
        leaves = tuple(c.requires_grad_() for c in coordinates)
        g = torch.randn(case.shape, generator=torch.Generator().manual_seed(3), dtype=case.dtype)
        grads = torch.autograd.grad(param(*leaves), leaves, g)
        require("finite_gradients", case, all(bool(torch.isfinite(x).all()) for x in grads), f"coordinates = {fill}")


def law_decay(case: Case) -> None:
    """AdamW never leaves the manifold, with a weight decay that takes every coordinate to nearly nothing.

    A map with coordinates that must stay on a manifold is not asked: AdamW may not have them.
    """
    if case.build().manifolds:
        return
    layer = layer_of(case)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=2.0)
    target = init.haar(case.shape, working_dtype(case.dtype), torch.Generator().manual_seed(4)).to(case.dtype)
    for _ in range(30):
        optimizer.zero_grad()
        (layer.weight - target).abs().square().sum().backward()
        optimizer.step()
    require_frame_of("decay", case, layer)


def law_precision(case: Case) -> None:
    """Half-precision weights round once from float32 coordinates; autocast and default dtype change nothing."""
    param, coordinates = case.random(1.0)
    w = param(*coordinates)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        require("precision", case, torch.equal(param(*coordinates), w), "autocast changes the frame")
    with _lowered_products():
        require("precision", case, torch.equal(param(*coordinates), w), "TF32 changes the frame")
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        require("precision", case, torch.equal(param(*coordinates), w), "the default dtype changes the frame")
    finally:
        torch.set_default_dtype(default)
    if case.dtype != torch.float32:
        return
    for dtype in (torch.bfloat16, torch.float16):
        layer = layer_of(case).to(dtype)
        carrier = carrier_of(layer)
        kept = all(c.dtype == torch.float32 for c in carrier.coordinates.values())
        require("precision", case, layer.weight.dtype == dtype and kept, f"{dtype}: coordinates cast, or weight not")
        require_frame_of("precision", case, layer)


@contextlib.contextmanager
def _lowered_products() -> Iterator[None]:
    """Permits TF32 on CUDA and bfloat16 on CPU for float32 products, as training scripts do."""
    flags = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [flag.fp32_precision for flag in flags]
    try:
        for flag, lowered in zip(flags, ("tf32", "bf16"), strict=True):
            flag.fp32_precision = lowered
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.fp32_precision = value


def _of_free(
    param: OrthogonalParam, coordinates: tuple[Tensor, ...]
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The map of free leaves: its coordinates, with X at 0 in place of each frame S, which is exp(X - X^H) S then."""
    bound = [name in param.manifolds for name in param.coordinates]

    def leaf(c: Tensor, is_bound: bool) -> Tensor:
        n = c.shape[-2] if is_bound else 0
        return (c.new_zeros(*c.shape[:-2], n, n) if is_bound else c).requires_grad_()

    def fn(*leaves: Tensor) -> Tensor:
        moved = zip(leaves, coordinates, bound, strict=True)
        return param(*(torch.matrix_exp(x - x.mH) @ c if is_bound else x for x, c, is_bound in moved))

    return fn, tuple(map(leaf, coordinates, bound))


def _check_direction(case: Case, param: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> None:
    """Compares the gradient with a central difference along one random direction."""
    generator = torch.Generator().manual_seed(12)
    g = torch.randn(case.shape, generator=generator, dtype=case.dtype)
    along = [torch.randn(c.shape, generator=generator, dtype=c.dtype) for c in leaves]

    def value(step: float) -> float:
        with torch.no_grad():
            w = param(*(c + step * d for c, d in zip(leaves, along, strict=True)))
        return (w * g.conj()).sum().real.item()

    grads = torch.autograd.grad(param(*leaves), leaves, g)
    ours = sum((a.conj() * d).sum().real.item() for a, d in zip(grads, along, strict=True))
    size = sum((a.norm() * d.norm()).item() for a, d in zip(grads, along, strict=True))
    difference = (value(1e-5) - value(-1e-5)) / 2e-5
    found = f"{ours:.8g} along a direction, where a difference gives {difference:.8g}"
    require("gradients", case, abs(ours - difference) <= 1e-6 * size, found)


def _agrees(check: Callable[..., bool], param: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> bool:
    return check(lambda *c: param(*c), leaves, rtol=1e-5, atol=1e-7, raise_exception=False)


def _compare_gradients(
    case: Case,
    param: OrthogonalParam,
    coordinates: tuple[Tensor, ...],
    g: Tensor,
    scale: float,
    tolerance: float,
    against: float | None = None,
) -> None:
    leaves = tuple(c.detach().requires_grad_() for c in coordinates)
    doubled = tuple(c.requires_grad_() for c in double(coordinates))
    ours = torch.autograd.grad(param(*leaves), leaves, g.to(case.dtype))
    exact = torch.autograd.grad(in_double(case, param)(*doubled), doubled, g.to(case.dtype).to(g.dtype))
    for a, b in zip(ours, exact, strict=True):
        yardstick = torch.linalg.vector_norm(b).item() if against is None else against
        off = torch.linalg.vector_norm(a.to(b.dtype) - b).item()
        # A single column or phase may have no gradient at all.
        permitted = tolerance * yardstick + torch.finfo(torch.float32).tiny
        found = f"coordinates x {scale:g}: off by {off:.2g}, permitted {permitted:.2g}"
        require("gradients", case, off <= permitted, found)

"""The laws of the numbers: orthogonality, purity, derivatives in every mode, inverses, precision."""

import fnmatch
import functools
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.contract.param import OrthogonalParam, coordinate_dtypes, load_chart_
from stiefelkit.contract.table import rest_of
from stiefelkit.errors import ImageError, StiefelkitError
from stiefelkit.metrics import orthogonality_error, permitted_return, working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import (
    Case,
    apart,
    attributes,
    coordinate_list_of,
    double,
    in_double,
    layer_of,
    random_coordinates,
    require_close,
    require_frame,
    require_frame_of,
    require_same_bits,
    require_same_frame,
    slack,
    special_frames,
)
from stiefelkit.testing.lowered import lowered_products
from stiefelkit.testing.suite import require, require_refused, require_within

_SMALL = 64  # entries of a frame up to which its component is looked at
_DRAWS = 32
_DIRECTIONS = 3  # random directions along which a derivative is compared with a difference

Function = Callable[..., Tensor]
Tensors = tuple[Tensor, ...]


def law_contract(case: Case) -> None:
    """Coordinates and frames are as declared; unfit shapes and dtypes are refused."""
    param = case.build()
    patterns = case.cls.coordinate_names
    unknown = {name for name in param.coordinates if not any(fnmatch.fnmatch(name, p) for p in patterns)}
    require(not unknown, f"coordinates {unknown} are not in coordinate_names")
    # By identity: a map around another keeps the chart under longer keys.
    persistent = {id(value) for value in param.state_dict(keep_vars=True).values()}
    are_saved = all(id(choice) in persistent for choice in param.chart.values())
    require(are_saved, "a chart that state dicts leave out")
    require(not list(param.parameters()), "a map that owns parameters")
    options: dict[str, Any] = {"dtype": case.dtype, "no_such_option": 1}
    require_refused(TypeError, lambda: case.cls(case.shape, **options), "an unknown option")
    hidden = ", ".join(rest_of(case.cls))
    require(not hidden, f"its __init__ takes {hidden}, which hides the names of its options")
    n, p = case.shape[-2:]
    unfit: list[tuple[tuple[int, ...], torch.dtype]] = [((n,), case.dtype), ((n, 0), case.dtype)]
    for shape, dtype in [*unfit, ((p, n + 1), case.dtype), ((n, p), torch.int64)]:
        require_refused(StiefelkitError, functools.partial(case.build, shape, dtype), f"shape {shape} and {dtype}")
    param, coordinates = case.undrawn()
    w = param(*coordinates)
    found = f"forward returns shape {tuple(w.shape)} in {w.dtype}, and not self.shape {param.shape} in self.dtype"
    require((tuple(w.shape), w.dtype) == (param.shape, param.dtype), f"{found} {param.dtype}")


def law_pure(case: Case) -> None:
    """Same coordinates, same bits; inputs untouched; nothing is kept; NaN propagates without a word."""
    drawn, coordinates = case.undrawn()
    param = case.build()  # what the draw has written shows on another
    load_chart_(param, drawn.chart)
    before = [c.clone() for c in coordinates]
    held, _alive = attributes(param)
    chart = {name: value.clone() for name, value in param.chart.items()}
    first = param(*coordinates)
    for _ in range(3):
        param(*(2 * c for c in coordinates))
        again = param(*coordinates)
        require_same_bits(first, again, "two calls that differ by")
    same = all(torch.equal(a, b) for a, b in zip(before, coordinates, strict=True))
    same = same and all(torch.equal(value, param.chart[name]) for name, value in chart.items())
    require(same, "inputs or chart changed by forward")
    _require_nothing_kept(param, held, "forward")
    if param.traits.invertible:
        param.solve(case.drawn()[0](*case.drawn()[1]).detach())
        _require_nothing_kept(param, held, "invert")
    for i, c in enumerate(coordinates):
        if c.numel():
            poisoned, name = c.clone(memory_format=torch.contiguous_format), list(param.coordinates)[i]
            poisoned.view(-1)[-1] = torch.nan
            spoilt = (*coordinates[:i], poisoned, *coordinates[i + 1 :])
            require(bool(torch.isnan(param(*spoilt)).any()), f"NaN swallowed in {name}")


def _require_nothing_kept(param: OrthogonalParam, held: dict[str, object], who: str) -> None:
    after, _alive = attributes(param)
    written = [name for name in {**held, **after} if held.get(name) != after.get(name)]
    require(not written, f"{who} writes to {', '.join(written)}, which copies and compiled code will not have")


def law_frames(case: Case) -> None:
    """Columns are orthonormal to the rounding limit, at zero, random and equal coordinates up to 1e4."""
    draws = [functools.partial(case.random, scale) for scale in (0.0, 1.0, 100.0, 1e4)]
    # Equal coordinates make blocks of low rank, in which a large part can swamp a small one.
    draws += [functools.partial(case.equal, fill) for fill in (1.0, 100.0, 1e4)]
    for draw in draws:
        param, coordinates = draw()
        w = param(*coordinates)
        if param.traits.exact:
            require_frame(w, lambda param=param, c=coordinates: in_double(case, param)(*double(c)))
        else:
            error, bound = orthogonality_error(w).max().item(), param.error_bound(*coordinates)
            require_within(error, bound, "by its own bound, ||W^H W - I||_F =")


def law_gradients(case: Case) -> None:
    """In float64 gradients equal finite differences; in float32 those of float64, at coordinates x 1, x 100, x 1e4."""
    if case.is_wide:
        param, coordinates = case.random(1.0)
        fn, leaves = of_free(param, coordinates)
        return require_derivatives(lambda *c: (fn(*c),), leaves)
    fast = case.build().precision == "fast"
    for scale, tolerance in ((1.0, 1e-3),) if fast else ((1.0, 1e-5), (100.0, 1e-5), (1e4, 1e-3)):
        param, coordinates = case.random(scale)
        g = case.normal(2, working_dtype(case.dtype))
        _compare_gradients(case, param, coordinates, g, scale, tolerance)
    # Nearly normal to the manifold: the tangent part is small, so the yardstick is the whole of dL/dW.
    param, coordinates = case.random(1.0)
    w = param(*coordinates).detach().to(g.dtype)
    size = torch.linalg.vector_norm(w).item()
    _compare_gradients(case, param, coordinates, w + 1e-4 * g, 1.0, 1e-3 if fast else 1e-5, size)


def law_second_derivatives(case: Case) -> None:
    """Second derivatives, by coordinates and by dL/dW, equal finite differences of the first, or raise."""
    param, coordinates = case.random(1.0)
    fn, leaves = of_free(param, coordinates)

    def gradient(*given: Tensor) -> Tensors:
        with torch.enable_grad():
            *leaves, g = (x if x.requires_grad else x.requires_grad_() for x in given)
            return torch.autograd.grad(fn(*leaves), leaves, g, create_graph=True)

    if param.traits.twice_differentiable:
        return require_derivatives(gradient, (*leaves, case.normal(13).requires_grad_()))
    first = torch.autograd.grad(fn(*leaves).abs().square().sum(), leaves, create_graph=True)
    total = torch.stack([f.square().sum() for f in first]).sum()
    require_refused(RuntimeError, lambda: torch.autograd.grad(total, leaves), "a second derivative that it lacks")


def law_component(case: Case) -> None:
    """Square real frames have the determinants that `traits.component` says; others are "connected", and only they.

    A map of rotations alone is not onto.
    """
    param, _ = case.drawn()
    *_, n, p = case.shape
    claimed = param.traits.component
    in_two_parts = n == p and not param.is_complex
    kind = f"{'complex' if param.is_complex else 'real'} frames of {n} x {p} have {1 + in_two_parts} components"
    require((claimed != "connected") == in_two_parts, f"{kind}, and it declares {claimed!r}")
    signs: list[Tensor] = []
    for k in range(_DRAWS if in_two_parts and n * p <= _SMALL else 0):
        coordinates = random_coordinates(param, (1.0, 100.0)[k % 2], seeds.generator(20 + k))
        signs.append(torch.linalg.det(param(*coordinates).double()).sign())
        if claimed == "rotations":
            require(bool((signs[-1] > 0).all()), "it declares rotations, and has one of determinant -1")
        if claimed == "chart":
            require(torch.equal(signs[0], signs[-1]), "it declares that the chart decides, and one has both components")
    is_half = claimed == "rotations"
    require(not (is_half and param.traits.onto), "it declares rotations, half of all frames, and that it is onto")
    if claimed == "coordinates" and signs:
        are_both = any(bool((sign != signs[0]).any()) for sign in signs)
        require(are_both, f"it declares that the coordinates decide, and {_DRAWS} draws are in one component")


def law_threads(case: Case) -> None:
    """Four threads at once, with products lowered, get the frames and gradients that one gets alone, bit by bit."""
    count, rounds = 4, 2
    param, _ = case.drawn()
    drawn = [random_coordinates(param, 1.0, seeds.generator(14 + k)) for k in range(count)]
    g = case.normal(13)

    def results(coordinates: Tensors) -> list[Tensor]:
        leaves = [c.detach().requires_grad_() for c in coordinates]
        w = param(*leaves)
        return [w.detach(), *torch.autograd.grad(w, leaves, g)]

    def work(k: int) -> list[list[Tensor]]:
        with lowered_products():
            together.wait()
            return [results(drawn[k]) for _ in range(rounds)]

    alone = [results(coordinates) for coordinates in drawn]
    together = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        threaded = list(pool.map(work, range(count)))
    names = ["the frame", *(f"the gradient of {name}" for name in param.coordinates)]
    for expected, found in zip(alone, threaded, strict=True):
        for name, b, *of_rounds in zip(names, expected, *found, strict=True):
            for a in of_rounds:
                require_same_bits(a, b, f"{name} in a thread is off by")


def law_batch(case: Case) -> None:
    """Coordinates and chart carry the batch, which equals the loop over its members to 4 limits, 100 in float64."""
    batch = case.shape[:-2]
    for name, value in case.build().chart.items():
        shape = tuple(value.shape)
        require(shape[: len(batch)] == batch, f"the chart's {name} has shape {shape}, and not {batch} in front")
    param, coordinates = case.random(1.0)
    w = param(*coordinates).flatten(0, -3)
    single = case.build(case.shape[-2:])
    depth = len(case.shape) - 2
    for i, member in enumerate(zip(*(c.flatten(0, depth - 1) for c in coordinates), strict=True)):
        load_chart_(single, {name: value.flatten(0, depth - 1)[i] for name, value in param.chart.items()})
        require_same_frame(case, param, coordinates, single(*member), w[i], "off the loop by")


def law_round_trip(case: Case) -> None:
    """||forward(right_inverse(W)) - W||_F <= 8 limits + ||W^H W - I||_F for any frame; 100 a 64 rows in float64."""
    limit = min(case.build().return_bound, permitted_return(case.shape, case.dtype, unspared=True))
    if not case.build().traits.invertible:
        param, coordinates = case.drawn()
        w = param(*coordinates)
        return require_refused(ImageError, lambda: param.right_inverse(w), "a right inverse that it lacks")
    for name, exact in special_frames(case):
        param = case.build()
        w = exact.to(case.dtype)
        try:
            coordinates = param.right_inverse(w)
        except ImageError:
            require(not param.traits.onto, f"no preimage of {name}, though declared onto")
            continue
        dtypes = [c.dtype for c in coordinates]
        declared = list(coordinate_dtypes(param).values())
        require(dtypes == declared, f"coordinates of {dtypes}, declared {declared}")
        permitted = limit + orthogonality_error(w).max().item() + slack(param, coordinates)
        require_within(apart(param(*coordinates), w), permitted, f"{name} comes back away by")
    param, coordinates = case.drawn()
    w = param(*coordinates).detach()
    before = w.clone()
    coordinates = param.right_inverse(w)
    permitted = limit + orthogonality_error(w).max().item() + slack(param, coordinates)
    require_within(apart(param(*coordinates), w), permitted, "its own frame comes back away by")
    require(torch.equal(w, before), "right_inverse changes its argument")
    chart = {name: value.clone() for name, value in param.chart.items()}
    poisoned = w.clone()
    poisoned[..., 0, 0] = float("nan")
    for name, wrong in (("1.1 W", 1.1 * w), ("NaN", poisoned), ("a larger shape", torch.cat([w, w], dim=-2))):
        require_refused(
            StiefelkitError, functools.partial(param.right_inverse, wrong), f"{name}, no frame of its shape,"
        )
        same = all(torch.equal(value, param.chart[key]) for key, value in chart.items())
        require(same, f"refusing {name} changes the chart")


def law_finite_gradients(case: Case) -> None:
    """Gradients are finite at zero, equal and huge coordinates."""
    for fill in (0.0, 1.0, 1e4):
        param, coordinates = case.equal(fill)
        leaves = tuple(c.requires_grad_() for c in coordinates)
        g = case.normal(3)
        grads = torch.autograd.grad(param(*leaves), leaves, g)
        require(all(bool(torch.isfinite(x).all()) for x in grads), f"not finite at coordinates = {fill:g}")


def law_decay(case: Case) -> None:
    """AdamW never leaves the manifold, with a weight decay that takes every coordinate to nearly nothing."""
    if case.build().manifolds:  # which AdamW may not have
        return
    layer = layer_of(case)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.25, weight_decay=2.0)
    drawn = init.haar(case.shape, working_dtype(case.dtype), seeds.generator(4))
    target = drawn.to(case.device, case.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* regularizes nothing")  # what is meant here
        for _ in range(10):
            optimizer.zero_grad()
            (layer.weight - target).abs().square().sum().backward()
            optimizer.step()
    require_frame_of(case, layer)


def law_precision(case: Case) -> None:
    """Half-precision weights round once from float32 coordinates; autocast and default dtype change nothing."""
    param, coordinates = case.random(1.0)
    w = param(*coordinates)
    with torch.autocast(torch.device(case.device).type, dtype=torch.bfloat16):
        require(torch.equal(param(*coordinates), w), "autocast changes the frame")
    with lowered_products():
        require(torch.equal(param(*coordinates), w), "TF32 changes the frame")
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        require(torch.equal(param(*coordinates), w), "the default dtype changes the frame")
    finally:
        torch.set_default_dtype(default)
    if case.dtype != torch.float32:
        return
    for dtype in (torch.bfloat16, torch.float16):
        layer = layer_of(case).to(dtype)
        coordinate_list = coordinate_list_of(layer)
        found = {c.dtype for c in coordinate_list.coordinates.values()}
        words = f"after .to({dtype}) the weight is {layer.weight.dtype}, its coordinates, to stay in float32, {found}"
        require(layer.weight.dtype == dtype and found <= {torch.float32}, words)
        require_frame_of(case, layer)


def _compare_gradients(
    case: Case,
    param: OrthogonalParam,
    coordinates: Tensors,
    g: Tensor,
    scale: float,
    tolerance: float,
    size: float = 0.0,
) -> None:
    """Requires gradients like those of float64, relative to their own size or to one that is given."""
    leaves = tuple(c.detach().requires_grad_() for c in coordinates)
    doubled = tuple(c.requires_grad_() for c in double(coordinates))
    ours = torch.autograd.grad(param(*leaves), leaves, g.to(case.dtype))
    w = in_double(case, param)(*doubled)
    exact = torch.autograd.grad(w, doubled, g.to(case.dtype).to(g.dtype), retain_graph=True)
    for k, (a, b) in enumerate(zip(ours, exact, strict=True)):
        yardstick = size or torch.linalg.vector_norm(b).item()
        off = torch.linalg.vector_norm(a.to(b.dtype) - b).item()
        if not size and off > tolerance * yardstick:
            # Where the manifold has one dimension or two, a random dL/dW may be nearly normal to it: its gradient is
            # measured against the root mean square of those of 32 others.
            source = seeds.generator(15)
            others = (torch.randn(w.shape, generator=source, dtype=w.dtype).to(w.device) for _ in range(32))
            squares = [torch.autograd.grad(w, doubled[k], z, retain_graph=True)[0].abs().square().sum() for z in others]
            yardstick = max(yardstick, torch.stack(squares).mean().sqrt().item())
        # A single column or phase may have no gradient at all.
        permitted = tolerance * yardstick + torch.finfo(torch.float32).tiny
        require_within(off, permitted, f"coordinates x {scale:g}: off by")


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

        grads = torch.autograd.grad(ys, leaves, gs, materialize_grads=True)
        ours = _inner(grads, along)
        size = sum((a.norm() * d.norm()).item() for a, d in zip(grads, along, strict=True))
        difference = (value(1e-5) - value(-1e-5)) / 2e-5
        what = f"{ours:.8g} along a direction, where a difference gives {difference:.8g}: off by"
        require_within(abs(ours - difference), 1e-6 * size + 1e-9, what)  # a map of one entry may be constant


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

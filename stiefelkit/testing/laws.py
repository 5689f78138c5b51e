"""The laws themselves: each takes a case and raises `LawBroken`."""

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from stiefelkit import attach, init
from stiefelkit.errors import ImageError, StiefelkitError, UnfilledError
from stiefelkit.functional import nearest_frame
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.param import OrthogonalParam, coordinate_dtype
from stiefelkit.testing.cases import Case, LawBroken, carrier_of, layer_of, permitted_error, special_frames

__all__ = ["LAWS"]


def law_frames(case: Case) -> None:
    """Columns are orthonormal to the rounding limit, at coordinates x 1, x 100, x 1e4 and at zero."""
    for scale in (0.0, 1.0, 100.0, 1e4):
        param, coordinates = case.random(scale)
        w = param(*coordinates)
        _require("frames", case, tuple(w.shape) == case.shape and w.dtype == case.dtype, f"{w.shape}, {w.dtype}")
        if param.traits.exact:
            _require_frame("frames", case, w, lambda param=param, c=coordinates: _in_double(case, param)(*_double(c)))
        else:
            _require("frames", case, bool(torch.isfinite(w).all()), "an entry that is not finite")


def law_gradients(case: Case) -> None:
    """In float64 gradients equal finite differences; in float32 those of float64, at coordinates x 1, x 100, x 1e4."""
    if case.dtype in (torch.float64, torch.complex128):
        if case.shape[-1] * case.shape[-2] <= 64:
            param, coordinates = case.random(1.0)
            leaves = tuple(c.requires_grad_() for c in coordinates)
            _require("gradients", case, _agrees(torch.autograd.gradcheck, param, leaves), "gradcheck fails")
        return
    for scale, tolerance in ((1.0, 1e-5), (100.0, 1e-5), (1e4, 1e-3)):
        param, coordinates = case.random(scale)
        g = torch.randn(case.shape, generator=torch.Generator().manual_seed(2), dtype=working_dtype(case.dtype))
        _compare_gradients(case, param, coordinates, g, scale, tolerance)
    # Nearly normal to the manifold: the tangent part is small, so the yardstick is the whole of dL/dW.
    param, coordinates = case.random(1.0)
    w = param(*coordinates).detach().to(g.dtype)
    _compare_gradients(case, param, coordinates, w + 1e-4 * g, 1.0, 1e-5, against=torch.linalg.vector_norm(w).item())


def law_second_derivatives(case: Case) -> None:
    """Second derivatives equal finite differences of the first, or raise; they are never silently wrong."""
    if case.dtype not in (torch.float64, torch.complex128) or case.shape[-1] * case.shape[-2] > 40:
        return
    param, coordinates = case.random(1.0)
    leaves = tuple(c.requires_grad_() for c in coordinates)
    if param.traits.twice_differentiable:
        _require(
            "second_derivatives", case, _agrees(torch.autograd.gradgradcheck, param, leaves), "gradgradcheck fails"
        )
        return
    first = torch.autograd.grad(param(*leaves).abs().square().sum(), leaves, create_graph=True)
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
    _require("pure", case, torch.equal(first, param(*coordinates)), "two calls that differ")
    same = all(torch.equal(a, b) for a, b in zip(before, coordinates, strict=True))
    same = same and all(torch.equal(value, param.chart[name]) for name, value in chart.items())
    _require("pure", case, same, "inputs or chart changed by forward")
    if coordinates[0].numel():
        poisoned = (torch.full_like(coordinates[0], float("nan")), *coordinates[1:])
        _require("pure", case, bool(torch.isnan(param(*poisoned)).any()), "NaN swallowed")


def law_batch(case: Case) -> None:
    """A batch equals the loop over its members to 4 limits."""
    if len(case.shape) == 2:
        return
    param, coordinates = case.random(1.0)
    w = param(*coordinates).flatten(0, -3)
    single = case.build(case.shape[-2:])
    depth = len(case.shape) - 2
    for i, own in enumerate(zip(*(c.flatten(0, depth - 1) for c in coordinates), strict=True)):
        single.load_chart_({name: value.flatten(0, depth - 1)[i] for name, value in param.chart.items()})
        off = torch.linalg.matrix_norm((single(*own) - w[i]).to(working_dtype(case.dtype))).item()
        _require("batch", case, off <= 4 * rounding_limit(case.shape[-1], case.dtype), f"{off:.2g} off the loop")


def law_round_trip(case: Case) -> None:
    """||forward(right_inverse(W)) - W||_F <= 8 limits + ||W^H W - I||_F for any frame, singular ones included."""
    limit = rounding_limit(case.shape[-1], case.dtype)
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
            _require("round_trip", case, not param.traits.onto, f"no preimage of {name}, though declared onto")
            continue
        dtypes = {c.dtype for c in coordinates}
        _require("round_trip", case, dtypes == {coordinate_dtype(case.dtype)}, f"coordinates of {dtypes}")
        off = torch.linalg.matrix_norm((param(*coordinates) - w).to(exact.dtype)).max().item()
        permitted = 8 * limit + orthogonality_error(w).max().item()
        _require("round_trip", case, off <= permitted, f"{name} comes back {off:.2g} away, permitted {permitted:.2g}")
    param, coordinates = case.drawn()
    w = param(*coordinates)
    try:
        param.right_inverse(w * 1.1)
    except StiefelkitError:
        return
    raise LawBroken(f"round_trip: {case} takes 1.1 W, which is no frame.")


def law_finite_gradients(case: Case) -> None:
    """Gradients are finite at zero, equal and huge coordinates."""
    for fill in (0.0, 1.0, 1e4):
        param, coordinates = case.drawn()
        leaves = tuple(torch.full_like(c, fill).requires_grad_() for c in coordinates)
        g = torch.randn(case.shape, generator=torch.Generator().manual_seed(3), dtype=case.dtype)
        grads = torch.autograd.grad(param(*leaves), leaves, g)
        _require("finite_gradients", case, all(bool(torch.isfinite(x).all()) for x in grads), f"coordinates = {fill}")


def law_decay(case: Case) -> None:
    """AdamW never leaves the manifold, with a weight decay that takes every coordinate to nearly nothing."""
    layer = layer_of(case)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=2.0)
    target = init.haar(case.shape, working_dtype(case.dtype), torch.Generator().manual_seed(4)).to(case.dtype)
    for _ in range(30):
        optimizer.zero_grad()
        (layer.weight - target).abs().square().sum().backward()
        optimizer.step()
    _require_frame_of("decay", case, layer)


def law_precision(case: Case) -> None:
    """Half-precision weights round once from float32 coordinates; autocast and default dtype change nothing."""
    param, coordinates = case.random(1.0)
    w = param(*coordinates)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _require("precision", case, torch.equal(param(*coordinates), w), "autocast changes the frame")
    if case.dtype != torch.float32:
        return
    for dtype in (torch.bfloat16, torch.float16):
        layer = layer_of(case).to(dtype)
        carrier = carrier_of(layer)
        kept = all(c.dtype == torch.float32 for c in carrier.coordinates.values())
        _require("precision", case, layer.weight.dtype == dtype and kept, f"{dtype}: coordinates cast, or weight not")
        _require_frame_of("precision", case, layer)


def law_schemes(case: Case) -> None:
    """Every init scheme draws a frame (or says that the chart cannot), and the same one from the same generator."""
    for scheme in case.cls.schemes:
        drawn = []
        for _ in range(2):
            param = case.build()
            try:
                coordinates, chart = param.initial(scheme, torch.Generator().manual_seed(5))
            except ImageError:
                _require("schemes", case, not param.traits.onto, f"{scheme} cannot be drawn, though declared onto")
                break
            param.load_chart_(chart)
            shapes = dict(zip(param.coordinates, (tuple(c.shape) for c in coordinates), strict=True))
            _require("schemes", case, shapes == dict(param.coordinates), f"{scheme} draws shapes {shapes}")
            drawn.append(param(*(c.to(coordinate_dtype(case.dtype)) for c in coordinates)))
        if len(drawn) == 2:
            _require("schemes", case, torch.equal(*drawn), f"{scheme} does not follow the generator")
            if case.build().traits.exact:
                _require_frame(
                    "schemes", case, drawn[0], lambda w=drawn[0]: nearest_frame(w.to(working_dtype(w.dtype)))
                )


def law_linear(case: Case) -> None:
    """`linear(x)` equals x @ W.mT to rounding."""
    *batch, _, p = case.shape
    if batch:
        return
    param, coordinates = case.random(1.0)
    x = torch.randn(5, p, generator=torch.Generator().manual_seed(6), dtype=case.dtype)
    y, expected = param.linear(x, *coordinates), x @ param(*coordinates).mT
    off = (torch.linalg.vector_norm(y - expected) / torch.linalg.vector_norm(expected)).item()
    _require("linear", case, off <= 8 * torch.finfo(case.dtype).eps, f"{off:.2g} relative")


def law_checkpoint(case: Case) -> None:
    """State dicts and copies bring back the same bits, name their map, and refuse another one or a plain weight."""
    layer = layer_of(case)
    w = layer.weight.detach()
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    other = layer_of(case, seed=7)
    other.load_state_dict(state)
    _require("checkpoint", case, torch.equal(other.weight, w), "load_state_dict changes the weight")
    twin = copy.deepcopy(layer)
    _require("checkpoint", case, torch.equal(twin.weight, w), "deepcopy changes the weight")
    attach.bake(twin, "weight")
    _require("checkpoint", case, torch.equal(layer.weight, w), "baking a copy changes the original")
    _require("checkpoint", case, torch.equal(twin.weight, w), "baking changes the weight")
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    _require("checkpoint", case, torch.equal(loaded.weight, w), "torch.save(module) changes the weight")
    for wrong, why in (({"weight": w}, "a plain weight"), (_renamed(state), "another map")):
        try:
            layer.load_state_dict(wrong)
        except StiefelkitError:
            continue
        raise LawBroken(f"checkpoint: {case} loads {why} without an error.")
    empty = layer_of(case).to("meta").to_empty(device="cpu")
    try:
        empty.weight  # noqa: B018
    except UnfilledError:
        empty.load_state_dict(state)
        _require("checkpoint", case, torch.equal(empty.weight, w), "loading after to_empty changes the weight")
        return
    raise LawBroken(f"checkpoint: {case} is read after to_empty.")


def law_functional_call(case: Case) -> None:
    """Under vmap, stacked coordinates give what the loop gives."""
    layers = [layer_of(case, seed=seed) for seed in (8, 9)]
    chart = dict(layers[0].named_buffers())
    stacked = {
        name: torch.stack([dict(layer.named_parameters())[name] for layer in layers])
        for name, _ in layers[0].named_parameters()
    }

    def read(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layers[0], (parameters, chart), ())

    together = torch.vmap(read)(stacked)
    for i in range(2):
        alone = read({name: value[i] for name, value in stacked.items()})
        off = torch.linalg.matrix_norm((together[i] - alone).to(working_dtype(case.dtype))).max().item()
        permitted = 4 * rounding_limit(case.shape[-1], case.dtype)
        _require("functional_call", case, off <= permitted, f"vmap is {off:.2g} off the loop")


def law_compile(case: Case) -> None:
    """torch.compile(fullgraph=True) and torch.export give the weight and the gradient of eager mode."""
    layer = layer_of(case)
    g = torch.randn(case.shape, generator=torch.Generator().manual_seed(10), dtype=case.dtype)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    limit = rounding_limit(case.shape[-1], case.dtype)
    w, expected = compiled(), layer()
    off = torch.linalg.matrix_norm((w - expected).detach().to(working_dtype(case.dtype))).max().item()
    _require("compile", case, off <= 4 * limit, f"the compiled weight is {off:.2g} off")
    parameters = list(layer.parameters())
    ours, eager = (torch.autograd.grad(x, parameters, g) for x in (w, expected))
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, eager, strict=True))
    _require("compile", case, close, "the compiled gradient is off")
    exported = torch.export.export(layer, ()).module()()
    off = torch.linalg.matrix_norm((exported - expected).detach().to(working_dtype(case.dtype))).max().item()
    _require("compile", case, off <= 4 * limit, f"the exported weight is {off:.2g} off")


def law_contract(case: Case) -> None:
    """Coordinates are named and counted as declared; unfit shapes and dtypes are refused."""
    param = case.build()
    unknown = set(param.coordinates) - set(case.cls.coordinate_names)
    _require("contract", case, not unknown, f"coordinates {unknown} are not in coordinate_names")
    persistent = set(param.state_dict())
    _require("contract", case, set(param.chart) <= persistent, "a chart that state dicts leave out")
    _require("contract", case, not list(param.parameters()), "a map that owns parameters")
    n, p = case.shape[-2:]
    unfit: list[tuple[tuple[int, ...], torch.dtype]] = [((n,), case.dtype), ((n, 0), case.dtype)]
    for shape, dtype in [*unfit, ((p, n + 1), case.dtype), ((n, p), torch.int64)]:
        try:
            case.build(shape, dtype)
        except StiefelkitError:
            continue
        raise LawBroken(f"contract: {case} takes shape {shape} and {dtype}.")


LAWS: dict[str, Callable[[Case], None]] = {
    "frames": law_frames,
    "gradients": law_gradients,
    "second_derivatives": law_second_derivatives,
    "pure": law_pure,
    "batch": law_batch,
    "round_trip": law_round_trip,
    "finite_gradients": law_finite_gradients,
    "decay": law_decay,
    "precision": law_precision,
    "schemes": law_schemes,
    "linear": law_linear,
    "checkpoint": law_checkpoint,
    "functional_call": law_functional_call,
    "compile": law_compile,
    "contract": law_contract,
}
"""Name to law. Each takes a case and raises `LawBroken`."""


def _require_frame_of(law: str, case: Case, layer: Any) -> None:
    """Requires the frames law of a module's weight, if its map is exact."""
    carrier = carrier_of(layer)
    if carrier.param.traits.exact:
        values = _double(carrier.coordinates.values())
        _require_frame(law, case, layer.weight, lambda: _in_double(case, carrier.param)(*values))


def _double(coordinates: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(c.detach().double() for c in coordinates)


def _in_double(case: Case, param: OrthogonalParam) -> OrthogonalParam:
    twin = case.build(dtype=working_dtype(case.dtype))
    twin.load_chart_(param.chart)
    return twin


def _require(law: str, case: Case, holds: bool, found: str) -> None:
    if not holds:
        raise LawBroken(f"{law}: {case}: {found}.")


def _require_frame(law: str, case: Case, w: Tensor, in_double: Callable[[], Tensor]) -> None:
    """Requires the limit, or for structured input, whose rounding errors align, 1.2 x what rounding alone gives."""
    error = orthogonality_error(w).max().item()
    permitted = permitted_error(w.shape[-1], w.dtype)
    if not error <= permitted:
        exact = in_double()
        if orthogonality_error(exact).max().item() <= permitted_error(w.shape[-1], exact.dtype):
            rounded = orthogonality_error(exact.to(w.dtype)).max().item()
            permitted = max(permitted, 1.2 * rounded + torch.finfo(w.dtype).eps)
    _require(law, case, error <= permitted, f"||W^H W - I||_F = {error:.3g}, permitted {permitted:.3g}")


def _agrees(check: Callable[..., bool], param: OrthogonalParam, leaves: tuple[Tensor, ...]) -> bool:
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
    doubled = tuple(c.requires_grad_() for c in _double(coordinates))
    ours = torch.autograd.grad(param(*leaves), leaves, g.to(case.dtype))
    exact = torch.autograd.grad(_in_double(case, param)(*doubled), doubled, g.to(case.dtype).to(g.dtype))
    for a, b in zip(ours, exact, strict=True):
        yardstick = torch.linalg.vector_norm(b).item() if against is None else against
        off = torch.linalg.vector_norm(a.double() - b).item()
        # A single column or phase may have no gradient at all.
        permitted = tolerance * yardstick + torch.finfo(torch.float32).tiny
        found = f"coordinates x {scale:g}: off by {off:.2g}, permitted {permitted:.2g}"
        _require("gradients", case, off <= permitted, found)


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    key = "parametrizations.weight._extra_state"
    text = bytes(state[key].tolist()).decode().replace('"map": "', '"map": "another ')
    return state | {key: torch.tensor(list(text.encode()), dtype=torch.uint8)}

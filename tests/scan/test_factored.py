"""Recurrent matrices in factors: the numbers of the scan with W, for every map that has factors."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.contract.param import coordinate_dtypes, load_chart_
from stiefelkit.contract.table import find_parametrization
from stiefelkit.nn import GORU, LinearTransitionRNN, OrthogonalRNN
from stiefelkit.scan import Factored, activations, scan
from stiefelkit.scan.engines import problem
from stiefelkit.scan.structures import STRUCTURES, brick
from stiefelkit.weights.find import coordinate_list_of

DOUBLE, COMPLEX = torch.float64, torch.complex128
MAPS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("givens", COMPLEX, {"layers": 2}),
    ("givens", COMPLEX, {"layers": 5}),
    ("givens", DOUBLE, {"layers": 1}),
    ("givens", DOUBLE, {"layers": 4}),
    ("fourier", COMPLEX, {}),
    ("householder", DOUBLE, {"reflections": 3}),
    ("householder", COMPLEX, {"reflections": 2}),
]
SIZES = [5, 5, 5, 3, 3, 1]
LAYOUTS = list(itertools.product((None, SIZES), (False, True), (False, True)))


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(problem, "CHUNK_BYTES", 1)
    monkeypatch.setattr(problem, "CHUNK_ROWS", 10)
    monkeypatch.setattr(brick, "BLOCK", 50)


def placed(name: str, dtype: torch.dtype, options: dict[str, Any], n: int = 6) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A map with a chart that was drawn, and coordinates."""
    map = find_parametrization(name)((n, n), dtype=dtype, **options)
    coordinates, chart = map.initial(map.schemes[0])
    load_chart_(map, chart)
    wanted = coordinate_dtypes(map).values()
    return map, tuple(c.to(dtype).requires_grad_() for c, dtype in zip(coordinates, wanted, strict=True))


def drawn(map: Any, activation: str = "modrelu", sizes: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Arguments of a scan by name, but for W."""
    n, real = map.shape[-1], map.dtype.to_real()
    arguments = {
        "x": torch.randn(*((6, 5) if sizes is None else (sum(sizes),)), 3, dtype=real),
        "h0": torch.randn(5, n, dtype=map.dtype),
        "u": torch.randn(n, 3, dtype=map.dtype),
        "bias": torch.randn(n, dtype=map.dtype),
    }
    if activation == "modrelu":
        arguments["activation_bias"] = 0.3 * torch.randn(n, dtype=real)
    return {name: t.requires_grad_() for name, t in arguments.items()}


def run(w: Any, arguments: dict[str, torch.Tensor], **options: Any) -> tuple[Any, torch.Tensor]:
    given = dict(arguments)
    options.setdefault("backend", "inplace")
    return scan(given.pop("x"), w, given.pop("h0"), **given, **options)


def blocks(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows.real, rows.imag], -1) if rows.is_complex() else rows.clone()


def factored(map: Any, coordinates: Any) -> Factored:
    return Factored(map.structure, map.factors(*coordinates))


def compared(w: Any, arguments: dict[str, torch.Tensor], leaves: Any, **options: Any) -> list[torch.Tensor]:
    """States, and gradients by arguments and coordinates of a loss that weighs every number differently."""
    results = [t for t in run(w, arguments, **options) if t is not None]
    weights = [torch.arange(1.0, 1 + t.numel(), dtype=DOUBLE).view(t.shape).sin() for t in results]
    parts = [
        (t.real * weight).sum() + (t.abs() * weight.flip(-1)).sum() for t, weight in zip(results, weights, strict=True)
    ]
    return [*results, *torch.autograd.grad(sum(parts), [*arguments.values(), *leaves])]  # type: ignore[arg-type]


def require_same(map: Any, coordinates: Any, arguments: dict[str, torch.Tensor], **how: Any) -> None:
    dense = compared(map(*coordinates), arguments, coordinates, **how)
    ours = compared(factored(map, coordinates), arguments, coordinates, **how)
    torch.testing.assert_close(ours, dense, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "dtype", "options"), MAPS)
@pytest.mark.parametrize("n", [6, 7])
def test_factors_make_the_frame_of_their_map(name, dtype, options, n):
    map, coordinates = placed(name, dtype, options, n)
    for scale in (1.0, 0.0):  # zero reflectors are the identity
        at = [c.detach() * scale for c in coordinates]
        eye = blocks(torch.eye(n, dtype=dtype))
        w = torch.zeros_like(eye)
        STRUCTURES[map.structure](map.factors(*at)).add_(w, eye)
        torch.testing.assert_close(w, blocks(map(*at).mT), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("sizes", "reverse", "last_only"), LAYOUTS)
@pytest.mark.parametrize(("name", "dtype", "options"), MAPS)
def test_states_and_gradients_are_those_with_the_matrix(name, dtype, options, sizes, reverse, last_only):
    map, coordinates = placed(name, dtype, options, 7)
    how = {"batch_sizes": sizes, "reverse": reverse, "last_only": last_only}
    require_same(map, coordinates, drawn(map, sizes=sizes), **how)


@pytest.mark.parametrize("activation", activations.names())
def test_every_real_activation_goes_with_factors(activation):
    map, coordinates = placed("givens", DOUBLE, {"layers": 3})
    require_same(map, coordinates, drawn(map, activation), activation=activation)


def test_other_backends_refuse_factors():
    map, coordinates = placed("fourier", COMPLEX, {})
    require_same(map, coordinates, drawn(map), backend="auto")
    with pytest.raises(errors.OptionError, match="factors"):
        run(factored(map, coordinates), drawn(map), backend="reference")


@pytest.mark.parametrize(
    ("name", "dtype", "options", "rounding"),
    [
        ("givens", torch.complex64, {"layers": 2}, 8),
        ("givens", torch.float32, {"layers": 6}, 16),
        ("fourier", torch.complex64, {}, 16),
        ("householder", torch.float32, {"reflections": 8}, 8),
    ],
)
def test_a_step_in_factors_keeps_lengths_and_states_to_a_few_roundings(name, dtype, options, rounding):
    """|h_T| / |h_0| and h_T are within `rounding` eps a step of what float64 gives."""
    n, steps = 64, 200
    map, coordinates = placed(name, dtype, options, n)
    h0 = torch.randn(20, n, dtype=dtype)
    x = torch.zeros(steps, 20, n)
    h = run(factored(map, coordinates), {"x": x, "h0": h0}, activation="identity", last_only=True)[1].detach()
    finer = find_parametrization(name)((n, n), dtype=torch.promote_types(dtype, DOUBLE), **options)
    load_chart_(finer, map.chart)
    w = finer(*(c.detach().double() for c in coordinates))
    exact = h0.to(w.dtype) @ torch.linalg.matrix_power(w, steps).mT
    bound = rounding * steps * torch.finfo(dtype).eps
    lengths = torch.linalg.vector_norm(h0.to(w.dtype), dim=-1)
    assert (torch.linalg.vector_norm(h.to(w.dtype), dim=-1) / lengths - 1).abs().max() < bound
    assert (torch.linalg.vector_norm(h - exact, dim=-1) / lengths).max() < bound


@pytest.mark.slow
def test_compiled_layers_take_factors():
    rnn = OrthogonalRNN(2, 8, parametrization="givens", layers=2, field="complex", factored=True)
    x = torch.randn(9, 3, 2)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    results = []
    for net in (rnn, compiled):
        out, _ = net(x)
        results.append([out.detach(), *torch.autograd.grad(out.abs().sum(), list(rnn.parameters()))])
    torch.testing.assert_close(*results)


def layers(kind: type = OrthogonalRNN, **options: Any) -> tuple[Any, Any]:
    """Two layers with the same weights: W formed, and in factors."""
    dense = kind(3, 8, dtype=DOUBLE, factored=False, **options)
    ours = copy.deepcopy(dense)
    ours.factored = True
    return dense, ours


@pytest.mark.parametrize("kind", [OrthogonalRNN, LinearTransitionRNN])
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_layers_agree_in_all_directions(kind, last_only, packed):
    dense, ours = layers(
        kind, parametrization="givens", layers=2, field="complex", num_layers=2, bidirectional=True, trainable_h0=True
    )
    x: Any = [torch.randn(length, 3, dtype=DOUBLE) for length in (12, 9, 9, 8)]
    x = pack_sequence(x) if packed else torch.stack([row[:8] for row in x], 1)
    results = []
    for rnn in (dense, ours):
        out, last = rnn(x, last_only=last_only)
        out = last if out is None else out.data if packed else out
        (out.abs().sum() + last.real.sum()).backward()
        results.append([out.detach(), last.detach(), *(p.grad for p in rnn.parameters())])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def test_factors_change_nothing_that_is_saved_or_baked():
    dense, ours = layers(parametrization="householder", reflections=2)
    assert dense.state_dict().keys() == ours.state_dict().keys()
    dense.load_state_dict(ours.state_dict())
    assert torch.equal(dense.weight_hh_l0, ours.weight_hh_l0)
    x = torch.randn(9, 2, 3, dtype=DOUBLE)
    before, _ = ours(x)
    baked = sk.bake(copy.deepcopy(ours))
    torch.testing.assert_close(baked(x)[0], before)
    assert "factored=True" in repr(ours)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: OrthogonalRNN(3, 8, factored=True), "Cayley"),
        (lambda: OrthogonalRNN(3, 8, parametrization="givens", layout="fft", factored=True), "Givens"),
        (lambda: OrthogonalRNN(3, 8, parametrization="givens", backend="reference", factored=True), "reference"),
        (lambda: GORU(3, 8, factored=True), "matrix"),
        (lambda: OrthogonalRNN(3, 8, parametrization="householder", gain=0.9, factored=True), "gain"),
    ],
)
def test_what_cannot_be_in_factors_is_refused(make, word):
    with pytest.raises(errors.OptionError, match=word):
        make()


def test_forward_mode_and_few_steps_take_the_matrix(monkeypatch):
    rnn = OrthogonalRNN(3, 8, parametrization="fourier", field="complex", factored=True)
    x = torch.randn(9, 2, 3)
    torch.func.jvp(lambda x: rnn(x)[0].abs(), (x,), (x,))
    coordinate_list = coordinate_list_of(rnn, "weight_hh_l0")
    assert coordinate_list is not None
    monkeypatch.setattr(type(coordinate_list.param), "factors", None)
    rnn(x[:7])
    with pytest.raises(TypeError):
        rnn(x)


@pytest.mark.parametrize(
    ("name", "is_complex", "options", "n", "rows", "is_factored"),
    [
        ("fourier", True, {}, 512, 50, True),
        ("fourier", True, {}, 256, 128, False),
        ("givens", True, {"layers": 2}, 256, 20, True),
        ("givens", False, {"layers": 2}, 512, 20, True),
        ("givens", False, {"layers": 2}, 256, 20, False),
        ("householder", False, {"reflections": 32}, 256, 50, True),
        ("householder", False, {"reflections": 128}, 256, 128, False),
        ("householder", True, {"reflections": 32}, 256, 1, True),
    ],
)
def test_factors_are_taken_where_they_were_measured_to_be_faster(name, is_complex, options, n, rows, is_factored):
    dtype = torch.complex64 if is_complex else torch.float32
    assert find_parametrization(name)((n, n), dtype=dtype, **options).prefers_factors(rows) is is_factored


@pytest.mark.parametrize(("n", "is_factored"), [(16, False), (192, True)])
def test_a_layer_asks_its_map_and_is_the_same_to_the_bit_where_it_keeps_the_matrix(n, is_factored):
    asked, dense = (
        OrthogonalRNN(3, n, parametrization="householder", reflections=2, factored=factored)
        for factored in (None, False)
    )
    dense.load_state_dict(asked.state_dict())
    x = torch.randn(9, 8, 3)
    assert torch.equal(asked(x)[0], dense(x)[0]) is not is_factored
    torch.testing.assert_close(asked(x)[0], dense(x)[0], rtol=1e-4, atol=1e-5)

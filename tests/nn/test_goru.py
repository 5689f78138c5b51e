"""The gated recurrence against a step written out, against torch's GRU, and the laws of packed and reversed input."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stiefelkit import errors
from stiefelkit.nn import GORU
from stiefelkit.scan import activations, find_activation, goru_scan
from stiefelkit.scan.engines import problem
from stiefelkit.testing import seeds

DOUBLE = torch.float64
M, N = 3, 4
ACTIVATIONS = activations.names()
NAMES = [*ACTIVATIONS, "leaky_relu(0.3)"]
LAYOUTS = [(None, False), (None, True), ([5, 5, 5, 3, 3, 1], False), ([5, 5, 5, 3, 3, 1], True)]


@pytest.fixture
def several_chunks(monkeypatch):
    """Small problems are cut into chunks too."""
    monkeypatch.setattr(problem, "CHUNK_BYTES", 300)
    monkeypatch.setattr(problem, "CHUNK_ROWS", 8)


def tensors(steps=5, batch=2, n=N, m=M, dtype=DOUBLE, seed=0, sizes=None):
    source = seeds.generator(seed)
    shapes = {
        "x": (steps, batch, m) if sizes is None else (sum(sizes), m),
        "h0": (batch, n),
        "q": (n, n),
        "w": (2 * n, n),
        "u": (3 * n, m),
        "bias": (2 * n,),
        "activation_bias": (n,),
    }
    drawn = {key: torch.randn(shape, dtype=dtype, generator=source) for key, shape in shapes.items()}
    return {**drawn, "q": torch.linalg.qr(drawn["q"])[0], "activation_bias": 0.1 * drawn["activation_bias"]}


def scanned(*given, **options) -> Any:
    return goru_scan(*given, **{"backend": "inplace", **options})


def gradients(given, cotangents, **options) -> dict[str, torch.Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    pairs = [(t, g) for t, g in zip(goru_scan(**leaves, **options), cotangents, strict=True) if t is not None]
    found = torch.autograd.grad([t for t, _ in pairs], list(leaves.values()), [g for _, g in pairs])
    return dict(zip(leaves, found, strict=True))


def plain(x, h, q, w, u, bias, activation_bias, activation="modrelu"):
    act, outputs = find_activation(activation, False), []
    (w_r, w_g), (u_r, u_g, u_c), (b_r, b_g) = w.chunk(2), u.chunk(3), bias.chunk(2)
    for row in x:
        r, g = torch.sigmoid(row @ u_r.T + h @ w_r.T + b_r), torch.sigmoid(row @ u_g.T + h @ w_g.T + b_g)
        c = act(r * (h @ q.T) + row @ u_c.T, activation_bias)
        h = g * h + (1 - g) * c
        outputs.append(h)
    return torch.stack(outputs), h


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gated_recurrence_is_its_formula(activation):
    given = tensors()
    out, last = scanned(**given, activation=activation)
    expected, expected_last = plain(given.pop("x"), given.pop("h0"), **given, activation=activation)
    assert torch.allclose(out, expected)
    assert torch.allclose(last, expected_last)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize(("sizes", "reverse"), LAYOUTS)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.usefixtures("several_chunks")
def test_values_and_gradients_are_those_of_the_loop(activation, sizes, reverse, last_only):
    given = tensors(6, 5, sizes=sizes)
    options: Any = dict(activation=activation, batch_sizes=sizes, reverse=reverse, last_only=last_only)
    expected, own = (goru_scan(**given, **options, backend=backend) for backend in ("reference", "inplace"))
    for a, b in zip(own, expected, strict=True):
        assert (a is None) == (b is None) == (last_only and a is None)
        assert a is None or torch.allclose(a, b, rtol=0, atol=1e-12)  # type: ignore[arg-type]
    cotangents = [None if t is None else torch.randn_like(t) for t in expected]
    loop = gradients(given, cotangents, backend="reference", **options)
    for name, g in gradients(given, cotangents, backend="inplace", **options).items():
        assert torch.allclose(g, loop[name], rtol=0, atol=1e-11 * float(loop[name].abs().max())), name


@pytest.mark.parametrize("without", ["activation_bias", "x"])
def test_gradients_that_are_not_asked_for_change_no_other(without):
    given = tensors()
    fixed = {without: given.pop(without)}
    if without == "activation_bias":
        fixed = {}
    loop, own = (
        torch.autograd.grad(goru_scan(**leaves, **fixed, backend=backend)[1].sum(), list(leaves.values()))
        for backend in ("reference", "inplace")
        for leaves in [{name: t.clone().requires_grad_() for name, t in given.items()}]
    )
    for a, b in zip(own, loop, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.usefixtures("several_chunks")
def test_the_gated_recurrence_has_the_gradients_of_finite_differences(activation, last_only):
    given = {key: value.requires_grad_() for key, value in tensors(steps=4).items()}
    names = list(given)

    def run(*values):
        out, last = goru_scan(**dict(zip(names, values, strict=True)), activation=activation, last_only=last_only)
        assert (out is None) == last_only
        return last if out is None else (out, last)

    assert torch.autograd.gradcheck(run, tuple(given.values()))


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize(("T", "B", "n", "m"), [(1, 1, 1, 1), (1, 4, 5, 3), (7, 1, 5, 1), (3, 0, 4, 2), (200, 3, 7, 2)])
def test_odd_sizes_are_those_of_the_loop(T, B, n, m, last_only):
    given = tensors(T, B, n, m)
    expected, own = (goru_scan(**given, last_only=last_only, backend=name) for name in ("reference", "auto"))
    cotangents = [None if t is None else torch.randn_like(t) for t in expected]
    loop = gradients(given, cotangents, backend="reference", last_only=last_only)
    for a, b in zip(own, expected, strict=True):
        assert a is None or torch.allclose(a, b, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]
    for name, g in gradients(given, cotangents, last_only=last_only).items():
        assert torch.allclose(g, loop[name], rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("activation", NAMES)
def test_float32_gradients_are_within_1e_5_of_float64(activation):
    given = tensors(100, 7, 30, 4, dtype=torch.float32)
    given["w"], given["u"] = 0.3 * given["w"], 0.3 * given["u"]
    cotangents = [torch.randn_like(t) for t in scanned(**given)]
    wide = {name: t.to(DOUBLE) for name, t in given.items()}
    exact = gradients(wide, [g.to(DOUBLE) for g in cotangents], activation=activation)
    for name, g in gradients(given, cotangents, activation=activation).items():
        error = torch.linalg.vector_norm(g - exact[name]) / torch.linalg.vector_norm(exact[name])
        # Bent over a length of sqrt(1e-5), it multiplies the rounding of z by 300.
        assert error < (1e-4 if activation == "modrelu_epsilon" else 1e-5), name


def test_strided_input_and_gradients_are_taken_as_they_are():
    given = tensors()
    strided = {
        name: t.repeat_interleave(2, -1)[..., ::2] if t.dim() == 1 else t.mT.contiguous().mT
        for name, t in given.items()
    }
    g, last = torch.randn(2, 5, N, dtype=DOUBLE).transpose(0, 1), torch.randn(N, 2, dtype=DOUBLE).mT
    first, second = gradients(given, (g.contiguous(), last.contiguous())), gradients(strided, (g, last))
    ones = torch.ones(5, 2, N, dtype=DOUBLE), torch.ones(2, N, dtype=DOUBLE)
    third, fourth = gradients(given, ones), gradients(given, [t[..., :1].expand(t.shape) for t in ones])
    for name in given:
        assert torch.allclose(first[name], second[name])
        assert torch.allclose(third[name], fourth[name])


def test_nan_stays_in_its_sequence():
    given = tensors()
    given["x"][2, 1, 0] = float("nan")
    out, last = scanned(**given)
    assert out[:2].isfinite().all()
    assert out[2:, 1].isnan().all()
    assert last[0].isfinite().all()


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_rows_are_the_sequences_one_by_one(reverse):
    given, lengths = tensors(steps=4, batch=3), [4, 2, 1]
    x, h0 = given.pop("x"), given.pop("h0")
    sizes = [sum(length > t for length in lengths) for t in range(4)]
    packed = torch.cat([x[t, :size] for t, size in enumerate(sizes)])
    out, last = scanned(packed, h0, **given, batch_sizes=sizes, reverse=reverse)
    steps = out.split(sizes)
    for b, length in enumerate(lengths):
        single, end = scanned(x[:length, b : b + 1], h0[b : b + 1], **given, reverse=reverse)
        assert torch.allclose(torch.stack([steps[t][b] for t in range(length)]), single[:, 0])
        assert torch.allclose(last[b], end[0])


@pytest.mark.parametrize("last_only", [False, True])
def test_functional_gradients_and_maps_over_samples(last_only):
    given = tensors(4)
    samples = torch.randn(3, *given.pop("x").shape, dtype=DOUBLE)
    names = list(given)

    def loss(x, *weights):
        out, last = goru_scan(x, **dict(zip(names, weights, strict=True)), last_only=last_only)
        return (last if out is None else out).square().sum()

    weights, every = tuple(given.values()), tuple(range(1, 7))
    leaves = tuple(t.clone().requires_grad_() for t in weights)
    expected = [torch.autograd.grad(loss(x, *leaves), leaves) for x in samples]
    for own, g in zip(torch.func.grad(loss, every)(samples[0], *weights), expected[0], strict=True):
        assert torch.allclose(own, g)
    mapped = torch.func.vmap(torch.func.grad(loss, every), (0, *(None,) * 6))(samples, *weights)
    for i, own in enumerate(mapped):
        assert torch.allclose(own, torch.stack([g[i] for g in expected]))
    values = torch.func.vmap(loss, (1, *(None,) * 6))(samples.movedim(0, 1), *weights)
    assert torch.allclose(values, torch.stack([loss(x, *weights) for x in samples]))
    # An ensemble: every sample has a Q of its own.
    several = torch.stack([given["q"], given["q"].mT, -given["q"]])
    at = names.index("q") + 1
    in_dims = tuple(0 if i in (0, at) else None for i in range(7))
    ensemble = [(*weights[: at - 1], q, *weights[at:]) for q in several]
    own = torch.func.vmap(torch.func.grad(loss, at), in_dims)(samples, *weights[: at - 1], several, *weights[at:])
    for i, each in enumerate(ensemble):
        assert torch.allclose(own[i], torch.func.grad(loss, at)(samples[i], *each))


def test_second_derivatives_need_the_reference_and_say_so():
    given = tensors(3)
    x = given["x"].requires_grad_()
    (g,) = torch.autograd.grad(scanned(**given, activation="tanh")[0].sum(), x, create_graph=True)
    with pytest.raises(errors.OptionError, match='backend="reference"'):
        g.square().sum().backward()
    out = scanned(**given, activation="tanh", backend="reference")[0]
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), x)[0].abs().sum() > 0


def test_forward_mode_takes_the_reference():
    given = tensors(3)
    x, step = given.pop("x"), 1e-6

    def last(x):
        return goru_scan(x, **given, activation="tanh")[1]

    tangent = torch.randn_like(x)
    pushed: Any = torch.func.jvp(last, (x,), (tangent,))[1]
    assert torch.allclose(pushed, (last(x + step * tangent) - last(x - step * tangent)) / (2 * step), atol=1e-8)


@pytest.mark.parametrize("last_only", [False, True])
def test_compiled_without_breaks_or_unrolling(last_only):
    given = tensors()
    del given["x"]
    names = list(given)

    def loss(x, *weights):
        out, last = goru_scan(x, **dict(zip(names, weights, strict=True)), last_only=last_only)
        return (last if out is None else out).square().sum()

    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves = [t.requires_grad_() for t in given.values()]
    for T in (5, 9):
        x = torch.randn(T, 2, M, dtype=DOUBLE)
        own = torch.autograd.grad(compiled(x, *leaves), leaves)
        for a, b in zip(own, torch.autograd.grad(loss(x, *leaves), leaves), strict=True):
            assert torch.allclose(a, b)
    torch._dynamo.reset()
    torch.compile(loss, fullgraph=True, backend=backend)(torch.randn(300, 2, M, dtype=DOUBLE), *leaves)
    assert len(list(graphs[0].graph.nodes)) < 80


def test_a_gated_net_exports_with_any_length_and_batch():
    rnn = GORU(3, 4, bidirectional=True)
    T, B = torch.export.Dim("T", min=2, max=500), torch.export.Dim("B", min=2, max=64)
    exported = torch.export.export(rnn, (torch.randn(5, 3, 3),), dynamic_shapes=({0: T, 1: B},)).module()
    x = torch.randn(11, 7, 3)
    for a, b in zip(exported(x), rnn(x), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "inplace"])
def test_autocast_leaves_the_gated_recurrence_in_full_precision(backend):
    rnn = GORU(3, 8, backend=backend)
    x = torch.randn(5, 2, 3)
    expected = rnn(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = rnn(x)
        assert rnn(x.bfloat16())[0].dtype == torch.float32
    assert torch.allclose(out, expected, atol=1e-6)
    out.sum().backward()


def test_bfloat16_states_are_rounded_once():
    given = {name: t.bfloat16() for name, t in tensors(50, dtype=torch.float32).items()}
    own, exact = scanned(**given), scanned(**{name: t.float() for name, t in given.items()})
    for a, b in zip(own, exact, strict=True):
        assert torch.equal(a, b.bfloat16())
    assert all(g.dtype == torch.bfloat16 for g in gradients(given, [torch.ones_like(t) for t in own]).values())


def test_weights_that_change_between_forward_and_backward_are_noticed():
    given = tensors()
    u = given["u"].requires_grad_()
    out, _ = scanned(**given)
    with torch.no_grad():
        u.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


class Storages(TorchDispatchMode):
    """Remembers storages of more than so many bytes that operators make."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.found = least, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, tuple | list) else (made,):
            if isinstance(t, torch.Tensor) and (storage := t.untyped_storage()).nbytes() >= self.least:
                self.found[storage.data_ptr()] = storage
        return made


@pytest.mark.parametrize("activation", NAMES)
def test_the_outputs_are_the_only_tensor_as_long_as_the_sequence(activation, monkeypatch):
    monkeypatch.setattr(problem, "CHUNK_ROWS", 40)
    monkeypatch.setattr(problem, "CHUNK_BYTES", 1)
    T, B, n = 400, 4, 8
    given = tensors(T, B, n, 1)
    weights = [given[name].requires_grad_() for name in ("q", "w", "u", "bias")]
    g = torch.randn(T, B, n, dtype=DOUBLE)
    with Storages(T * B * n * 8 // 4) as made:
        out, last = scanned(**given, activation=activation)
        torch.autograd.grad(out, weights, g)
    assert set(made.found) == {t.untyped_storage().data_ptr() for t in (out, g)}
    with Storages(T * B * n * 8 // 4) as made:
        torch.autograd.grad(scanned(**given, activation=activation, last_only=True)[1], weights, last)
    assert not made.found


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": torch.zeros(4, 3)}, errors.ShapeError, "square q"),
        ({"w": torch.zeros(4, 4)}, errors.ShapeError, "w of shape (8, 4)"),
        ({"u": torch.zeros(8, 3)}, errors.ShapeError, "u of shape (12, 3)"),
        ({"bias": torch.zeros(4)}, errors.ShapeError, "bias of shape (8,)"),
        ({"activation_bias": torch.zeros(3)}, errors.ShapeError, "activation_bias of shape (4,)"),
        ({"h0": torch.zeros(3, 4)}, errors.ShapeError, "h0 of shape (2, 4)"),
        ({"x": torch.zeros(0, 2, 3)}, errors.ShapeError, "T >= 1"),
        ({"x": torch.zeros(6, 3), "batch_sizes": [2, 3]}, errors.ShapeError, "do not increase, each >= 1, got [2, 3]"),
        ({"x": torch.zeros(6, 3), "batch_sizes": []}, errors.ShapeError, "add up to the rows of x, 6, got 0"),
        ({"x": torch.zeros(6, 3), "batch_sizes": [2, 2]}, errors.ShapeError, "add up to the rows of x, 6, got 4"),
        ({"q": torch.zeros(4, 4, dtype=torch.complex64)}, errors.DtypeError, "real q"),
        ({"x": torch.zeros(5, 2, 3, dtype=torch.complex64)}, errors.DtypeError, "real x"),
        ({"q": torch.zeros(4, 4, dtype=torch.int64)}, errors.DtypeError, "int64"),
        ({"backend": "cuda_graphs"}, errors.UnknownNameError, "'cuda_graphs'"),
        ({"backend": "triton"}, errors.OptionError, "'triton' needs"),
        ({"backend": "autos"}, errors.UnknownNameError, 'did you mean "auto"'),
        ({"activation": "modrelo"}, errors.UnknownNameError, 'did you mean "modrelu"'),
        ({"activation": "tanh(2)"}, errors.OptionError, "Only leaky_relu"),
    ],
)
def test_the_gated_recurrence_says_what_it_needs(change, error, text):
    with pytest.raises(error) as caught:
        goru_scan(**{**tensors(), **change})
    assert text in str(caught.value)


def test_the_gated_layer_takes_the_backends_of_its_scan():
    rnn: Any = GORU(3, 4, backend="reference")
    x = torch.randn(5, 2, 3)
    expected = rnn(x)[0]
    rnn.backend = "inplace"
    assert torch.allclose(rnn(x)[0], expected, atol=1e-6)
    with pytest.raises(errors.UnknownNameError, match="GORU has no backend 'cuda_graphs'"):
        GORU(3, 4, backend="cuda_graphs")


def test_oplu_needs_an_even_number_of_gated_units():
    with pytest.raises(errors.ShapeError, match="even number of units, got 5"):
        goru_scan(**tensors(n=5), activation="oplu")

"""The scan: every backend gives the values and gradients of the plain loop, under every transform of torch."""

import itertools
from typing import Any

import pytest
import torch

from stiefelkit import errors
from stiefelkit.scan import scan
from stiefelkit.scan.checks import Recurrence
from stiefelkit.scan.engines import problem

DOUBLE = torch.float64
REAL_ACTIVATIONS = ["modrelu", "tanh", "relu", "leaky_relu", "leaky_relu(0.3)", "abs", "oplu", "identity"]
CASES = [(name, False) for name in [*REAL_ACTIVATIONS, "modrelu_epsilon(0.1)"]]
CASES += [(name, True) for name in ("modrelu", "modrelu_epsilon(0.1)", "identity")]
LAYOUTS = [(None, False), (None, True), ([5, 5, 5, 3, 3, 1], False), ([5, 5, 5, 3, 3, 1], True)]


def drawn(
    activation: str,
    is_complex: bool = False,
    sizes: list[int] | None = None,
    *,
    T: int = 6,
    B: int = 5,
    n: int = 6,
    m: int | None = 3,
    complex_input: bool = False,
    dtype: torch.dtype = DOUBLE,
) -> dict[str, torch.Tensor]:
    """Arguments of a scan by name."""
    own = dtype.to_complex() if is_complex else dtype
    width = n if m is None else m
    x = torch.randn(*((T, B) if sizes is None else (sum(sizes),)), width, dtype=own if complex_input else dtype)
    found = {
        "x": x,
        "w": torch.linalg.qr(torch.randn(n, n, dtype=own))[0].contiguous(),
        "h0": torch.randn(B, n, dtype=own),
        "bias": torch.randn(n, dtype=own),
    }
    if m is not None:
        found["u"] = torch.randn(n, m, dtype=own)
    if activation.startswith("modrelu"):
        found["activation_bias"] = 0.5 * torch.randn(n, dtype=dtype)
    return found


def run(arguments: dict[str, torch.Tensor], **options: Any) -> tuple[Any, torch.Tensor]:
    given = dict(arguments)
    options.setdefault("backend", "inplace")
    return scan(given.pop("x"), given.pop("w"), given.pop("h0"), **given, **options)


def gradients(arguments: dict[str, torch.Tensor], cotangents: Any, **options: Any) -> dict[str, torch.Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in arguments.items()}
    pairs = [(t, g) for t, g in zip(run(leaves, **options), cotangents, strict=True) if t is not None and g is not None]
    found = torch.autograd.grad([t for t, _ in pairs], list(leaves.values()), [g for _, g in pairs])
    return dict(zip(leaves, found, strict=True))


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Small problems are cut into chunks too."""
    monkeypatch.setattr(problem, "CHUNK_BYTES", 500)
    monkeypatch.setattr(problem, "CHUNK_ROWS", 8)


def require_those_of_the_loop(arguments: dict[str, torch.Tensor], **options: Any) -> None:
    """Values and gradients are those of the loop."""
    expected = run(arguments, backend="reference", **options)
    for a, b in zip(run(arguments, **options), expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=0, atol=1e-12)
    cotangents = [None if t is None else torch.randn_like(t) for t in expected]
    loop = gradients(arguments, cotangents, backend="reference", **options)
    for name, g in gradients(arguments, cotangents, **options).items():
        assert g.dtype == arguments[name].dtype
        largest = float(loop[name].abs().amax()) if loop[name].numel() else 0.0
        assert torch.allclose(g, loop[name], rtol=0, atol=1e-11 * largest), name


@pytest.mark.parametrize(("sizes", "reverse"), LAYOUTS)
@pytest.mark.parametrize(("activation", "is_complex"), CASES)
def test_values_and_gradients_are_those_of_the_loop(activation, is_complex, sizes, reverse):
    for m, complex_input, last_only in itertools.product((3, None), {False, is_complex}, (False, True)):
        arguments = drawn(activation, is_complex, sizes, m=m, complex_input=complex_input)
        options: dict[str, Any] = dict(activation=activation, batch_sizes=sizes, reverse=reverse, last_only=last_only)
        require_those_of_the_loop(arguments, **options)


@pytest.mark.parametrize(("activation", "is_complex"), CASES)
def test_float32_gradients_are_within_1e_5_of_float64(activation, is_complex):
    if activation in ("tanh", "identity"):
        worst = off_float64(activation, is_complex)
        assert max(worst.values()) < 1e-5, worst
        return
    # A state that float32 puts on the other side of a kink has another derivative: in one draw of five there is none.
    draws = [off_float64(activation, is_complex) for _ in range(5)]
    assert min(max(draw.values()) for draw in draws) < 1e-4, draws


def off_float64(activation, is_complex):
    """Relative errors of float32 gradients, by argument."""
    arguments = drawn(activation, is_complex, T=100, B=7, n=30, m=4, dtype=torch.float32)
    arguments["u"] = arguments["u"] * 0.1
    wide = {name: t.to(torch.promote_types(t.dtype, DOUBLE)) for name, t in arguments.items()}
    cotangents = [torch.randn_like(t) for t in run(arguments, activation=activation)]
    exact = gradients(wide, [g.to(torch.promote_types(g.dtype, DOUBLE)) for g in cotangents], activation=activation)
    found = gradients(arguments, cotangents, activation=activation)
    norm = torch.linalg.vector_norm
    return {name: (norm(g - exact[name]) / norm(exact[name])).item() for name, g in found.items()}


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize(("T", "B", "n", "m"), [(1, 1, 1, 1), (1, 4, 5, 3), (7, 1, 5, 1), (3, 0, 4, 2), (200, 3, 7, 2)])
def test_odd_sizes_are_those_of_the_loop(T, B, n, m, is_complex):
    for last_only in (False, True):
        require_those_of_the_loop(drawn("modrelu", is_complex, T=T, B=B, n=n, m=m), last_only=last_only)


def test_strided_inputs_and_gradients_are_taken_as_they_are():
    arguments = drawn("tanh")
    strided = dict(arguments)
    for name, t in arguments.items():
        strided[name] = t.repeat_interleave(2, -1)[..., ::2] if t.dim() == 1 else t.mT.contiguous().mT
    g = torch.randn(5, 6, 6, dtype=DOUBLE).transpose(0, 1)
    first = gradients(arguments, (g.contiguous(), None), activation="tanh")
    second = gradients(strided, (g, None), activation="tanh")
    expanded = gradients(arguments, (torch.ones(1, 1, 1, dtype=DOUBLE).expand(6, 5, 6), None), activation="tanh")
    ones = gradients(arguments, (torch.ones(6, 5, 6, dtype=DOUBLE), None), activation="tanh")
    for name in arguments:
        assert torch.allclose(first[name], second[name])
        assert torch.allclose(expanded[name], ones[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("b", [-0.5, 0.0, 0.5])
def test_states_that_are_zero_stay_zero_with_gradient_zero(b, dtype):
    arguments = {
        "x": torch.zeros(4, 2, 3),
        "w": torch.eye(3, dtype=dtype),
        "h0": torch.zeros(2, 3, dtype=dtype),
        "activation_bias": torch.full((3,), b),
    }
    arguments["x"][0, 0, 0], arguments["x"][1, 1] = 2.0, 1e-30
    own, expected = (run(arguments, backend=backend) for backend in ("inplace", "reference"))
    assert torch.allclose(own[0], expected[0], rtol=1e-6, atol=1e-20)
    assert (own[0][0, 1] == 0).all()
    found = gradients(arguments, [torch.ones_like(t) for t in own])
    assert all(bool(torch.isfinite(torch.view_as_real(g) if g.is_complex() else g).all()) for g in found.values())
    # Nothing flows back through a state that is zero.
    assert found["x"][0, 1].abs().sum() == 0


def test_conjugate_views_are_taken_for_what_they_are():
    arguments = drawn("modrelu", True, complex_input=True)
    lazy = {name: t.conj().resolve_conj().conj() if t.is_complex() else t for name, t in arguments.items()}
    g = torch.randn(6, 5, 6, dtype=torch.complex128)
    first, second = gradients(arguments, (g, None)), gradients(lazy, (g.conj().resolve_conj().conj(), None))
    for name in arguments:
        assert torch.allclose(first[name], second[name])


def test_nan_propagates():
    for is_complex in (False, True):
        arguments = drawn("modrelu", is_complex)
        arguments["x"][2, 1, 0] = float("nan")
        out, last = run(arguments)
        assert out[:2].isfinite().all()
        assert out[2:, 1].isnan().all()
        assert last[0].isfinite().all()


def test_packed_sequences_equal_their_single_runs():
    sizes = [4, 3, 3, 1]
    arguments = drawn("modrelu", sizes=sizes, B=4)
    starts = [0, 4, 7, 10]
    for reverse in (False, True):
        out, last = run(arguments, batch_sizes=sizes, reverse=reverse)
        for i in range(4):
            length = sum(size > i for size in sizes)
            rows = [starts[t] + i for t in range(length)]
            single = arguments | {"x": arguments["x"][rows].unsqueeze(1), "h0": arguments["h0"][i : i + 1]}
            own, own_last = run(single, reverse=reverse)
            assert torch.allclose(out[rows], own[:, 0])
            assert torch.allclose(last[i], own_last[0])


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize(
    ("activation", "is_complex"), [("modrelu", False), ("modrelu", True), ("modrelu_epsilon", True)]
)
def test_functional_gradients_and_maps_over_samples(activation, is_complex, last_only):
    grad: Any = torch.func.grad
    vmap: Any = torch.func.vmap
    arguments = drawn("modrelu", is_complex, T=4, n=5)
    options: Any = dict(activation=activation, last_only=last_only, backend="inplace")
    samples = torch.randn(3, *arguments["x"].shape, dtype=DOUBLE)

    def loss(*tensors: Any) -> Any:
        w, u, b, h0, x = tensors
        out, last = run(arguments | {"x": x, "w": w, "u": u, "activation_bias": b, "h0": h0}, **options)
        return (last if last_only else out).abs().square().sum()

    weights: Any = tuple(arguments[name] for name in ("w", "u", "activation_bias", "h0"))
    leaves: Any = tuple(t.clone().requires_grad_() for t in weights)
    every = [torch.autograd.grad(loss(*leaves, x), leaves) for x in samples]
    for own, expected in zip(grad(loss, (0, 1, 2, 3))(*weights, samples[0]), every[0], strict=True):
        assert torch.allclose(own, expected)
    mapped = vmap(grad(loss, (0, 1, 2, 3)), (None,) * 4 + (0,))(*weights, samples)
    for i, own in enumerate(mapped):
        assert torch.allclose(own, torch.stack([g[i] for g in every]))
    values = vmap(loss, (None,) * 4 + (1,))(*weights, samples.movedim(0, 1))
    assert torch.allclose(values, torch.stack([loss(*weights, x) for x in samples]))
    # An ensemble: every sample has a matrix of its own.
    several = torch.stack([weights[0], weights[0].mH.contiguous(), -weights[0]])
    own = vmap(grad(loss), (0, None, None, None, 0))(several, *weights[1:], samples)
    for i in range(3):
        assert torch.allclose(own[i], grad(loss)(several[i], *weights[1:], samples[i]))


def test_second_derivatives_need_the_reference_and_say_so():
    arguments = drawn("tanh", T=3, B=2, n=3)
    x = arguments["x"].requires_grad_()
    (g,) = torch.autograd.grad(run(arguments, activation="tanh")[0].sum(), x, create_graph=True)
    with pytest.raises(errors.OptionError, match='backend="reference"'):
        g.square().sum().backward()
    (g,) = torch.autograd.grad(
        run(arguments, activation="tanh", backend="reference")[0].square().sum(), x, create_graph=True
    )
    assert torch.autograd.grad(g.square().sum(), x)[0].abs().sum() > 0


def test_forward_mode_takes_the_reference():
    arguments = drawn("tanh", T=3)

    def last(x):
        return run(arguments | {"x": x}, activation="tanh", backend="auto")[1]

    tangent = torch.randn_like(arguments["x"])
    pushed: Any = torch.func.jvp(last, (arguments["x"],), (tangent,))[1]
    step = 1e-6
    differences = (last(arguments["x"] + step * tangent) - last(arguments["x"] - step * tangent)) / (2 * step)
    assert torch.allclose(pushed, differences, atol=1e-8)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("is_complex", [False, True])
def test_compiled_without_breaks_or_unrolling(is_complex, last_only):
    arguments = drawn("modrelu", is_complex, T=5)

    def loss(x, w, h0, u, b):
        out, last = scan(x, w, h0, u=u, activation_bias=b, last_only=last_only, backend="inplace")
        return (last if out is None else out).abs().square().sum()

    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    names = ("w", "h0", "u", "activation_bias")
    for T in (5, 9):
        x = torch.randn(T, 5, 3, dtype=DOUBLE)
        leaves = [arguments[name].detach().clone().requires_grad_() for name in names]
        own = torch.autograd.grad(compiled(x, *leaves), leaves)
        for a, b in zip(own, torch.autograd.grad(loss(x, *leaves), leaves), strict=True):
            assert torch.allclose(a, b)
    torch._dynamo.reset()
    torch.compile(loss, fullgraph=True, backend=backend)(torch.randn(300, 5, 3, dtype=DOUBLE), *leaves)
    assert len(list(graphs[0].graph.nodes)) < 60


def test_bfloat16_states_are_rounded_once():
    arguments = {name: t.bfloat16() for name, t in drawn("modrelu", T=50, dtype=torch.float32).items()}
    own = run(arguments)[0]
    exact = run({name: t.float() for name, t in arguments.items()})[0]
    assert own.dtype == torch.bfloat16
    assert torch.equal(own, exact.bfloat16())
    found = gradients(arguments, (torch.ones_like(own), None))
    assert all(g.dtype == torch.bfloat16 for g in found.values())


def test_weights_that_change_between_forward_and_backward_are_noticed():
    arguments = drawn("tanh")
    w = arguments["w"].requires_grad_()
    out, _ = run(arguments, activation="tanh")
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_only_wanted_gradients_are_made_and_states_are_all_that_is_kept():
    arguments = drawn("modrelu", T=100, B=10, n=20)
    arguments["w"].requires_grad_()
    kept: list[int] = []

    def pack(t):
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(arguments)[0].sum().backward()
        states = 100 * 10 * 20
        assert sum(kept) - arguments["x"].numel() < states + 3 * 20 * 20
        kept.clear()
        run(arguments, last_only=True)[1].sum().backward()
        assert sum(kept) - arguments["x"].numel() < 12 * 10 * 20 + 3 * 20 * 20
    assert arguments["x"].grad is None


@pytest.mark.parametrize("is_complex", [False, True])
def test_last_states_alone_lie_in_memory_as_tracing_says_whatever_h0_and_its_gradient_do(is_complex):
    dtype = DOUBLE.to_complex() if is_complex else DOUBLE
    w = torch.linalg.qr(torch.randn(4, 4, dtype=dtype))[0].contiguous()
    h0, g = torch.randn(4, 3, dtype=dtype).mT.requires_grad_(), torch.randn(4, 3, dtype=dtype).mT
    x = torch.randn(9, 3, 4, dtype=dtype)
    forward, backward = torch.ops.stiefelkit.scan_forward.default, torch.ops.stiefelkit.scan_backward.default
    leaves = (x, w, h0, None, None, None, *Recurrence("identity", None, False, True, "inplace"))
    torch.library.opcheck(forward, (*leaves, True), test_utils="test_faketensor")
    marks, _, saved = (t.detach() for t in forward(*leaves, True))
    needs = [True, True, True, False, False, False]
    torch.library.opcheck(backward, (*leaves, marks, saved, None, g, needs), test_utils="test_faketensor")


@pytest.mark.parametrize("last_only", [False, True])
def test_batches_of_gradients_of_autograds_own_are_those_of_torch_func(last_only):
    w, h0 = torch.linalg.qr(torch.randn(3, 3, dtype=DOUBLE))[0], torch.zeros(2, 3, dtype=DOUBLE)

    def last(x: torch.Tensor, backend: str = "inplace") -> torch.Tensor:
        return scan(x, w, h0, activation="tanh", last_only=last_only, backend=backend)[1]

    x, jacobian = torch.randn(9, 2, 3, dtype=DOUBLE), torch.autograd.functional.jacobian
    expected: Any = jacobian(lambda x: last(x, "reference"), x, vectorize=True)
    assert torch.allclose(torch.func.jacrev(last)(x), expected)
    assert torch.allclose(jacobian(last, x, vectorize=True), expected)


def test_a_scan_of_no_inputs_and_on_the_meta_device_has_its_shapes():
    inputs = torch.zeros(9, 2, 0), torch.eye(3), torch.ones(2, 3)
    found: Any = scan(*inputs, u=torch.zeros(3, 0), activation="tanh")
    assert found[0].shape == (9, 2, 3)
    found = scan(*(torch.empty(shape, device="meta") for shape in ((9, 2, 3), (3, 3), (2, 3))), activation="tanh")
    assert found[0].shape == (9, 2, 3)
    assert found[1].is_meta

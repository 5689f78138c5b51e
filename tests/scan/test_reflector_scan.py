"""The scan of reflections is the loop, keeps every length over thousands of steps, and has the loop's derivatives."""

from typing import Any

import pytest
import torch
from compiled_programs import built, is_without_spills, machinery
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from benchmarks.launches import counts_of, of_layer
from stiefelkit import errors, nn
from stiefelkit.functional._kernels.launch import programs
from stiefelkit.scan import reflector_scan, reflectors
from stiefelkit.scan.engines import reflections
from stiefelkit.scan.engines.triton import PACKAGE
from stiefelkit.testing import seeds

B, H, D, V = 2, 2, 4, 3
F64 = torch.float64
run: Any = reflector_scan
CASES = [(form, tau, decays) for form in ("queries", "added", "turned") for tau in reflectors.TAUS for decays in (0, 1)]


def drawn(form: str, tau: str, decays: bool, steps: int, m: int = 2, batch: int = B) -> dict[str, Any]:
    g = seeds.generator()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=F64, generator=g)

    k = normal(batch, steps, m, H, D)
    betas = {
        "exact": None,
        "gated": normal(batch, steps, H).sigmoid(),
        "free": 2 * normal(batch, steps, m, H).sigmoid(),
    }
    values = {"queries": (batch, steps, m, H, V), "added": (batch, steps, H, D, V)}
    tensors = {
        "q": normal(batch, steps, H, D) if form == "queries" else None,
        "k": k / k.norm(dim=-1, keepdim=True) if tau == "free" else k,
        "v": normal(*values[form]) if form in values else None,
        "beta": betas[tau],
        "decay": -normal(batch, steps, H).exp() if decays else None,
        "initial": normal(batch, H, D, V),
    }
    return {name: None if t is None else t.requires_grad_() for name, t in tensors.items()}


def naive(tau: str, **tensors: Any) -> tuple[Tensor, Tensor]:
    """The published recurrence, one key after the other."""
    q, k, beta, decay, state = (tensors[name] for name in ("q", "k", "beta", "decay", "initial"))
    out, given = [], {name: t for name, t in tensors.items() if t is not None}
    square = k.square().sum(-1)
    scale: Any = beta if tau == "free" else 2 / square
    if tau == "gated":
        scale = torch.cat([scale[:, :, :-1], (2 * beta / square[:, :, -1]).unsqueeze(2)], 2)
    for t in range(k.shape[1]):
        state = state if decay is None else decay[:, t].exp()[..., None, None] * state
        for i in range(k.shape[2]):
            key = k[:, t, i, :, :, None]
            wanted = given["v"][:, t, i, :, None] if q is not None else 0.0
            state = state + scale[:, t, i, :, None, None] * key * (wanted - (key * state).sum(-2, keepdim=True))
        state = state + given["v"][:, t] if q is None and "v" in given else state
        out.append(state if q is None else torch.einsum("bhdv,bhd->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def gradients(found: Any, tensors: dict[str, Any]) -> list[Tensor]:
    g, leaves = seeds.generator(1), [t for t in tensors.values() if t is not None]
    loss = torch.stack([(t * torch.randn(t.shape, dtype=t.dtype, generator=g)).sum() for t in found]).sum()
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("chunk", [None, 1, 8, 64])
@pytest.mark.parametrize(("form", "tau", "decays"), CASES)
@pytest.mark.parametrize(("steps", "m"), [(1, 2), (9, 1), (23, 3)])
def test_outputs_and_gradients_are_those_of_the_published_loop(steps, m, form, tau, decays, chunk, monkeypatch):
    monkeypatch.setattr(reflections, "CACHED", 8 * B * H * m * D)  # some segments
    tensors = drawn(form, tau, decays, steps, m)
    expected = naive(**tensors, tau=tau)
    wanted = (*expected, *gradients(expected, tensors))
    for backend in ("chunks", "reference") if chunk is None else ("chunks",):
        found = run(**tensors, tau=tau, chunk=chunk, backend=backend)
        torch.testing.assert_close((*found, *gradients(found, tensors)), wanted, rtol=1e-9, atol=1e-10)


def error_of_length(tau: str, steps: int = 16384, width: int = 64, chunk: int | None = None) -> float:
    """How far a state is from its length after reflections by keys of 16 bits, in float32."""
    g = seeds.generator()
    keys = torch.nn.functional.normalize(torch.randn(1, steps, 2, 1, width, generator=g), dim=-1).bfloat16()
    first, beta = torch.randn(1, 1, width, generator=g), None if tau == "exact" else torch.full((1, steps, 2, 1), 2.0)
    _, last = run(None, keys, None, beta, initial=first, tau=tau, chunk=chunk, last_only=True)
    return abs(float(last.norm().double() / first.norm().double()) - 1)


@pytest.mark.parametrize(("width", "chunk"), [(16, None), (64, None), (64, 8), (128, 128)])
def test_law_of_length(width, chunk):
    assert error_of_length("exact", width=width, chunk=chunk) < 1e-6


def test_the_law_of_length_catches_a_scale_of_the_key_before_it_was_rounded():
    assert error_of_length("free") > 1e-4


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("form", "tau", "decays"), CASES[::3])
def test_packed_sequences_are_each_on_its_own_and_reversed_ones_run_from_their_end(form, tau, decays, reverse):
    each = [{**drawn(form, tau, decays, steps, batch=1)} for steps in (7, 4, 1)]
    firsts = torch.cat([e["initial"] * (i + 1) for i, e in enumerate(each)])
    rows: Any = {key: None if t is None else pack_sequence([e[key][0] for e in each]) for key, t in each[0].items()}
    sizes = rows["k"].batch_sizes.tolist()
    packed = {key: None if t is None else t.data for key, t in rows.items()} | {"initial": firsts}
    out, last = run(**packed, tau=tau, batch_sizes=sizes, reverse=reverse)
    alone = []
    for i, e in enumerate(each):
        own = {key: t if t is None or not reverse or key == "initial" else t.flip(1) for key, t in e.items()}
        o, h = naive(**own | {"initial": firsts[i : i + 1]}, tau=tau)
        alone.append((o.flip(1) if reverse else o)[0])
        torch.testing.assert_close(last[i], h[0])
    torch.testing.assert_close(out, pack_sequence(alone).data)
    assert run(**packed, tau=tau, batch_sizes=sizes, reverse=reverse, last_only=True)[0] is None


@pytest.mark.parametrize(("form", "tau", "decays"), CASES[1::4])
def test_derivatives_of_second_order_and_forward_mode_are_right(form, tau, decays):
    tensors = drawn(form, tau, decays, 5, batch=1)
    names = [name for name, t in tensors.items() if t is not None]

    def results(*given: Tensor) -> Any:
        return run(**dict.fromkeys(tensors) | dict(zip(names, given, strict=True)), tau=tau, chunk=4)

    leaves = tuple(tensors[name] for name in names)
    assert torch.autograd.gradcheck(results, leaves, fast_mode=True, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(results, leaves, fast_mode=True, check_fwd_over_rev=True)
    halves = [t.detach().unsqueeze(0) * torch.tensor([1.0, 0.5], dtype=F64).view(2, *(1,) * t.dim()) for t in leaves]
    for i in range(len(leaves)):
        dims, given = [0 if j == i else None for j in range(len(leaves))], [*leaves]
        given[i] = halves[i]
        mapped, given[i] = torch.vmap(results, in_dims=tuple(dims))(*given), halves[i][1]
        torch.testing.assert_close([t[1] for t in mapped], [*results(*given)])


@pytest.mark.parametrize("form", ["queries", "added"])
def test_operators_keep_the_rules_of_torch(form):
    tensors = drawn(form, "gated", True, 7)
    given = [None if tensors[name] is None else tensors[name].detach() for name in ("initial", "q", "k", "v", "beta")]
    given.append(tensors["decay"].detach())
    tests = ("test_schema", "test_faketensor")
    forward = (*given, "gated", 4, False, F64, "chunks", False)
    torch.library.opcheck(torch.ops.stiefelkit.reflect.default, forward, test_utils=tests)
    out, last, states = torch.ops.stiefelkit.reflect(*forward)
    back = (*given, states, out, last, "gated", 4, "chunks")
    torch.library.opcheck(torch.ops.stiefelkit.reflect_back.default, back, test_utils=tests)


@pytest.mark.parametrize("form", ["queries", "turned"])
def test_the_program_of_a_gpu_gives_the_states_of_the_loop(form, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tensors = drawn(form, "gated", True, 13)
    found, expected = run(**tensors, tau="gated", backend="triton"), naive(**tensors, tau="gated")
    pairs = zip((*found, *gradients(found, tensors)), (*expected, *gradients(expected, tensors)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("form", "tau", "decays"), CASES)
def test_a_device_launches_few_operators_and_is_read_by_none(form, tau, decays):
    pytest.importorskip("triton")
    tensors = drawn(form, tau, decays, 64)
    leaves = [t for t in tensors.values() if t is not None]
    ones = [torch.ones_like(t) for t in naive(**tensors, tau=tau)]

    def both_ways() -> None:
        torch.autograd.grad(run(**tensors, tau=tau, backend="triton"), leaves, ones)

    launches, reads = counts_of(both_ways)
    assert launches <= (71 if decays else 54)
    assert reads == 0


def test_a_layer_launches_few_operators():
    pytest.importorskip("triton")
    assert counts_of(of_layer("ReflectorRNN", "64")) <= (58, 0)


@pytest.mark.slow
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_program_keeps_its_states_in_registers(capability, rows, back, tmp_path):
    pytest.importorskip("triton")
    types = dict.fromkeys(["ends", "r", "b", "states"], "*fp64")
    types |= dict.fromkeys(["chunks", "count", "size", "columns", "ends_row", "r_row", "b_row"], "i32")
    fixed = {"BACK": back, "N": rows}
    program = programs(PACKAGE, False).pass_states
    found = machinery(built(program, fixed, types, capability, num_warps=4 if rows <= 32 else 8), tmp_path)
    assert is_without_spills(found)


@pytest.mark.parametrize("backend", ["chunks", "reference"])
@pytest.mark.parametrize("tau", ["exact", "gated"])
def test_a_zero_key_is_the_identity_with_a_finite_gradient(tau, backend):
    tensors = drawn("added", tau, False, 6)
    with torch.no_grad():
        tensors["k"][:, 2] = 0
        tensors["k"][:, 4, 1] = 0
    out, last = run(**tensors, tau=tau, backend=backend)
    torch.testing.assert_close(out[:, 2] - tensors["v"][:, 2], out[:, 1])
    assert all(g.isfinite().all() for g in gradients((out, last), tensors))


def test_gates_that_forget_everything_have_finite_gradients():
    tensors = drawn("queries", "exact", True, 20)
    with torch.no_grad():
        tensors["decay"][:, ::7] = -torch.inf
    found = run(**tensors)
    torch.testing.assert_close(found, naive(**tensors, tau="exact"))
    assert all(g.isfinite().all() for g in gradients(found, tensors))


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"tau": "exakt"}, errors.UnknownNameError, "exact"),
        ({"backend": "chunk"}, errors.UnknownNameError, "chunks"),
        ({"k": torch.ones(2, 0, 2, 4)}, errors.ShapeError, "m >= 1"),
        ({"k": torch.ones(2, 7, 2, 4)}, errors.ShapeError, "m >= 1"),
        ({"k": torch.ones(2, 5, 1, 3, 4)}, errors.ShapeError, "q of shape"),
        ({"k": torch.ones(2, 5, 1, 2, 4, dtype=torch.int64)}, errors.DtypeError, "floating"),
        ({"k": torch.full((2, 5, 1, 2, 4), torch.nan)}, errors.NonFiniteError, "finite"),
        ({"v": None}, errors.OptionError, "values"),
        ({"q": None, "v": None}, errors.OptionError, "initial"),
        ({"beta": torch.ones(2, 5, 2)}, errors.OptionError, "no beta"),
        ({"tau": "gated"}, errors.OptionError, "beta of shape"),
        ({"tau": "gated", "beta": torch.full((2, 5, 2), 1.5)}, errors.OptionError, "between 0 and 1"),
        ({"tau": "free", "beta": torch.full((2, 5, 1, 2), 2.5)}, errors.OptionError, "between 0 and 2"),
        ({"decay": torch.zeros(2, 5)}, errors.ShapeError, "decay"),
        ({"initial": torch.zeros(2, 2, 4)}, errors.ShapeError, "initial"),
        ({"chunk": 0}, errors.OptionError, "chunk"),
        ({"backend": "triton"}, errors.OptionError, "GPU"),
        ({"batch_sizes": [1, 2]}, errors.ShapeError, "increase"),
    ],
)
def test_bad_input_is_refused_by_name(changes, error, word):
    given = {"q": torch.ones(2, 5, 2, 4), "k": torch.ones(2, 5, 1, 2, 4), "v": torch.ones(2, 5, 1, 2, 3)}
    with pytest.raises(error, match=word):
        run(**given | changes)


@pytest.mark.parametrize("options", [{"tau": "gated", "conv": 4, "columns": 2}, {"tau": "free", "decay": (0.9, 0.99)}])
def test_a_stream_of_steps_is_the_sequence(options):
    rnn = nn.ReflectorRNN(3, 8, 2, **options)
    x, state, out = torch.randn(20, 2, 3), None, []
    for row in x:
        h, state = rnn.step(row, state)
        out.append(h)
    torch.testing.assert_close(torch.stack(out), rnn(x)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(errors.ShapeError, match="step"):
        rnn.step(x[0, :1], state)

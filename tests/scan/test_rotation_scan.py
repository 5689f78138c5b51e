"""The scan of rotations is the loop, to rounding, whatever the number of steps; its derivatives are the loop's."""

from typing import Any

import pytest
import torch
from compiled_programs import built, is_without_spills, machinery
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from stiefelkit import errors
from stiefelkit.functional._kernels.launch import programs
from stiefelkit.measuring.clock import peak_bytes
from stiefelkit.nn import RotationRNN
from stiefelkit.scan import rotation_scan
from stiefelkit.scan.engines import planes
from stiefelkit.scan.engines.triton import PACKAGE
from stiefelkit.scan.rotation import scan_planes
from stiefelkit.testing import seeds

B, M = 3, 4
run: Any = rotation_scan


def drawn(steps: int, *, is_complex: bool, is_varying: bool, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    g = seeds.generator()
    kind, width = (dtype.to_complex(), M) if is_complex else (dtype, 2 * M)
    shape = (steps, B, M) if is_varying else (M,)
    tensors = {
        "x": torch.randn(steps, B, width, dtype=kind, generator=g),
        "angle": torch.randn(shape, dtype=dtype, generator=g),
        "decay": 0.9 + 0.1 * torch.rand(shape, dtype=dtype, generator=g),
        "h0": torch.randn(B, width, dtype=kind, generator=g),
    }
    return {name: t.requires_grad_() for name, t in tensors.items()}


def gradients(found: Any, tensors: dict[str, Any]) -> list[Tensor]:
    weights = seeds.generator(1)
    results = [t for t in (found[1], found[0]) if t is not None]
    loss = sum((t * torch.randn(t.shape, dtype=_wide(t), generator=weights).to(t.dtype)).real.sum() for t in results)
    grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, tensors.values(), strict=True)]


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("is_varying", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 31, 32, 33, 100, 300])
def test_states_and_gradients_are_those_of_the_loop(steps, is_varying, is_complex, reverse, last_only):
    tensors = drawn(steps, is_complex=is_complex, is_varying=is_varying)
    options: dict[str, Any] = {"reverse": reverse, "last_only": last_only}
    expected = run(**tensors, **options, backend="reference")
    found = run(**tensors, **options)
    assert (found[0] is None) == last_only
    pairs = zip((*found, *gradients(found, tensors)), (*expected, *gradients(expected, tensors)), strict=True)
    for one, other in pairs:
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("width", [8, 4096])
@pytest.mark.parametrize("is_varying", [False, True])
@pytest.mark.parametrize("steps", [784, 16384])
def test_the_error_does_not_grow_with_the_steps(steps, is_varying, width):
    if steps * width > 2**22:
        return
    g = seeds.generator()
    x, shape = torch.randn(steps, 1, width, generator=g), (steps, 1, width // 2) if is_varying else (width // 2,)
    angle, decay = 6 * torch.rand(shape, generator=g), torch.ones(shape)
    exact, _ = run(x.double(), angle.double(), decay.double(), backend="reference")
    found, _ = run(x, angle, decay)
    assert (found - exact).norm() <= 8 * torch.finfo(torch.float32).eps * exact.norm()


def test_factors_finer_than_the_states_are_not_rounded_to_their_dtype():
    x = torch.ones(20000, 1, 2)
    given = {"angle": torch.zeros(1).double(), "decay": torch.full((1,), 1 - 1e-6, dtype=torch.float64), "h0": None}
    steps: dict[str, Any] = {"batch_sizes": None, "reverse": False, "last_only": False, "backend": "auto"}
    out, last = scan_planes(x, **given, dtype=torch.float32, **steps)
    assert out is not None
    assert out.dtype == last.dtype == torch.float32
    expected = (1 - (1 - 1e-6) ** 20000) / 1e-6
    assert abs(last[0, 0].item() / expected - 1) < 1e-6


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("is_varying", [False, True])
def test_packed_sequences_are_each_on_its_own(is_varying, reverse):
    lengths = [40, 33, 5]
    each = [drawn(t, is_complex=False, is_varying=True) for t in lengths]
    h0 = each[0]["h0"]
    packed = {name: pack_sequence([e[name][:, 0] for e in each]) for name in ("x", "angle", "decay")}
    fixed = {"angle": each[0]["angle"][0, 0], "decay": each[0]["decay"][0, 0]}
    factors = {k: packed[k].data for k in fixed} if is_varying else fixed
    sizes = packed["x"].batch_sizes.tolist()
    out, last = run(packed["x"].data, h0=h0, batch_sizes=sizes, reverse=reverse, **factors)
    alone = []
    for i, e in enumerate(each):
        own = {k: e[k][:, :1] for k in fixed} if is_varying else fixed
        o, h = run(e["x"][:, :1], h0=h0[i : i + 1], reverse=reverse, **own)
        alone.append(o[:, 0])
        torch.testing.assert_close(last[i], h[0])
    torch.testing.assert_close(out, pack_sequence(alone).data)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("backend", ["reference", "chunks"])
@pytest.mark.parametrize("is_varying", [False, True])
def test_derivatives_of_second_order_and_forward_mode_are_right(is_varying, backend, last_only):
    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = run(*tensors, backend=backend, last_only=last_only, reverse=last_only)
        return tuple(t for t in found if t is not None)

    tensors = tuple(drawn(40, is_complex=True, is_varying=is_varying).values())
    assert torch.autograd.gradcheck(results, tensors, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(results, tensors, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("backend", ["reference", "chunks"])
def test_gates_that_forget_everything_or_change_the_sign_have_their_gradients(backend):
    tensors = drawn(40, is_complex=True, is_varying=True)
    with torch.no_grad():
        tensors["decay"][::7] = 0
        tensors["decay"][3::7] *= -1
    assert torch.autograd.gradcheck(
        lambda *given: run(*given, backend=backend), tuple(tensors.values()), fast_mode=True
    )
    out, _ = run(**tensors, backend=backend)
    (g,) = torch.autograd.grad(out[10:].abs().square().sum(), tensors["x"])
    assert torch.count_nonzero(g[:7]) == 0  # step 7 forgets what came before
    assert torch.count_nonzero(g[7:]) == g[7:].numel()


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_a_batched_jacobian_is_that_of_single_derivatives(strategy):
    x, angle, decay, h0 = (t.detach() for t in drawn(20, is_complex=False, is_varying=False).values())
    for wanted in range(2):

        def result(x: Tensor, angle: Tensor, wanted: int = wanted) -> Tensor:
            return run(x, angle, decay, h0)[wanted]

        single = torch.autograd.functional.jacobian(result, (x, angle))
        found = torch.autograd.functional.jacobian(result, (x, angle), vectorize=True, strategy=strategy)
        torch.testing.assert_close(found, single)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decay_that_is_a_number_is_not_rounded_to_the_dtype_of_angles(dtype):
    x, angle = torch.ones(200, 1, 2, dtype=torch.float64), torch.zeros(1, dtype=dtype)
    out, last = run(x, angle, 0.999)
    torch.testing.assert_close(last, torch.full_like(last, (1 - 0.999**200) / (1 - 0.999)), rtol=1e-12, atol=0)
    assert run(x.to(dtype), angle, 0.999)[1].dtype == dtype
    torch.testing.assert_close(run(x.to(dtype), angle, 0.999)[0], out.to(dtype))


def test_vmap_over_any_tensor_is_the_loop_over_it():
    tensors = drawn(20, is_complex=False, is_varying=False)
    stacked = {name: torch.stack([t.detach(), 0.5 * t.detach()]) for name, t in tensors.items()}
    for mapped in ("x", "angle", "decay", "h0"):
        given = {name: stacked[name] if name == mapped else t.detach() for name, t in tensors.items()}
        dims = tuple(0 if name == mapped else None for name in given)
        out, last = torch.vmap(run, in_dims=dims)(*given.values())
        for i in range(2):
            one = run(**{n: t[i] if n == mapped else t for n, t in given.items()})
            torch.testing.assert_close((out[i], last[i]), one)
    numbers = torch.tensor([0.9, 0.8], dtype=torch.float64)
    x, angle = tensors["x"].detach().float(), tensors["angle"].detach().float()
    last = torch.vmap(lambda g: run(x, angle, g)[1])(numbers)
    torch.testing.assert_close(last, torch.stack([run(x, angle, g)[1] for g in numbers]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    tensors = {k: t.detach().to(dtype) for k, t in drawn(64, is_complex=False, is_varying=False).items()}
    out, last = run(**tensors)
    wide, _ = run(**{k: t.float() for k, t in tensors.items()})
    assert out.dtype == last.dtype == dtype
    assert torch.equal(out, wide.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(**{k: t.float() for k, t in tensors.items()})[1].dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"x": torch.zeros(5, 2, 7)}, errors.ShapeError, "even"),
        ({"x": torch.zeros(5, 8)}, errors.ShapeError, "x of shape"),
        ({"angle": torch.zeros(3)}, errors.ShapeError, "angle"),
        ({"angle": torch.zeros(4, dtype=torch.complex64)}, errors.DtypeError, "angle"),
        ({"decay": torch.zeros(2, 4)}, errors.ShapeError, "decay"),
        ({"h0": torch.zeros(2, 4)}, errors.ShapeError, "h0"),
        ({"h0": torch.zeros(2, 8, dtype=torch.complex64)}, errors.DtypeError, "h0"),
        ({"x": torch.zeros(5, 2, 8, dtype=torch.int64)}, errors.DtypeError, "floating"),
        ({"backend": "chunk"}, errors.UnknownNameError, "chunks"),
        ({"backend": "triton"}, errors.OptionError, "GPU"),
        ({"x": torch.zeros(5, 8), "batch_sizes": [2, 3]}, errors.ShapeError, "increase"),
    ],
)
def test_bad_input_is_refused_by_name(changes, error, word):
    with pytest.raises(error, match=word):
        run(**{"x": torch.zeros(5, 2, 8), "angle": torch.zeros(4), **changes})


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("is_varying", [False, True])
def test_the_program_of_a_gpu_gives_the_states_of_the_loop(is_varying, reverse, last_only, chunks, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(planes.on_gpu, "__defaults__", (chunks, None))
    tensors = drawn(13, is_complex=True, is_varying=is_varying, dtype=torch.float32)
    options: dict[str, Any] = {"reverse": reverse, "last_only": last_only}
    expected = run(**{k: t.detach().to(_wide(t)) for k, t in tensors.items()}, **options, backend="reference")
    found = run(**tensors, **options, backend="triton")
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one.to(other.dtype), other, rtol=1e-6, atol=1e-6)
    wide = {k: t.detach().to(_wide(t)).requires_grad_() for k, t in tensors.items()}
    pairs = zip(gradients(found, tensors), gradients(run(**wide, **options, backend="reference"), wide), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.to(other.dtype), other, rtol=1e-4, atol=1e-4)


def _wide(t: Tensor) -> torch.dtype:
    return torch.complex128 if t.is_complex() else torch.float64


@pytest.mark.slow
@pytest.mark.parametrize(("written", "is_fixed"), [("ends", True), ("ends", False), ("states", True), ("pulls", True)])
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_program_keeps_its_states_in_registers(capability, written, is_fixed, tmp_path):
    pytest.importorskip("triton")
    program = programs(PACKAGE, False).rotate_planes
    fixed: dict[str, Any] = {"FIXED": is_fixed, "REVERSE": False, "ADJOINT": written == "pulls", "BLOCK": planes.BLOCK}
    fixed |= {"AHEAD": planes.AHEAD} | dict.fromkeys(["out", "last"] if written == "ends" else ["ends", "totals"])
    fixed |= {} if written == "pulls" else dict.fromkeys(["states", "pulls"])
    types = dict.fromkeys(["ends", "totals", "factor", "power", "pulls"], "*fp64")
    types |= dict.fromkeys(["steps", "chunk", "columns", "planes", "skipped"], "i32")
    found = machinery(built(program, fixed, types, capability, num_warps=4), tmp_path)
    assert is_without_spills(found)
    assert found.registers <= 72
    assert found.count("LDGSTS") == (2 if is_fixed and written != "pulls" else 4)
    assert found.count("BAR") == 2
    assert found.shared <= (16384 if is_fixed and written != "pulls" else 24576)  # factors are twice as wide as inputs


def test_memory_of_a_layer_follows_the_number_of_states_and_not_that_of_steps() -> None:
    layer = RotationRNN(16, 32)

    def most(steps: int, batch: int) -> int:
        x, g = torch.randn(steps, batch, 16), torch.randn(steps, batch, 32)
        layer(x)[0].backward(g)
        return peak_bytes(lambda: layer(x)[0].backward(g), x.device)

    assert most(2048, 2) < 1.5 * most(64, 64)

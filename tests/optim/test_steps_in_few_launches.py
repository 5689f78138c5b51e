"""Steps where no value is read, by Triton programs: as by many launches, and compiled, without a GPU."""

import math
from typing import Any

import pytest
import torch
from compiled_programs import built, is_without_spills, machinery
from optimizers_at_hand import OPTIMIZERS, excess, frame, gradient, group

from stiefelkit.functional._kernels import launch
from stiefelkit.functional._kernels.launch import BLOCK, commit
from stiefelkit.metrics import rounding_limit

pytest.importorskip("triton")


def use_programs(monkeypatch, is_on=True):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch.Interpreter, "is_on", is_on)


def walked(name, shape, dtype, count, settings, bad, steps=3) -> Any:
    """Frames after some steps, with what they have beyond, the states of one, and the largest error in limits."""
    ws = [frame(shape, dtype, seed) for seed in range(count)]
    optimizer, worst = OPTIMIZERS[name](group(*ws), capturable=True, **settings), 0.0
    for step in range(steps):
        for i, w in enumerate(ws):
            w.grad = gradient(shape, dtype, 10 * step + i)
        if step == bad:
            ws[-1].grad.view(-1)[0] = math.nan  # pyright: ignore
        optimizer.step()
        worst = max(worst, *map(excess, ws))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return [w.detach().to(wide) + optimizer.state[w].get("lo", 0) for w in ws], optimizer.state[ws[0]], worst


SHAPES = [((6, 6), torch.float32, 1), ((5, 5), torch.complex64, 2), ((7, 4), torch.float32, 1)]
# The step after one that was refused is seen at those sizes; these take two, as the interpreter is slow: a batch, and
# of several tiles one, by turns.
BATCH = ((3, 9, 9), torch.float32, 1)
TILED = [((65, 65), torch.float32, 1), ((100, 17), torch.float32, 1), ((33, 33), torch.complex64, 1)]
CASES = [pytest.param(name, *case) for name in OPTIMIZERS for case in SHAPES] + [
    pytest.param(name, *case, marks=pytest.mark.slow)
    for turn, name in enumerate(OPTIMIZERS)
    for case in (BATCH, TILED[turn % len(TILED)])
]


@pytest.mark.parametrize(("name", "shape", "dtype", "count"), CASES)
def test_steps_go_where_those_of_many_launches_go(name, shape, dtype, count, monkeypatch):
    examples, ends = OPTIMIZERS[name].examples, []
    settings = examples[shape[-1] % len(examples)]
    for is_on in (True, False):
        use_programs(monkeypatch, is_on)
        steps = 3 if (shape, dtype, count) in SHAPES else 2
        ends.append(walked(name, shape, dtype, count, settings, bad=1, steps=steps))
    (few, states, worst), (many, expected, _) = ends
    assert worst <= 2 + torch.finfo(dtype).eps / rounding_limit(shape[-1], dtype)
    for a, b in zip(few, many, strict=True):
        assert torch.dist(a, b) <= (1e-6 if settings.get("precision") == "fast" else 1e-7) * shape[-1]
    assert states.keys() == expected.keys()
    for key in states.keys() - {"lo"}:
        assert torch.allclose(states[key], expected[key], rtol=1e-3, atol=1e-6), key
    assert states["refused"] == 1


def test_all_is_written_or_nothing(monkeypatch):
    use_programs(monkeypatch)
    true, false = torch.tensor(True), torch.tensor(False)
    for values, holds, fits in [
        ([0.5, 1.0], None, True), ([0.5, 1.1], None, False), ([math.nan, 0.5], None, False),
        ([0.5] * (BLOCK + 1), true, True), ([0.5] * BLOCK + [2.0], true, False), ([0.5], false, False),
    ]:  # fmt: skip
        news = [torch.randn(BLOCK + 3), torch.randn(4, dtype=torch.complex64), torch.full((2,), math.nan).double()]
        olds, refused = [torch.zeros_like(new) for new in news], torch.zeros(2)
        versions = [old._version for old in olds]
        bounds = [(torch.tensor(values), 1.0), (torch.ones(3, dtype=torch.float64), 1.0)]
        commit(list(zip(olds, news, strict=True)), refused, bounds, holds)
        for old, new, version in zip(olds, news, versions, strict=True):
            assert torch.equal(old.nan_to_num(7), new.nan_to_num(7) if fits else torch.zeros_like(old))
            assert old._version > version  # as autograd is told
        assert refused.tolist() == [1 - fits] * 2


TYPES = dict.fromkeys(["n", "p", "batch", "frames"], "i32") | dict.fromkeys(["step", "defects", "scratch"], "*fp64")
OF_COMMIT = {"olds": ("*i32",) * 3, "news": ("*i32",) * 3, "counts": ("i32",) * 3, "values": ("*fp64", "*fp32")}
OF_MOMENTS = dict.fromkeys(["first", "second", "share", "inner", "outer", "rate"], "fp32") | {
    "norms": "*fp64",
    "each": "i32",
}
OF_MOMENTS |= {"scales": "*fp64"}
OF_COMMIT |= {"sizes": ("i32",) * 2, "mosts": ("fp32",) * 2, "holds": "*i1"}


@pytest.mark.usefixtures("_for_gpus")
@pytest.mark.parametrize("capability", [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 120))])
@pytest.mark.parametrize(
    ("way", "n", "parts"),
    [("cayley", 64, 1), ("shorten", 33, 2), ("divide", 64, 1), ("go", 32, 1), (None, 0, 1), (None, 1, 1)],
)
def test_programs_compile_without_spills_to_exact_products(way, n, parts, capability, tmp_path):
    programs = launch.programs(launch.PACKAGE, False)
    fixed = launch.settings(n, parts, capability < 120) | {"WAY": way, "MOST": 0.5, "TURNS": 2}
    options = {key: fixed.pop(key) for key in ("num_warps", "num_stages", "maxnreg")}
    if way is not None:
        kernel = built(programs.run_step, fixed, TYPES, capability, **options)
    elif n:
        kernel = built(programs.run_moments, {"N": BLOCK}, TYPES | OF_MOMENTS, capability)
    else:
        kernel = built(programs.run_commit, {"BLOCK": BLOCK}, TYPES | OF_COMMIT, capability)
    assert "tf32" not in kernel.asm["ptx"]
    assert kernel.metadata.shared <= {80: 163, 90: 227, 120: 99}[capability] << 10
    assert is_without_spills(machinery(kernel, tmp_path))

"""The layouts of the scan's programs: what the table says of compiled ones."""

import itertools
from pathlib import Path

import pytest
from compiled_programs import COSTS, compiled, cost, is_exact, is_without_spills, machinery

from stiefelkit.scan.engines.triton import LAYOUTS, MAX_WIDTH, find_layout

pytest.importorskip("triton")

DOCS = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
ANOTHER = {"real": "oplu", "complex": "identity"}
HELD = [layout for layout in LAYOUTS if layout.program != "tiles"]
WIDEST = [layout for layout in HELD if (layout.states, layout.max_units) in {("real", 192), ("complex", 128)}]


def held(layout, way):
    return COSTS[layout.program, layout.states, layout.max_units][way == "back"]


def named(layout):
    return f"{layout.program} {layout.states} {layout.max_units}"


@pytest.fixture
def _for_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def check(layout, way, tmp_path, activation="modrelu", capability=90):
    program = machinery(compiled(layout, way, activation, layout.max_units, capability), tmp_path)
    assert is_without_spills(program)
    assert is_exact(program)
    assert program.shared <= 99 * 1024
    return cost(program)


def is_within(found, allowed):
    pairs = zip(vars(found).items(), vars(allowed).values(), strict=True)
    over = {name: (value, most) for (name, value), most in pairs if value > most}
    assert not over


@pytest.mark.slow
@pytest.mark.parametrize("way", ["forward", "back"])
@pytest.mark.parametrize("layout", HELD, ids=named)
@pytest.mark.usefixtures("_for_gpus")
def test_no_program_spills_or_takes_more_than_the_table_says(layout, way, tmp_path):
    is_within(check(layout, way, tmp_path), held(layout, way))


@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize("layout", WIDEST, ids=named)
@pytest.mark.usefixtures("_for_gpus")
def test_what_is_tightest_fits_other_gpus_as_well(layout, capability, tmp_path):
    is_within(check(layout, "back", tmp_path, capability=capability), held(layout, "back"))


@pytest.mark.parametrize("layout", WIDEST, ids=named)
@pytest.mark.usefixtures("_for_gpus")
def test_other_activations_do_not_spill(layout, tmp_path):
    check(layout, "back", tmp_path, ANOTHER[layout.states])


def test_every_size_has_a_layout_and_no_other_has():
    for states, widest in (("real", 512), ("complex", 256)):
        for n, batch in itertools.product((1, widest), (1, 10**6)):
            assert find_layout(states, n, batch, 132).max_units >= n
        with pytest.raises(ValueError, match="fewer units"):
            find_layout(states, widest + 1, 1, 132)
    assert MAX_WIDTH == 512


def test_the_page_says_what_compiled_programs_hold():
    for layout in LAYOUTS:
        most = "" if layout.max_per_multiprocessor == float("inf") else f"{layout.max_per_multiprocessor:g}"
        line = f"| {layout.states} | {layout.max_units} | {most} | {layout.program} | {layout.warps} "
        for name in ("registers", "instructions", "barriers") if layout in HELD else ():
            line += "| " + " / ".join(str(getattr(held(layout, way), name)) for way in ("forward", "back")) + " "
        assert line in DOCS

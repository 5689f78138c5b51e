"""The layouts of the scan's programs: what the table says of compiled ones, and that it follows from the roofline."""

import itertools
import math
from pathlib import Path

import pytest
from compiled_programs import compiled, cost, is_exact, is_without_spills, machinery

from benchmarks import roofline as page
from benchmarks.roofline import CASES, MACHINES, Case, best, held, limit, predicted
from stiefelkit.scan.engines import launch
from stiefelkit.scan.engines.launch import LAYOUTS, choose

pytest.importorskip("triton")

DOCS = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
ANOTHER = {"real": "oplu", "complex": "identity", "gated": "abs"}
HELD = [layout for layout in LAYOUTS if layout.program != "tiles"]
WIDEST = [
    layout for layout in HELD if (layout.states, layout.widest) in {("real", 192), ("complex", 128), ("gated", 128)}
]


def named(layout):
    return f"{layout.program} {layout.states} {layout.widest}"


@pytest.fixture
def _for_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def check(layout, way, tmp_path, activation="modrelu", capability=90):
    program = machinery(compiled(layout, way, activation, layout.widest, capability), tmp_path)
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


SIZES = [1, 32, 33, 64, 65, 96, 97, 128, 129, 170, 190, 192, 193, 232, 256, 257, 384, 512]
BATCHES = [1, 16, 50, 128, 132, 133, 500, 2000, 10000]


@pytest.mark.parametrize("states", ["real", "complex", "gated"])
def test_the_layout_that_is_taken_is_about_the_fastest_that_is_predicted(states):
    widest = max(layout.widest for layout in LAYOUTS if layout.states == states)
    for machine, n, batch in itertools.product(MACHINES.values(), SIZES, BATCHES):
        if n > widest:
            continue
        case = Case("", 100, batch, n, states)

        def total(layout, case=case, machine=machine):
            return sum(predicted(case, machine, layout, way) for way in ("forward", "back"))

        taken, fastest = choose(states, n, batch, machine.multiprocessors), best(case, machine)
        assert total(taken) <= 1.5 * total(fastest), (machine.name, n, batch, taken.program, fastest.program)


@pytest.mark.parametrize("name", CASES)
def test_predictions_stand_within_twice_the_limit(name):
    case = CASES[name]
    for machine in MACHINES.values():
        layout = choose(case.states, case.units, case.batch, machine.multiprocessors)
        waves = 1 if layout.program == "groups" else math.ceil(case.batch / machine.multiprocessors)
        for way in ("forward", "back"):
            factor = predicted(case, machine, layout, way) / limit(case, machine)
            assert 1 < factor <= 2 * waves


def test_every_size_has_a_layout_and_no_other_has():
    for states, widest in (("real", 512), ("complex", 256), ("gated", 128)):
        for n, batch in itertools.product((1, widest), (1, 10**6)):
            assert choose(states, n, batch, 132).widest >= n
        with pytest.raises(ValueError, match="fewer units"):
            choose(states, widest + 1, 1, 132)
    assert launch.WIDEST == 512


def test_the_page_has_the_tables_that_its_command_prints():
    machines = MACHINES["H100"], MACHINES["H200"]
    tables = [table(machine) for machine in machines for table in (page.cases, page.rotations)]
    for line in (*page.layouts(), *(line for table in tables for line in table)):
        assert line in DOCS

"""How time and memory are said to grow, and errors at large coordinates. No test asserts a time."""

import json
import math
from pathlib import Path

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.contract import table
from stiefelkit.measuring.races import frames, growth
from stiefelkit.measuring.races.clock import peak_bytes
from stiefelkit.measuring.races.contenders import Contender, FrameProblem
from stiefelkit.measuring.races.growth import LOGARITHM, fit
from stiefelkit.measuring.races.peers import peers
from stiefelkit.measuring.races.plan import AXES, QUANTITIES, GrowthPlan, NormPlan
from stiefelkit.testing import seeds

CPU = torch.device("cpu")
SMALL = {
    "seed": seeds.seed(),
    "sizes": (4, 8, 16),
    "matrices": (1, 2, 4),
    "steps": (8, 16, 32),
    "batches": (2, 4, 8),
    "reflections": (1, 2, 4),
    "repeats": 1,
    "seconds": 1e-3,
}
SIZES = ["--sizes", "4,8", "--matrices", "1,2", "--T", "4,8", "--batches", "1,2", "--reflections", "1,2"]


# The fit


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0])
def test_a_power_law_is_found_with_no_spread(exponent):
    xs = [64, 128, 256, 512]
    law = fit(xs, [7e-6 * x**exponent for x in xs], exponent)
    assert law.exponent == pytest.approx(exponent)
    assert law.spread == pytest.approx(0, abs=1e-6)
    assert (law.first, law.last, law.overhead_until) == (64, 512, None)


def test_the_spread_is_the_standard_error_of_the_slope():
    u, v = [0.0, 1.0, 2.0, 3.0], [0.0, 1.2, 1.9, 3.1]
    law = fit([math.exp(x) for x in u], [math.exp(y) for y in v], 1.0)
    a = torch.tensor([[1.0, x] for x in u], dtype=torch.float64)
    y = torch.tensor(v, dtype=torch.float64)
    solution = torch.linalg.lstsq(a, y[:, None]).solution[:, 0]
    variance = (y - a @ solution).square().sum() / 2
    assert law.exponent == pytest.approx(solution[1].item())
    assert law.spread == pytest.approx((variance * torch.linalg.inv(a.mT @ a)[1, 1]).sqrt().item())


def test_what_is_paid_whatever_the_size_is_left_out_and_named():
    xs = [16, 32, 64, 128, 256]
    law = fit(xs, [1e-4 + 1e-9 * x**3 for x in xs], 3.0)
    assert law.overhead_until == 32
    assert (law.first, law.last) == (64, 256)
    flat = fit(xs, [1.0] * 5, 3.0)
    assert (flat.first, flat.exponent, flat.spread) == (128, 0.0, None)
    assert fit([5], [1.0], 3.0).exponent is None


def test_faster_means_beyond_the_spread_and_a_logarithm():
    xs = [128, 256, 512, 1024]
    with_log = fit(xs, [x**2 * math.log(x) for x in xs], 2.0)
    cubic = fit(xs, [x**3 for x in xs], 2.0)
    assert with_log.exponent is not None
    assert 2 < with_log.exponent < 2 + LOGARITHM
    assert not with_log.faster_than(2.0)
    assert cubic.faster_than(2.0)
    assert not cubic.faster_than(3.0)


# Memory


def test_the_peak_is_what_was_held_at_once_not_what_was_asked_for():
    def run() -> None:
        a = torch.empty(1000)
        b = torch.empty(3000)
        del a
        c = torch.empty(2000)
        del b, c

    assert peak_bytes(run, CPU) == 4 * 5000
    assert peak_bytes(lambda: None, CPU) == 0


def test_the_profiler_says_nothing_on_standard_error(capfd):
    peak_bytes(lambda: torch.empty(10), CPU)
    assert capfd.readouterr().err == ""


def test_memory_of_a_frame_grows_as_its_square_and_of_a_recurrence_no_faster_than_its_steps():
    plan = GrowthPlan(**{**SMALL, "sizes": (32, 64, 128), "parametrizations": ("matrix_exp",), "what": ("memory",)})
    rows = {race.subject: race.rows[0] for race in growth.races(plan) if race.rows}
    assert rows["n"]["exponent"] == pytest.approx(2.0, abs=0.2)
    assert rows["matrices"]["exponent"] == pytest.approx(1.0, abs=0.1)
    for axis in ("T", "batch"):
        exponent = rows[axis]["exponent"]
        assert exponent is not None
        assert 0 < exponent < 1.1
        assert not rows[axis]["faster"]


@pytest.mark.slow
def test_a_step_with_reflectors_keeps_memory_that_grows_no_faster_than_their_number():
    plan = GrowthPlan(**{**SMALL, "reflections": (32, 64, 128), "what": ("memory",), "against": ("reflections",)})
    (race,) = growth.races(plan)
    (row,) = race.rows
    assert (row.contender, row["faster"]) == ("householder", False)
    plan = GrowthPlan(**{**SMALL, "parametrizations": ("cayley",), "against": ("reflections",)})
    assert [race.left_out for race in growth.races(plan)] == 2 * [{"cayley": "it has no reflectors"}]


# The measurement


@pytest.mark.slow
def test_every_member_is_measured_on_every_axis_against_what_it_declares():
    races = list(growth.races(GrowthPlan(**SMALL)))
    assert [(race.subject, race.operation) for race in races] == [(axis, what) for axis in AXES for what in QUANTITIES]
    for race in races:
        assert not race.left_out
        names = [row.contender for row in race.rows if row.contender != growth.PRODUCT]
        assert names == (["householder"] if race.subject == "reflections" else list(sk.available()))
        for row in race.rows:
            assert row["points"] == list(GrowthPlan(**SMALL).points(race.subject))
            assert all(value > 0 for value in row["values"])
            assert row["exponent"] is not None
            assert math.isfinite(row["exponent"])
    of_time = {row.contender: row for row in races[0].rows}
    for name, cls in sk.available().items():
        dtype = torch.float32 if cls.supports((4, 4), torch.float32) is None else torch.complex64
        assert of_time[name]["expected"] == cls((4, 4), dtype=dtype).traits.cost_exponent
        assert of_time[name]["dtype"] == str(dtype).removeprefix("torch.")
    assert of_time[growth.PRODUCT]["expected"] == 3


def test_a_plugin_is_measured_the_day_it_is_installed(monkeypatch):
    own = table.registered.copy()
    own.register("mine", sk.available()["cayley"])
    monkeypatch.setattr(table, "registered", own)
    (race,) = growth.races(
        GrowthPlan(**{**SMALL, "parametrizations": ("mine",), "what": ("memory",), "against": ("n",)})
    )
    assert [row.contender for row in race.rows] == ["mine"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parametrizations": ("cayly",)}, 'did you mean "cayley"'),
        ({"what": ("space",)}, "no quantity 'space'"),
        ({"against": ()}, "one axis or more"),
        ({"sizes": (64, 64)}, "two sizes or more"),
        ({"steps": (0, 4)}, "integer steps >= 1"),
        ({"dtype": "float16"}, "no dtype 'float16'"),
        ({"precision": "slow"}, "no precision 'slow'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(changes, words):
    with pytest.raises(errors.StiefelkitError, match=words):
        GrowthPlan(**{**SMALL, **changes})


@pytest.mark.slow
def test_the_command_prints_and_writes_the_fits(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = tmp_path / "rows.json"
    words = ["bench", "growth", "--parametrizations", "cayley,fourier,householder"]
    words += [*SIZES, "--repeats", "1", "--seconds", "1e-3"]
    assert main([*words, "--json", str(rows)]) == 0
    shown = capsys.readouterr().out
    assert "time against n, 4 to 8" in shown
    assert "fourier, complex64" in shown
    assert "Left out: cayley, fourier: it has no reflectors" in shown
    assert "…" not in shown
    assert {row["against"] for row in json.loads(rows.read_text())} == set(AXES)


# Errors at large coordinates


def test_exact_maps_stay_exact_however_large_their_coordinates():
    for dtype in ("float32", "complex64"):
        (race,) = frames.races(NormPlan(seed=seeds.seed(), sizes=((12, 12),), dtype=dtype, precisions=("exact",)))
        assert race.rows
        for row in race.rows:
            if row.family != "margin":
                assert all(error is not None and error < 2 for error in row["errors_over_limit"]), row


def test_the_coordinates_are_multiplied_and_nothing_else_is():
    def drawn(scale: float) -> FrameProblem:
        return FrameProblem(6, 6, seed=seeds.seed(), scale=scale)

    for draw in (FrameProblem.tangent, lambda problem: problem.normal(3), lambda problem: problem.angles(3)):
        assert torch.allclose(10 * draw(drawn(1.0)), draw(drawn(10.0)))
    assert torch.equal(drawn(1.0).frame(), drawn(10.0).frame())
    assert torch.allclose(drawn(1.0).gradient(), drawn(10.0).gradient())
    for name, contender in of_maps().items():
        small, large = (contender.enter(drawn(scale)) for scale in (1.0, 10.0))
        for a, b in zip(small.parameters, large.parameters, strict=True):
            assert torch.allclose(10 * a, b, rtol=1e-5), name


def of_maps() -> dict[str, Contender]:
    return NormPlan(parametrizations=("cayley", "householder", "givens", "matrix_exp")).contenders()


def test_a_frame_that_is_its_own_coordinate_is_left_out_with_the_reason():
    (race,) = frames.races(NormPlan(seed=seeds.seed(), sizes=((4, 4),), parametrizations=("stiefel",), peers=True))
    assert race.rows == []
    assert race.left_out == {"stiefel (exact)": "its coordinate is the frame, which has one length."}


def test_peers_are_beside_the_members_of_their_map_and_what_is_not_finite_is_null(monkeypatch):
    def nan(problem: FrameProblem):
        entry = of_maps()["cayley (exact)"].enter(problem)
        return type(entry)(lambda: entry.weight() * math.nan, entry.parameters, entry.optimizer)

    own = peers.copy()
    own.register("broken", Contender("cayley", nan))
    monkeypatch.setattr("stiefelkit.measuring.races.peers.peers", own)
    plan = NormPlan(seed=seeds.seed(), sizes=((4, 4),), parametrizations=("cayley",), factors=(1.0, 10.0), peers=True)
    (race,) = frames.races(plan)
    assert [row.is_peer for row in race.rows] == sorted(row.is_peer for row in race.rows)
    broken = next(row for row in race.rows if row.contender == "broken")
    assert broken["errors_over_limit"] == [None, None]


def test_the_command_shows_a_column_for_each_factor(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("COLUMNS", "80")
    rows = tmp_path / "rows.json"
    words = "bench norms --sizes 4 --parametrizations cayley --factors 1,1000 --peers --json"
    assert main([*words.split(), str(rows)]) == 0
    shown = capsys.readouterr().out
    assert "x 1000" in shown
    assert all(len(row["errors_over_limit"]) == 2 for row in json.loads(rows.read_text()))
    assert main(["bench", "norms", "--factors", "0"]) == 2

"""The races of maps and optimizers, and how cost is said to grow. No test asserts a time."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import stiefelkit as sk
from stiefelkit.cli import main
from stiefelkit.contract import table
from stiefelkit.measuring import frames
from stiefelkit.measuring.clock import peak_bytes
from stiefelkit.measuring.frames import GRADIENTS, races
from stiefelkit.measuring.implementations import (
    OPERATIONS,
    FrameProblem,
    Implementation,
    dtype_of,
    own_implementations,
    peers,
)
from stiefelkit.measuring.moved_frames import MovedFrame, own_optimizers, peer_optimizers
from stiefelkit.measuring.plans import OptimizerRace, ParametrizationRace
from stiefelkit.testing import seeds

KEYS = [
    *("operation", "contender", "n", "p", "batch", "dtype", "device"),
    *("seconds", "spread", "samples", "gemm_units", "ratio_to_best_peer", "error_over_limit"),
]


SMALL = {"seed": seeds.seed(), "sizes": ((4, 4),), "repeats": 2, "seconds": 1e-3, "peers": True}


def plan(**changes) -> ParametrizationRace:
    return ParametrizationRace(**{**SMALL, **changes})


def of_optimizers(**changes) -> OptimizerRace:
    return OptimizerRace(**{**SMALL, **changes})


def only(monkeypatch, **others: Implementation) -> None:
    """Puts others in the place of all peers."""
    for name in list(peers):
        monkeypatch.delitem(peers, name)
    for name, other in others.items():
        monkeypatch.setitem(peers, name, other)


# Who takes part


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(table.registered, "_targets", dict(table.registered._targets))
    return table.registered


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_every_registered_member_races_in_a_dtype_that_it_has_or_is_left_out(dtype):
    for race in races(plan(dtype=dtype, peers=False, operations=tuple(OPERATIONS))):
        left_out = {name.partition(" (")[0] for name in race.left_out}
        assert {row.name.partition(" (")[0] for row in race.rows} | left_out == set(sk.available())
        assert left_out == ({"stiefel"} if race.operation == "step" else set())
        for row in race.rows:
            own = dtype_of(sk.available()[row.name.partition(" (")[0]], getattr(torch, dtype))
            assert row["dtype"] == str(own).removeprefix("torch.")
            assert row["ratio_to_best_peer"] is None


def test_a_plugin_races_in_each_of_its_precisions_and_has_no_peer_of_its_own(own_registry):
    class Mine(sk.parametrizations.Cayley):
        precisions = ("exact", "fast")

    own_registry.register("mine", Mine)
    (race,) = races(plan(parametrizations=("mine",), operations=("forward_backward",)))
    assert {row.name for row in race.rows} == {"mine (exact)", "mine (fast)"}
    assert {row["ratio_to_best_peer"] for row in race.rows} == {None}
    (race,) = races(plan(parametrizations=("mine",), precisions=("fast",), operations=("forward",)))
    assert [row.name for row in race.rows] == ["mine (fast)"]


def test_a_peer_that_fails_is_left_out_and_a_member_that_fails_is_not_hidden(own_registry, monkeypatch):
    def broken(problem):
        raise RuntimeError("not implemented for 'Matrix'\nand a long trace")

    def missing(problem):
        import nowhere_to_be_found  # noqa: F401  # pyright: ignore[reportMissingImports]

    class Broken(sk.parametrizations.Cayley):
        def forward(self, skew, phase=None):
            raise RuntimeError("a bug")

    only(monkeypatch, bad=Implementation("cayley", broken), far=Implementation("cayley", missing))  # type: ignore[arg-type]
    (race,) = races(plan(parametrizations=("cayley",), operations=("forward",)))
    assert race.left_out == {"bad": "not implemented for 'Matrix'", "far": "nowhere_to_be_found is not installed."}
    own_registry.register("broken", Broken)
    with pytest.raises(RuntimeError, match="a bug"):
        list(races(plan(parametrizations=("broken",))))


# What is compared with what


@pytest.mark.slow
def test_the_ratio_is_the_best_peers_time_over_its_own_within_family_and_race():
    for race in races(plan(sizes=((6, 6), (6, 2)), batch=2)):
        for row in race.rows:
            like = [other["seconds"] for other in race.rows if other.family == row.family and other.name in peers]
            assert row["ratio_to_best_peer"] == (min(like) / row["seconds"] if like else None)
            assert row["gemm_units"] == row["seconds"] / race.unit


def test_a_peer_whose_frame_is_not_finite_is_no_yardstick(monkeypatch):
    solve = peers["torch_solve"]

    def poisoned(problem):
        entry = solve.enter(problem)
        return dataclasses.replace(entry, weight=lambda: sum(entry.parameters) * float("nan"))

    only(monkeypatch, x=Implementation("cayley", poisoned))
    (race,) = races(plan(parametrizations=("cayley",), precisions=("exact",), operations=("forward",)))
    assert [(row.name, row["ratio_to_best_peer"]) for row in race.rows] == [("cayley (exact)", None), ("x", None)]
    assert race.rows[1]["error_over_limit"] is None


def test_the_coordinates_are_multiplied_and_nothing_else_is():
    def drawn(scale: float) -> FrameProblem:
        return FrameProblem(6, 6, seed=seeds.seed(), scale=scale)

    for draw in (FrameProblem.tangent, lambda problem: problem.normal(3), lambda problem: problem.angles(3)):
        assert torch.allclose(10 * draw(drawn(1.0)), draw(drawn(10.0)))
    assert torch.equal(drawn(1.0).frame(), drawn(10.0).frame())
    assert torch.allclose(drawn(1.0).gradient(), drawn(10.0).gradient())
    for name, ours in own_implementations(("cayley", "householder", "givens", "matrix_exp"), (), {}).items():
        small, large = (ours.enter(drawn(scale)) for scale in (1.0, 10.0))
        for a, b in zip(small.parameters, large.parameters, strict=True):
            assert torch.allclose(10 * a, b, rtol=1e-5), name


# The command


def bench(what: str, words: str) -> int:
    return main(["bench", what, *words.split(), "--repeats", "2", "--seconds", "1e-3"])


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_rows(capsys):
    words = "--sizes 4,5x2 --batch 3 --memory --peers --operations step,forward --json rows.json"
    assert bench("parametrizations", f"{words} --options.reflections 2") == 0
    rows = json.loads(Path("rows.json").read_text())
    assert all(list(row) == [*KEYS, "bytes"] for row in rows)
    races_in_order = list(dict.fromkeys((row["operation"], row["n"], row["p"]) for row in rows))
    assert races_in_order == [("forward", 4, 4), ("step", 4, 4), ("forward", 5, 2), ("step", 5, 2)]
    shown = capsys.readouterr().out
    for row in rows:
        assert row["contender"] in shown
        assert row["seconds"] > 0
    for said in ("fourier (exact), complex64", "forward, 3 of 4 x 4, float32, cpu", "(exact, reflections=2)"):
        assert said in shown


def test_a_race_leaves_the_random_numbers_of_its_caller_alone():
    before = torch.get_rng_state()
    list(races(plan(operations=("forward",))))
    assert torch.equal(torch.get_rng_state(), before)


# Optimizers


@pytest.mark.slow
def test_every_optimizer_of_frames_races_in_each_precision_beside_the_peers():
    for race in races(of_optimizers(sizes=((4, 4), (6, 2)))):
        ours = {f"{name} ({precision})" for name in own_optimizers() for precision in ("exact", "fast")}
        assert {row.name for row in race.rows} == {*ours, *peer_optimizers}
        assert not race.left_out
        assert [row.is_peer for row in race.rows] == sorted(row.is_peer for row in race.rows)


@pytest.mark.slow
def test_the_ratio_is_to_the_faster_of_geoopts_two_sgd():
    (race,) = races(of_optimizers())
    seconds = {row.name: row["seconds"] for row in race.rows}
    best = min(seconds["geoopt_sgd_canonical"], seconds["geoopt_sgd_euclidean"])
    assert all(row["ratio_to_best_peer"] == best / row["seconds"] for row in race.rows)
    assert all(row["gemm_units"] == row["seconds"] / race.unit for row in race.rows)
    (race,) = races(of_optimizers(peers=False))
    assert {row["ratio_to_best_peer"] for row in race.rows} == {None}


@pytest.mark.slow
def test_contenders_get_the_same_gradients_in_turns(monkeypatch):
    seen: dict[int, list[torch.Tensor]] = {}
    step = MovedFrame.step

    def noted(self, gradient):
        seen.setdefault(id(self), []).append(gradient.clone())
        step(self, gradient)

    monkeypatch.setattr(MovedFrame, "step", noted)
    entries = []
    start = frames.start

    def kept(*arguments):
        entries.append((arguments, start(*arguments)))
        seen.pop(id(entries[-1][1]), None)  # of a trial step's frame that is gone
        return entries[-1][1]

    monkeypatch.setattr(frames, "start", kept)
    (race,) = races(of_optimizers(batch=3, repeats=30, seconds=1))
    assert race.subject == "3 of 4 x 4"
    for arguments, _ in entries:
        assert arguments[1] is entries[0][0][1]
    lists = [seen[id(moved)] for _, moved in entries]
    for gradients in lists:
        assert len(gradients) > GRADIENTS
        assert torch.equal(gradients[0], entries[0][0][2])
        for i, g in enumerate(gradients):
            assert torch.equal(g, lists[0][i % GRADIENTS])
    assert len({tuple(g.flatten().tolist()) for g in lists[0]}) == GRADIENTS


def test_complex_frames_race_without_the_peers_that_take_real_ones(capsys):
    assert bench("optimizers", "--sizes 3 --dtype complex64 --peers --optimizers cayley_sgd") == 0
    shown = capsys.readouterr().out
    assert "cayley_sgd (exact)" in shown
    assert "geoopt_sgd_euclidean: it needs a real dtype" in shown


@pytest.mark.slow
def test_peers_that_are_named_race_and_no_others():
    (race,) = races(of_optimizers(optimizers=("pogo", "geoopt_adam_euclidean"), precisions=("fast",), peers=False))
    assert [row.name for row in race.rows] == ["pogo (fast)", "geoopt_adam_euclidean"]


def test_the_peak_is_what_was_held_at_once_not_what_was_asked_for():
    def run() -> None:
        a = torch.empty(1000)
        b = torch.empty(3000)
        del a
        c = torch.empty(2000)
        del b, c

    assert peak_bytes(run, torch.device("cpu")) == 4 * 5000
    assert peak_bytes(lambda: None, torch.device("cpu")) == 0

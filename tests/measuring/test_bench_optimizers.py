"""The race of the optimizers of frames. No test asserts a time."""

import json
from pathlib import Path

import pytest
import torch

from stiefelkit.cli import main
from stiefelkit.measuring import frames
from stiefelkit.measuring.frames import GRADIENTS, races
from stiefelkit.measuring.moved_frames import MovedFrame, own_optimizers, peer_optimizers
from stiefelkit.measuring.plans import OptimizerRace
from stiefelkit.testing import seeds

QUICK = ["--repeats", "2", "--seconds", "1e-3"]


def plan(**changes) -> OptimizerRace:
    return OptimizerRace(
        **{"seed": seeds.seed(), "sizes": ((4, 4),), "repeats": 2, "seconds": 1e-3, "peers": True, **changes}
    )


def bench(words: str, *more: str) -> int:
    return main(["bench", "optimizers", *words.split(), *more])


@pytest.mark.slow
def test_every_optimizer_of_frames_races_in_each_precision_beside_the_peers():
    for race in races(plan(sizes=((4, 4), (6, 2)))):
        ours = {f"{name} ({precision})" for name in own_optimizers() for precision in ("exact", "fast")}
        assert {row.name for row in race.rows} == {*ours, *peer_optimizers}
        assert not race.left_out
        assert [row.is_peer for row in race.rows] == sorted(row.is_peer for row in race.rows)


@pytest.mark.slow
def test_the_ratio_is_to_the_faster_of_geoopts_two_sgd():
    (race,) = races(plan())
    seconds = {row.name: row["seconds"] for row in race.rows}
    best = min(seconds["geoopt_sgd_canonical"], seconds["geoopt_sgd_euclidean"])
    assert all(row["ratio_to_best_peer"] == best / row["seconds"] for row in race.rows)
    assert all(row["gemm_units"] == row["seconds"] / race.unit for row in race.rows)
    (race,) = races(plan(peers=False))
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
    (race,) = races(plan(batch=3, repeats=30, seconds=1))
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
    assert bench("--sizes 3 --dtype complex64 --peers --optimizers cayley_sgd", *QUICK) == 0
    shown = capsys.readouterr().out
    assert "cayley_sgd (exact)" in shown
    assert "geoopt_sgd_euclidean: it needs a real dtype" in shown


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_rows(capsys):
    words = "--sizes 4,5x2 --peers --optimizers multiplicative_cayley,cayley_sgd --step-length 0.01 --json rows.json"
    assert bench(words, *QUICK) == 0
    shown = capsys.readouterr().out
    rows = json.loads(Path("rows.json").read_text())
    assert {(row["operation"], row["n"], row["p"]) for row in rows} == {("step", 4, 4), ("step", 5, 2)}
    assert all(row["contender"] in shown for row in rows)
    assert "exact/fast" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    first = {row["contender"]: row["seconds"] for row in rows if row["n"] == 4}
    share = first["cayley_sgd (exact)"] / first["cayley_sgd (fast)"]
    assert f"{share:.2f}"[:3] in shown


@pytest.mark.slow
def test_peers_that_are_named_race_and_no_others():
    (race,) = races(plan(optimizers=("pogo", "geoopt_adam_euclidean"), precisions=("fast",), peers=False))
    assert [row.name for row in race.rows] == ["pogo (fast)", "geoopt_adam_euclidean"]

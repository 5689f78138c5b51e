"""What the drift experiment does to weights, what it sees, and what it writes."""

import json
import math
from pathlib import Path

import pytest
import torch

from stiefelkit import init
from stiefelkit.cli import main
from stiefelkit.errors import RunError
from stiefelkit.measuring import drift as run
from stiefelkit.measuring.clock import WARM_UPS
from stiefelkit.measuring.contest import DriftCurve
from stiefelkit.measuring.moved_frames import own_optimizers, peer_optimizers, start
from stiefelkit.measuring.plans import DriftPlan
from stiefelkit.measuring.tables import three_digits
from stiefelkit.testing import seeds

OURS = [f"{name}{precision}" for name in ("multiplicative_cayley", "cayley_sgd") for precision in ("", ":fast")]
NEWER = ["landing", "manifold_muon", "sgdg", "spel", "stiefel_adam", "stiefel_sgd"]
METHODS = [*OURS, "cayley_adam", "pogo", *NEWER, *peer_optimizers]


def drawn(n, p, dtype=torch.float64):
    return init.haar((n, p), dtype), torch.randn(n, p, dtype=dtype)


# The length of a step


@pytest.mark.parametrize("method", METHODS)
def test_the_first_step_turns_the_frame_by_the_length_asked_for(method):
    w, g = drawn(6, 6)
    moved = start(method, w, g, 1e-3)
    moved.step(g.clone())
    angles = torch.linalg.eigvals(moved.frame.detach() @ w.mH).angle()
    assert angles.abs().max().item() == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize(("size", "dtype"), [((6, 6), torch.complex128), ((9, 2), torch.float64)])
def test_the_learning_rate_of_the_multiplicative_update_is_the_length_over_the_norm_of_b(size, dtype):
    w, g = drawn(*size, dtype=dtype)
    lr = start("multiplicative_cayley", w, g, 0.1).optimizer.param_groups[0]["lr"]
    b = g @ w.mH - w @ g.mH
    assert lr * torch.linalg.matrix_norm(b, 2).item() == pytest.approx(0.1, rel=1e-6)


def test_a_frame_with_nowhere_to_go_stays():
    w, g = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    for method in METHODS:
        moved = start(method, w, g, 0.1)
        moved.step(g.clone())
        assert torch.equal(moved.frame.detach(), w), method


# What is seen


def test_a_point_of_the_curve_is_the_largest_error_since_the_one_before(monkeypatch):
    script = iter([1.0, 9.0, 2.0, 3.0, 8.0, 4.0, 5.0])
    monkeypatch.setattr(run, "orthogonality_error", lambda w: torch.tensor(next(script)))
    monkeypatch.setattr(run, "log_grid", lambda steps: [0, 2, 6])
    curve = run.run(DriftPlan(seed=seeds.seed(), steps=6), "multiplicative_cayley", 3, 3)
    assert curve.errors == [1.0, 9.0, 8.0]
    assert curve.worst == 9.0 / curve.limit
    assert curve.worst_until(0) == 1.0 / curve.limit


def test_one_step_out_of_so_many_is_looked_at_and_every_point(monkeypatch):
    looks = []
    monkeypatch.setattr(run, "log_grid", lambda steps: [0, 4, 60])
    run.run(DriftPlan(seed=seeds.seed(), steps=60, look_every=3), "cayley", 3, 3, looks.append)
    assert {4, 60} <= set(looks)
    assert all(set(looks) & {first, first + 1, first + 2} for first in range(1, 61, 3))
    assert len(looks) <= 22
    assert {look % 3 for look in looks[2:-1]} == {0, 1, 2}  # no period hides from them


def test_a_run_ends_where_an_error_is_not_finite_and_the_rest_is_nan(monkeypatch):
    looks, given, drawn = [], [], run._gradients

    def poisoned(*arguments):
        gradient = drawn(*arguments)

        def next_one(w):
            given.append(w)
            return gradient(w) * (torch.nan if len(given) == 30 else 1)

        return next_one

    monkeypatch.setattr(run, "_gradients", poisoned)
    plan = DriftPlan(seed=seeds.seed(), steps=1000, dtype="complex64")
    curve = run.run(plan, "geoopt_sgd_canonical", 8, 8, looks.append)
    assert 20 <= looks[-1] <= 60
    assert len(curve.errors) == len(curve.steps)
    assert math.isnan(curve.errors[-1])
    assert math.isnan(curve.worst)
    assert curve.worst_until(0) < 2


@pytest.mark.parametrize("method", ["cayley", "landing"])
@pytest.mark.parametrize("is_right", [True, False])
def test_replays_of_a_graph_go_on_where_launched_steps_end_or_are_refused(method, is_right, monkeypatch):
    plan = DriftPlan(methods=(method,), steps=110, sizes=((6, 6),), gradients="rotation")
    launched = run.run(plan, method, 6, 6)
    object.__setattr__(plan, "replay", True)

    def captured(advance, device):
        for _ in range(WARM_UPS):
            advance()
        return advance if is_right else lambda: None

    monkeypatch.setattr(run, "captured", captured)
    monkeypatch.setattr(run.optimizers, "get", lambda _: lambda groups, capturable: torch.optim.Adam(groups))
    if is_right:
        assert run.run(plan, method, 6, 6) == launched
    else:
        with pytest.raises(RunError, match="bits"):
            run.run(plan, method, 6, 6)


def test_gradients_are_as_named():
    w = init.haar((6, 3)).float()

    def source(kind):
        return run._gradients(DriftPlan(seed=seeds.seed(), gradients=kind), 6, 3, seeds.generator())

    random, fixed, rotation = (source(kind) for kind in ("random", "fixed", "rotation"))
    assert not torch.equal(random(w), random(w))
    assert torch.equal(source("random")(w), source("random")(-w))
    first = fixed(w)
    first.zero_()  # a peer may write into it
    assert torch.equal(fixed(w), fixed(-w))
    assert fixed(w).any()
    a = torch.cat([rotation(eye) for eye in torch.eye(6).split(3, 1)], 1)
    assert torch.equal(a, -a.mT)
    assert torch.allclose(rotation(w), a @ w, atol=1e-5)


# What is measured


def plan(**changes):
    return DriftPlan(**{"seed": seeds.seed(), "steps": 3, "sizes": ((4, 4), (6, 2)), **changes})


def test_all_methods_are_measured_at_all_sizes_or_left_out_with_a_reason():
    asked = plan(dtype="complex64")
    found = list(run.races(asked))
    assert [race.subject[:5] for race in found] == ["4 x 4", "6 x 2"]
    for race in found:
        assert sorted([*race.left_out, *(row.name for row in race.rows)]) == sorted(asked.methods)
        assert "complex" in race.left_out["geoopt_sgd_euclidean"]
        assert "geoopt_sgd_canonical" in {row.name for row in race.rows}
    assert set(own_optimizers()) | set(peer_optimizers) < set(asked.methods)


def test_a_map_that_is_complex_only_is_measured_in_the_complex_dtype():
    (race,) = run.races(plan(methods=("cayley", "fourier"), sizes=((4, 4),)))
    assert [(row.name, row["dtype"]) for row in race.rows] == [("cayley", "float32"), ("fourier", "complex64")]


def test_an_error_of_ours_is_not_hidden_and_one_of_a_peer_is_a_reason(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("a bug\nwith details")

    monkeypatch.setattr(run, "run", broken)
    for race in run.races(plan(methods=("geoopt_sgd_euclidean",))):
        assert race.left_out == {"geoopt_sgd_euclidean": "a bug"}
    with pytest.raises(RuntimeError, match="a bug"):
        list(run.races(plan(methods=("pogo",))))


def test_ctrl_c_keeps_the_curves_that_are_done_in_a_whole_file(monkeypatch, capsys):
    count = iter(range(9))

    def interrupted(plan, method, n, p, watch):
        if next(count) == 2:
            raise KeyboardInterrupt
        return DriftCurve(method, n, p, 1.0, [0, 3], [1.0, 2.0])

    monkeypatch.setattr(run, "run", interrupted)
    assert main("drift --methods cayley,pogo,unconstrained --steps 3 --sizes 4 --out mine".split()) == 130
    assert len(capsys.readouterr().err.splitlines()) == 1
    record = json.loads(Path("mine/drift.json").read_text())
    assert [curve["method"] for curve in record["curves"]] == ["cayley", "pogo"]
    assert record["finished"] is False
    assert Path("mine/drift.png").read_bytes().startswith(b"\x89PNG")


# The command


def test_the_command_shows_and_writes_the_worst_of_each(capsys):
    words = "drift --steps 120 --sizes 4,6x2 --gradients rotation --step-length 0.1 --look-every 7 --out mine"
    methods = "multiplicative_cayley:fast,cayley_sgd,geoopt_adam_canonical,householder"
    assert main([*words.split(), "--methods", methods]) == 0
    shown = capsys.readouterr().out
    record = json.loads(Path("mine/drift.json").read_text())
    assert record["finished"] is True
    assert record["plan"]["look_every"] == 7
    assert [(c["method"], c["n"], c["p"]) for c in record["curves"]][:5] == [
        *((method, 4, 4) for method in methods.split(",")),
        ("multiplicative_cayley:fast", 6, 2),
    ]
    for curve in record["curves"]:
        assert curve["worst"] == pytest.approx(max(curve["errors"]) / curve["limit"])
        assert curve["method"] in shown
        assert three_digits(curve["worst"]) in shown
    assert "to 120" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


MINE = """import torch
class Failing(torch.optim.SGD):
    def step(self): raise ValueError("no way")
class Map(torch.nn.Module):
    def forward(self, x): return torch.linalg.qr(x)[0]
"""


def test_classes_by_import_path_are_held_to_a_limit_in_bits(capsys):
    Path("mine_of_drift.py").write_text(MINE)
    words = "drift --steps 3 --sizes 8 --methods cayley,unconstrained --out".split()
    for option, code, said in (
        ("--map mine_of_drift:Map", 0, "mine_of_drift:Map"),
        ("--optimizer torch.optim:SGD", 1, "torch.optim:SGD, 8 x 8, random gradients: lost"),
        ("--optimizer mine_of_drift:Failing", 1, "no way"),
        ("", 1, "unconstrained, 8 x 8, random gradients: lost"),
    ):
        assert main([*words, option.rpartition(":")[2] or "none", *option.split(), "--fail-above", "6"]) == code
        assert said in capsys.readouterr().out


def test_where_nothing_can_be_measured_nothing_is_written(capsys):
    assert main("drift --steps 2 --sizes 4x2 --methods fourier --out mine".split()) == 2
    assert "got nothing" in capsys.readouterr().err
    assert not Path("mine/drift.json").exists()

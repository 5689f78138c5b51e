"""An optimizer is one class and one line: help, runs, races, drift and the laws know it from then on."""

import math

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.functional import riemannian_gradient
from stiefelkit.measuring.drift import run
from stiefelkit.measuring.moved_frames import own_optimizers
from stiefelkit.measuring.plans import DriftPlan
from stiefelkit.optim import FrameOptimizer, PolarStep, Retraction, Setting, TangentOptimizer, optimizers
from stiefelkit.optim.settings import RATE, SHARED, WEIGHT_DECAY, at_least
from stiefelkit.testing import check_optimizer, seeds


class Descent(TangentOptimizer):
    """Plain descent along the Riemannian gradient, damped."""

    free_optimizer = torch.optim.SGD
    settings = (
        Setting("lr", 1e-2, RATE, "learning rate."),
        Setting("damping", 0.5, at_least(0), "how much of the rate is held back."),
        WEIGHT_DECAY,
        *SHARED,
    )
    examples = ({}, {"damping": 0.0})

    def direction(self, group, bucket, w, g):
        direction = riemannian_gradient(w, g, group["manifold"].partition(":")[2])
        return direction, [float(group["lr"]) / (1 + group["damping"])] * len(direction.rotation_norms)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(optimizers, "_targets", dict(optimizers._targets))
    sk.optim.register("descent", Descent)


@pytest.mark.slow
def test_the_laws_hold_for_it():
    check_optimizer(Descent, only="Descent-float32")


def test_lists_show_it_with_the_words_of_its_settings(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["list"]) == 0
    assert "descent" in capsys.readouterr().out
    assert main(["list", "descent"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "damping" in shown
    assert "how much of the rate is held back." in shown
    assert "this process" in shown


def test_runs_take_it_and_its_settings(tmp_path, capsys):
    words = f"train copying --model full_urnn --optimizer descent --optimizer-options.damping 1.5 --seed {seeds.seed()}"
    small = "--T 2 --train-size 30 --test-size 20 --hidden-size 5 --steps 4 --batch-size 8 --eval-every 2"
    assert main([*words.split(), *small.split(), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    wrong = words.replace("damping 1.5", "dampin 1.5")
    assert main([*wrong.split(), *small.split(), "--out", str(tmp_path / "other")]) == 2
    assert "damping" in capsys.readouterr().err


def test_tables_of_tests_and_measurements_have_it():
    assert own_optimizers()["descent"] is Descent
    curve = run(DriftPlan(seed=seeds.seed(), steps=6), "descent", 3, 3)
    assert len(curve.errors) > 0


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(errors.OptionError, match="subclass of torch"):
        sk.optim.register("mine", int)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.OptionError, match="is taken"):
        sk.optim.register("pogo", Descent)
    with pytest.raises(AttributeError):
        sk.optim.Adam  # noqa: B018
    assert sk.optim.Descent is Descent


class Nearest(Retraction):
    increment, leap = PolarStep.increment, PolarStep.leap


class OwnSteps(Descent):
    retraction = Nearest()


def test_an_increment_of_ones_own_makes_a_retraction():
    check_optimizer(OwnSteps, ["frames", "precision", "reads"], only="OwnSteps-float32")


def spoilt(base, method, spoil):
    """Returns a subclass whose method gives what `spoil` makes of what the method of the base gives."""
    return type("Spoilt", (base,), {method: lambda self, *args: spoil(getattr(base, method)(self, *args))})


@pytest.mark.parametrize("capturable", [False, True])
def test_an_increment_of_another_shape_is_refused_before_anything_moves(capturable, monkeypatch):
    monkeypatch.setattr(OwnSteps, "retraction", spoilt(Nearest, "increment", lambda increment: increment[0])())
    w = nn.Parameter(sk.init.haar((4, 2), torch.float32, seeds.generator()))
    before, w.grad = w.detach().clone(), torch.ones(4, 2)
    with pytest.raises(errors.OptimizerError, match="increment"):
        OwnSteps(sk.optim.frames([w]), lr=0.1, capturable=capturable).step()
    assert torch.equal(w, before)


class Pulled(FrameOptimizer):
    """Goes straight, and back by a QR decomposition: written once, for values that are read and others."""

    free_optimizer = torch.optim.SGD
    settings = (Setting("lr", 1e-2, RATE, "learning rate."), WEIGHT_DECAY, *SHARED)

    def move(self, group, bucket):
        w, g = bucket.frames().double(), bucket.g.double()
        bucket.require(g.isfinite().all(), ArithmeticError)
        q, r = torch.linalg.qr(w - group["lr"] * g)
        bucket.assign(q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2))


@pytest.mark.parametrize("shapes", [[(5, 3)], [(4, 4), (4, 4)], [(2, 5, 3)]], ids=str)
def test_one_move_serves_values_that_are_read_and_others(shapes):
    ends = []
    for capturable in (False, True):
        ws = [nn.Parameter(sk.init.haar(shape, torch.float32, seeds.generator(i))) for i, shape in enumerate(shapes)]
        optimizer = Pulled(sk.optim.frames(ws), lr=0.1, capturable=capturable)
        for number in range(3):
            for w in ws:
                w.grad = torch.randn(w.shape, generator=seeds.generator(number))
            optimizer.step()
        ws[0].grad = torch.full_like(ws[0], math.nan)
        before = [w.detach().clone() for w in ws]
        if capturable:
            optimizer.step()
            assert all(optimizer.state[w]["refused"] == 1 for w in ws)
        else:
            with pytest.raises((ArithmeticError, errors.NonFiniteError)):
                optimizer.step()
        assert all(torch.equal(w, b) for w, b in zip(ws, before, strict=True))
        ends.append(before)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))

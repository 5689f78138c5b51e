"""An optimizer is one class and one line: help, runs, races, drift and the laws know it from then on."""

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.functional import riemannian_gradient
from stiefelkit.measuring.drift import run
from stiefelkit.measuring.drift.plan import DriftPlan
from stiefelkit.measuring.moved_frames import own_optimizers
from stiefelkit.optim import Setting, TangentOptimizer, optimizers
from stiefelkit.optim.settings import RATE, SHARED, WEIGHT_DECAY, at_least
from stiefelkit.testing import check_optimizer, seeds


class Descent(TangentOptimizer):
    """Plain descent along the Riemannian gradient, damped."""

    plain = torch.optim.SGD
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
    assert "damping how much of the rate is held back. [default: 0.5]" in shown
    assert "frames, and all other parameters as SGD does" in shown
    assert "from what was registered in this process" in shown
    assert main(["list", "pogo"]) == 0
    assert f"from stiefelkit {sk.__version__}" in " ".join(capsys.readouterr().out.split())


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
    curve = run.run(DriftPlan(seed=seeds.seed(), steps=6), "descent", 3, 3)
    assert len(curve.errors) > 0


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(errors.OptionError, match="subclass of torch"):
        sk.optim.register("mine", int)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.OptionError, match="is taken"):
        sk.optim.register("pogo", Descent)
    with pytest.raises(AttributeError):
        sk.optim.Adam  # noqa: B018
    assert sk.optim.Descent is Descent

"""Bits of orthogonality that frames lose under an optimizer: log2(max(error / rounding limit, 1))."""

import math
from typing import Any

import torch

import stiefelkit as sk
from benchmarks.suite import PLACES, Suite
from stiefelkit import models
from stiefelkit.machine import threads
from stiefelkit.measuring.drift import run
from stiefelkit.measuring.moved_frames import own_optimizers
from stiefelkit.measuring.plans import DriftPlan
from stiefelkit.metrics import bits_lost
from stiefelkit.scan import rotation_scan
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Settings
from stiefelkit.training.session import Session
from stiefelkit.training.tasks import create

N = 64
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "complex64": {"dtype": "complex64"},
    "bfloat16": {"dtype": "bfloat16"},
    "autocast": {"autocast": True},
}
RUNS: dict[str, dict[str, Any]] = {
    "1000 steps": {"steps": 1000},
    "10000 steps": {"steps": 10_000},
    "training": {"steps": 500, "gradients": "digits"},
}
create("digits", {}).held_out()  # reads the images, once for the processes of all cells
SMOKE = ("cayley", "householder", "matrix_exp", "multiplicative_cayley")


class Frames(Suite, track="bits_lost"):
    """A 64 x 64 weight under random gradients, and in training on digits, at the worst step of the run.

    Methods are the parametrizations, with Adam or, where a coordinate is a frame itself, with the multiplicative Cayley
    update; and the optimizers of frames, which move a bfloat16 weight through the parametrization "stiefel".
    """

    unit = "bits"
    axes = (
        tuple(dict.fromkeys([*sk.available(), *own_optimizers()])),
        tuple(WEIGHTS),
        ("cpu", "cuda", "cuda TF32"),
        tuple(RUNS),
    )
    param_names = ("method", "weights", "device", "run")

    def level(self, *cell: str) -> str:
        method, weights, _, length = cell
        # a step of the frame itself takes no notice of autocast
        is_alike = weights == "autocast" and method in own_optimizers()
        is_slow = method == "givens" and length == "1000 steps"
        if length == "10000 steps" or (length == "training" and weights != "float32") or is_alike or is_slow:
            return "full"
        return "smoke" if method in SMOKE and weights == "float32" and length == "1000 steps" else "quick"

    def measure(self, *cell: str) -> float:
        method, weights, device, length = cell
        place = {"device": "cuda", "tf32": True} if device == "cuda TF32" else PLACES[device]
        options = {"look_every": 10, **WEIGHTS[weights], **place, **RUNS[length]}
        trained, optimizer = method, "adam"
        if method in own_optimizers():
            trained, optimizer = ("stiefel", method) if weights == "bfloat16" else (method, optimizer)
        plan = DriftPlan(methods=(trained,), optimizer=optimizer, **options)
        with threads(1):
            curve = run(plan, trained, N, N)
        if curve.dtype != plan.dtype:
            raise NotImplementedError(f"{method} needs a complex weight")
        worst = curve.worst
        # asv takes NaN for a cell that was left out
        if not worst < math.inf:
            raise ArithmeticError(f"{method} lost its frame: the error is {worst}.")
        return bits_lost(worst, 1.0)


def rotation_error(steps: int, decay: float, device: str = "cpu") -> float:
    """The largest error of float32 states of `rotation_scan`, in eps times the largest state."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(steps, 1, 16, generator=source)
    angle = 2 * torch.pi * torch.rand(8, generator=source)
    x, angle, g = (t.to(device) for t in (x, angle, torch.full((8,), decay)))
    exact = rotation_scan(x.double(), angle.double(), g.double(), backend="reference")[0]
    found = rotation_scan(x, angle, g)[0]
    assert exact is not None
    assert found is not None
    return float((found.double() - exact).abs().max() / (torch.finfo(torch.float32).eps * exact.abs().max()))


class Rotations(Suite, track="bits_lost"):
    """All states of `rotation_scan` in float32 against the loop in float64: bits lost beyond one eps."""

    unit = "bits"
    axes = (("scan",), ("784", "4096", "16384"), ("0.999", "1"), tuple(PLACES))
    param_names = ("contender", "steps", "decay", "device")

    def level(self, *cell: str) -> str:
        return "full" if cell[1] == "16384" else "quick"

    def measure(self, *cell: str) -> float:
        _, steps, decay, device = cell
        with threads(1):
            return bits_lost(rotation_error(int(steps), float(decay), device), 1.0)


class Models(Suite, track="bits_lost"):
    """A small net of each registered model after 30 steps of its recipe for digits, the worst of its weights."""

    unit = "bits"
    axes = (tuple(models.names()), tuple(PLACES))
    param_names = ("model", "device")
    steps = 30

    def level(self, *cell: str) -> str:
        return "quick"

    def measure(self, *cell: str) -> float:
        model, device = cell
        settings = Settings(hidden_size=32, batch_size=16, steps=self.steps, device=device, threads=1)
        with threads(1):
            session = Session.start(Config.resolve(create("digits", {}), model, settings))
            if not sk.drift(session.model):
                raise NotImplementedError("it has no orthogonal weight")
            for _ in range(self.steps):
                session.advance()
            return max(found.bits_lost for found in sk.drift(session.model).values())

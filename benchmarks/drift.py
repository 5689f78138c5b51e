"""Bits of orthogonality that frames lose under an optimizer: log2(max(error / rounding limit, 1))."""

import math
from typing import Any

import stiefelkit as sk
from benchmarks.linear_recurrences import LENGTHS, errors
from benchmarks.suite import PLACES, START, Suite
from stiefelkit import models
from stiefelkit.errors import OptimizerError
from stiefelkit.measuring.drift.plan import DriftPlan
from stiefelkit.measuring.drift.run import run
from stiefelkit.measuring.moved_frames import own_optimizers
from stiefelkit.metrics import bits_lost
from stiefelkit.training.config import Config
from stiefelkit.training.memory import threads
from stiefelkit.training.recipes import Settings
from stiefelkit.training.session import Session
from stiefelkit.training.tasks import create

N = 64
FRAME_OPTIMIZER = "multiplicative_cayley"
"""Moves frames that a parametrization has as a coordinate."""
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
STEPS = {"float32": 0.7e-3, "complex64": 1.6e-3, "bfloat16": 2e-3, "autocast": 1e-3}
"""Predicted seconds of a step of a 64 x 64 weight, by the kind of weight."""
TRAINED = 1e-3
"""What the gradient of a net adds to it."""
SLOW_STEPS = {"givens": 8e-3, "rebased": 3e-3, "matrix_exp": 2e-3, "spel": 2e-3, "manifold_muon": 2e-3}
"""What the method adds to it, where that is much."""
create("digits", {}).held_out()  # reads the images, once for the processes of all cells
SMOKE = ("cayley", "householder", "matrix_exp", "multiplicative_cayley")


class Frames(Suite):
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
        if length == "10000 steps" or (length == "training" and weights != "float32") or is_alike:
            return "full"
        return "smoke" if method in SMOKE and weights == "float32" and length == "1000 steps" else "quick"

    def predicted(self, named: str, *cell: str) -> float:
        method, weights, _, length = cell
        step = STEPS[weights] + SLOW_STEPS.get(method, 0.0) + TRAINED * (length == "training")
        return START + step * RUNS[length]["steps"]

    def measure(self, *cell: str) -> float:
        method, weights, device, length = cell
        place = {"device": "cuda", "tf32": True} if device == "cuda TF32" else PLACES[device]
        options = {"look_every": 10, **WEIGHTS[weights], **place, **RUNS[length]}
        trained, optimizer = method, "adam"
        if method in own_optimizers():
            trained, optimizer = ("stiefel", method) if weights == "bfloat16" else (method, optimizer)
        try:
            plan = DriftPlan(methods=(trained,), optimizer=optimizer, **options)
        except OptimizerError:
            plan = DriftPlan(methods=(trained,), optimizer=FRAME_OPTIMIZER, **options)
        with threads(1):
            worst = run(plan, trained, N, N).worst
        # asv takes NaN for a cell that was left out
        if not worst < math.inf:
            raise ArithmeticError(f"{method} lost its frame: the error is {worst}.")
        return bits_lost(worst, 1.0)

    def track_bits_lost(self, *cell: str) -> float:
        return self.figure


class Rotations(Suite):
    """All states of `rotation_scan` in float32 against the loop in float64, and of an FFT: bits beyond one eps."""

    unit = "bits"
    axes = (("scan", "FFT"), tuple(map(str, LENGTHS)), ("0.999", "1"), tuple(PLACES))
    param_names = ("contender", "steps", "decay", "device")

    def level(self, *cell: str) -> str:
        return "full" if cell[1] == "16384" or cell[0] == "FFT" else "quick"

    def predicted(self, named: str, *cell: str) -> float:
        return START + 1e-4 * int(cell[1])

    def measure(self, *cell: str) -> float:
        contender, steps, decay, device = cell
        with threads(1):
            return bits_lost(errors(int(steps), float(decay), device)[contender], 1.0)

    def track_bits_lost(self, *cell: str) -> float:
        return self.figure


class Models(Suite):
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

    def track_bits_lost(self, *cell: str) -> float:
        return self.figure

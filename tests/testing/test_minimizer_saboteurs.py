"""Each law of minimizers catches one that breaks it, and names itself."""

import dataclasses

import pytest
import torch

from stiefelkit.optim import LBFGS, Check, ConjugateGradient
from stiefelkit.testing import MINIMIZER_LAWS, LawBroken, check_minimizer


class Slack(LBFGS):
    """Ends at a gradient a thousand times as long as it was asked for, and says that it is done."""

    def iterate(self, objective, here, memory):
        return None if here.norm < 1e-5 else super().iterate(objective, here, memory)


class Early(LBFGS):
    """Takes gradients for rounding that are not."""

    def iterate(self, objective, here, memory):
        return (
            None
            if here.norm < 1e-3 * here.floor / torch.finfo(torch.float64).eps ** 0.5
            else super().iterate(objective, here, memory)
        )


class Boasting(LBFGS):
    """Calls every end a minimum."""

    def step(self, closure=None):
        returned = super().step(closure)
        self.progress = dataclasses.replace(self.progress, is_done=True, stopped="rounding")
        return returned


class Leaping(ConjugateGradient):
    """Goes a fixed step, downhill or not."""

    def iterate(self, objective, here, memory):
        place = objective.space.path(here.points, -here.gradient).at(1.0)
        return objective.settled(place, objective.at(place.points))


class Leaving(LBFGS):
    """Asks a little beside the manifold."""

    def iterate(self, objective, here, memory):
        objective.at([w * (1 + 1e-9) for w in here.points])
        return super().iterate(objective, here, memory)


class Counting(LBFGS):
    """Warms up by a count that no state dict holds."""

    made = 0

    def iterate(self, objective, here, memory):
        self.made += 1
        memory = {} if self.made % 5 == 0 else memory
        return super().iterate(objective, here, memory)


class Trusting(LBFGS):
    """Loads what it is given."""

    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)


class Hasty(LBFGS):
    """Moves before it asks."""

    def step(self, closure=None):
        for p in self._params()[-1:]:
            p.data.add_(1e-3)
        return super().step(closure)


class Differentiating(LBFGS):
    """Wants the closure to call backward()."""

    def step(self, closure=None):
        return None if closure is None else super().step(closure)


class RealOnly(LBFGS):
    """Counts imaginary parts twice."""

    def iterate(self, objective, here, memory):
        if any(w.is_complex() for w in here.points):
            here = dataclasses.replace(
                here, gradient=here.gradient * torch.tensor([1.0, 2.0]).repeat(here.gradient.numel() // 2)
            )
        return super().iterate(objective, here, memory)


class Undeclared(LBFGS):
    moves_frames = False


class Unchecked(LBFGS):
    settings = tuple(
        dataclasses.replace(each, check=Check("", lambda value: True)) if each.name == "curvature" else each
        for each in LBFGS.settings
    )


@pytest.mark.parametrize(
    ("saboteur", "law"),
    [
        (Slack, "convergence"),
        (Early, "invariance"),
        (Boasting, "kinks"),
        (Leaping, "descent"),
        (Leaving, "frames"),
        (Counting, "resume"),
        (Trusting, "checkpoint"),
        (Hasty, "finite"),
        (Differentiating, "closures"),
        (RealOnly, "field"),
        (Undeclared, "guard"),
        (Unchecked, "settings"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_law_catches_its_saboteur(saboteur, law):
    dtype = "complex128" if law == "field" else "float64"
    with pytest.raises(LawBroken, match=f"^{law}: ") as caught:
        check_minimizer(saboteur, [law], only=f"{saboteur.__name__}-{dtype}")
    assert {failure.law for failure in caught.value.failures} == {law}


def test_every_law_has_a_saboteur():
    marks = test_the_law_catches_its_saboteur.pytestmark[0]
    assert {law for _, law in marks.args[1]} == set(MINIMIZER_LAWS)

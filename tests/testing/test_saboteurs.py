"""Each law catches a parametrization that breaks it, and names itself."""

import dataclasses
import random
import time
from typing import Any

import false_claims as false
import pytest
import torch
import wrong_derivatives as wrong
from wrong_derivatives import Small

from stiefelkit import OrthogonalParam, functional
from stiefelkit.metrics import rounding_limit, working_dtype
from stiefelkit.parametrizations.cayley import Cayley
from stiefelkit.parametrizations.stiefel_point import StiefelPoint
from stiefelkit.testing import LAWS, LawBroken, check_parametrization


class Single(Small):
    """Solves in float32."""

    def forward(self, skew, phase=None):
        n, p = self.shape[-2:]
        if self.dtype != torch.float32 or n != p:
            return super().forward(skew, phase)
        below = torch.zeros(*skew.shape[:-1], n * n)
        i, j = torch.tril_indices(n, n, -1)
        below[..., i * n + j] = skew
        a = below.unflatten(-1, (n, n))
        a = a - a.mT
        return torch.linalg.solve(torch.eye(n) + a, torch.eye(n) - a) * self.signs.unsqueeze(-2)


class Boasting(Small):
    """Says that it is within one limit in fast precision, and is not."""

    @classmethod
    def examples(cls):
        return [((6, 6), {"precision": "fast"})]

    @property
    def traits(self):
        return dataclasses.replace(super().traits, exact=False)

    def error_bound(self, *coordinates):
        return rounding_limit(self.shape[-1], self.dtype)

    def forward(self, skew, phase=None):
        return super().forward(skew, phase) * (1 + 1e-5)


class Lowered(Small):
    """Multiplies in whatever precision products are allowed to have."""

    @classmethod
    def examples(cls):
        return [((64, 64), {})]

    def forward(self, skew, phase=None):
        w = super().forward(skew, phase)
        return w @ torch.eye(64, dtype=w.dtype).roll(1, 0)


class Counting(Small):
    """Depends on how often it was called."""

    calls = 0

    def forward(self, skew, phase=None):
        type(self).calls += 1
        return super().forward(skew * (1 + 1e-3 * self.calls), phase)


FOUND_BY_THREADS = {}


class Sharing(Small):
    """Keeps its argument where another thread finds it."""

    def forward(self, skew, phase=None):
        FOUND_BY_THREADS["skew"] = skew
        time.sleep(1e-3)
        return super().forward(FOUND_BY_THREADS["skew"], phase)


class Keeping(Small):
    """Keeps its argument."""

    def forward(self, skew, phase=None):
        self.kept = skew
        return super().forward(skew, phase)


class Flagging(Small):
    """Takes the flag of lowered products back for the process, and sets it again while others still multiply."""

    def forward(self, skew, phase=None):
        flags: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = flags.fp32_precision
        flags.fp32_precision = "ieee"
        time.sleep(1e-3 * random.Random(float(skew.detach().sum())).random())
        w = super().forward(skew, phase)
        w = w @ torch.eye(self.shape[-1], dtype=w.dtype).roll(1, 0)
        flags.fp32_precision = before
        return w


class Swallowing(Small):
    """Replaces NaN."""

    def forward(self, skew, phase=None):
        return super().forward(torch.nan_to_num(skew), phase)


class FirstOfBatch(Small):
    """Uses the scale of the first matrix for the whole batch."""

    def forward(self, skew, phase=None):
        if len(self.shape) == 2:
            return super().forward(skew, phase)
        return super().forward(skew[:1].expand_as(skew), phase)


class OneChart(Small):
    """Has one row of signs for the whole batch."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        if not self.is_complex:
            self.register_buffer("signs", torch.ones(self.shape[-1], dtype=torch.int8))


class Transposing(Small):
    """Inverts to the transposed frame."""

    def invert(self, w):
        if w.shape[-1] != w.shape[-2]:
            return super().invert(w)
        return super().invert(w.mH)


class SignInCoordinate(Small):
    """Trains a sign, so that steps and weight decay take the frame through zero."""

    @property
    def coordinates(self):
        return {**super().coordinates, "sign": self.shape[:-2]}

    def initial(self, scheme, generator=None):
        coordinates, chart = super().initial(scheme, generator)
        return (*coordinates, torch.full(self.shape[:-2], 2.0)), chart

    def forward(self, *coordinates):
        *own, sign = coordinates
        return (super().forward(*own) * torch.tanh(10 * sign)[..., None, None]).to(self.dtype)


class Autocasting(Small):
    """Multiplies in the dtype that autocast chooses."""

    def forward(self, skew, phase=None):
        w = super().forward(skew, phase)
        return (torch.eye(self.shape[-2], dtype=self.dtype) @ w).to(self.dtype)


class Unseeded(Small):
    """Ignores the generator."""

    def initial(self, scheme, generator=None):
        return super().initial(scheme, None)


class WrongLinear(Small):
    """Applies the adjoint."""

    def linear(self, x, *coordinates):
        w = self(*coordinates)
        return x @ (w.mT.mT if w.shape[-1] == w.shape[-2] else w.mT)


class ForgetfulChart(Small):
    """Keeps a choice where state dicts do not look."""

    def __init__(self, shape, *, dtype=None, device=None, precision="exact"):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        self.flip = 1.0

    def initial(self, scheme, generator=None):
        coordinates, chart = super().initial(scheme, generator)
        self.flip = -1.0 if float(coordinates[0].sum() if coordinates[0].numel() else 0) < 0 else 1.0
        return coordinates, chart

    def forward(self, skew, phase=None):
        return super().forward(skew, phase) * self.flip


class Unmappable(Small):
    """Reads values out of tensors, which vmap refuses."""

    def forward(self, skew, phase=None):
        scale = 1.0 if skew.numel() == 0 or float(skew.detach().flatten()[0]) < 1e30 else 0.0
        return super().forward(skew * scale, phase)


class Branching(Small):
    """Breaks the graph."""

    def forward(self, skew, phase=None):
        torch._dynamo.graph_break()
        return super().forward(skew, phase)


class Misnamed(Small):
    coordinate_names = ("skewed",)


class Doubled(Small):
    """Leaves out the rounding at the end."""

    def forward(self, skew, phase=None):
        return super().forward(skew, phase).to(working_dtype(self.dtype))


class Unpaired(Small):
    """Draws coordinates without a chart."""

    def initial(self, scheme, generator=None):
        return super().initial(scheme, generator)[0]


class Undrawable(OrthogonalParam):
    """Can neither invert a frame nor draw one."""

    coordinate_names = ("skew",)

    @property
    def traits(self):
        return dataclasses.replace(Cayley((3, 3)).traits, onto=False, invertible=False, component="rotations")

    @classmethod
    def examples(cls):
        return [((3, 3), {})]

    @classmethod
    def supports(cls, shape, dtype, **options):
        return "a real dtype" if dtype.is_complex else None

    @property
    def coordinates(self):
        return {"skew": (*self.shape[:-2], 3)}

    def forward(self, skew):
        return functional.cayley(skew.double(), 3, 3).to(self.dtype)


class UnsavedChart(Small):
    """Leaves the signs out of state dicts."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        if not self.is_complex:
            self.register_buffer("signs", self.signs, persistent=False)


class PartialChart(Small):
    """Leaves the signs as it finds them."""

    def initial(self, scheme, generator=None):
        return super().initial(scheme, generator)[0], {}


class HalfInverse(Small):
    """Writes the chart before it looks at the frame."""

    def right_inverse(self, w):
        if not self.is_complex:
            self.signs.fill_(-1)
        return super().right_inverse(w)


class Overwriting(Small):
    """Uses its argument as scratch."""

    def right_inverse(self, w):
        found = super().right_inverse(w)
        w.zero_()
        return found


class FollowingTheDefault(Small):
    """Depends on torch's default dtype."""

    def forward(self, skew, phase=None):
        return super().forward(skew, phase) * (1 + torch.finfo(torch.get_default_dtype()).eps)


class OddImage(Small):
    """Draws something that is no frame."""

    @property
    def schemes(self):
        return ("haar", "noise")

    def initial(self, scheme, generator=None):
        coordinates, chart = super().initial("haar", generator)
        return ((*coordinates[:-1], coordinates[-1][..., :0]) if scheme == "noise" else coordinates), chart


class Reading(Small):
    """Looks at a norm."""

    def forward(self, skew, phase=None):
        return super().forward(skew * (2 if torch.linalg.vector_norm(skew).item() == 1e30 else 1), phase)


class Listing(Small):
    """Looks at numbers without an operator."""

    def forward(self, skew, phase=None):
        return super().forward(skew * (2 if skew.detach().reshape(-1).tolist() == [1e30] else 1), phase)


class Solving(Small):
    """Inverts, and is told if that fails."""

    def forward(self, skew, phase=None):
        w = super().forward(skew, phase)
        return w @ torch.linalg.inv(torch.eye(w.shape[-1], dtype=w.dtype, device=w.device))


class OnTheHost(Small):
    """Has a matrix that is always on the CPU."""

    def forward(self, skew, phase=None):
        w = super().forward(skew, phase)
        return w * torch.ones(w.shape[-1], dtype=w.dtype, device="cpu")


class Stretching(StiefelPoint):
    """Leaves the frame that it is given."""

    def forward(self, stiefel):
        return super().forward(stiefel) * 1.001


class NoExamples(Small):
    @classmethod
    def examples(cls):
        return []


SABOTEURS = {
    "frames": [Single, Boasting, Stretching],
    "precision": [Lowered, Autocasting, FollowingTheDefault],
    "gradients": [wrong.WrongGradient, wrong.WrongWhenLarge, wrong.Fading],
    "second_derivatives": [wrong.WrongHessian, wrong.OfLinearLosses],
    "forward_mode": [wrong.WrongTangent],
    "batched_gradients": [wrong.LastOfBatch],
    "pure": [Counting, Keeping, Swallowing, false.Remembering, false.Tallying, false.Uninverted],
    "threads": [Sharing, Flagging],
    "component": [false.InOnePiece, false.OnlyRotations, false.EveryRotation, false.Crossing, false.Halves],
    "batch": [FirstOfBatch, OneChart],
    "round_trip": [Transposing, HalfInverse, Overwriting, Stretching],
    "finite_gradients": [wrong.Dividing],
    "decay": [SignInCoordinate],
    "schemes": [Unseeded, OddImage, PartialChart],
    "linear": [WrongLinear],
    "checkpoint": [ForgetfulChart],
    "functional_call": [Unmappable],
    "compile": [Branching],
    "contract": [Misnamed, UnsavedChart, Doubled, Unpaired, Undrawable, false.Nameless],
    "reads": [Reading, Listing, Solving],
    "meta": [OnTheHost],
}


@pytest.mark.parametrize(
    ("saboteur", "law"),
    [pytest.param(saboteur, law, id=f"{saboteur.__name__}-{law}") for law in SABOTEURS for saboteur in SABOTEURS[law]],
)
def test_the_law_catches_its_saboteur(saboteur, law):
    with pytest.raises(LawBroken, match=f"^{law}: ") as caught:
        check_parametrization(saboteur, [law])
    assert {failure.law for failure in caught.value.failures} == {law}
    if law in ("frames", "gradients", "second_derivatives", "forward_mode", "decay"):
        assert all(failure.figure is not None for failure in caught.value.failures)  # by a number, not an error


def test_failures_come_in_the_order_of_the_laws():
    with pytest.raises(LawBroken) as caught:
        check_parametrization(wrong.WrongGradient, ["gradients", "second_derivatives", "forward_mode"])
    found = [failure.law for failure in caught.value.failures]
    assert found == sorted(found, key=[*LAWS].index)
    assert found[0] == "gradients"


def test_every_law_has_a_saboteur():
    assert set(SABOTEURS) == set(LAWS)


@pytest.mark.parametrize(("cls", "laws"), [(NoExamples, None), (Cayley, ["fraems"]), ("cayley", None)])
def test_checking_nothing_is_an_error(cls, laws):
    with pytest.raises(ValueError, match=r"need|No law"):
        check_parametrization(cls, *([laws] if laws else []))

"""Each law of optimizers catches one that breaks it, and names itself."""

import dataclasses

import pytest
import torch

from stiefelkit import errors
from stiefelkit.functional import norms_of, riemannian_gradient
from stiefelkit.optim import CayleyAdam, CayleySGD, Check, StiefelAdam
from stiefelkit.testing import OPTIMIZER_LAWS, LawBroken, check_optimizer


class Uphill(CayleySGD):
    def direction(self, group, bucket, w, g):
        return super().direction(group, bucket, w, -g)


class OneWay(CayleySGD):
    """Never ascends."""

    def move(self, group, bucket):
        super().move({**group, "maximize": False}, bucket)


class Leaving(CayleySGD):
    """Loses a little of each frame."""

    def move(self, group, bucket):
        super().move(group, bucket)
        bucket.w = bucket.w * (1 - 1e-6)


class Coarse(CayleySGD):
    """Works with half the digits."""

    def direction(self, group, bucket, w, g):
        return super().direction(group, bucket, w, g.bfloat16().to(g.dtype) if g.dtype == torch.float32 else g)


class Lowered(CayleySGD):
    """Multiplies in whatever precision products are allowed to have."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2:
                    p.grad = (p.grad @ torch.eye(p.shape[1], dtype=p.dtype)).to(p.dtype)
        return super().step(closure)


class Magnifying(StiefelAdam):
    """Turns the columns by whatever there is of a rotation, rounding or not."""

    def direction(self, group, bucket, w, g):
        along, steps = super().direction(group, bucket, w, g)
        along.rotation = 1e4 * riemannian_gradient(w, g).rotation
        along.rotation_norms = norms_of(along.rotation)[0]
        return along, steps


class FirstOfBatch(CayleyAdam):
    """Takes the step of the first matrix for all."""

    def direction(self, group, bucket, w, g):
        direction, steps = super().direction(group, bucket, w, g)
        return direction, steps[:1] * len(steps)


class Counting(CayleySGD):
    """Warms up by a count that no state dict holds."""

    made = 0

    def direction(self, group, bucket, w, g):
        self.made += 1
        return super().direction({**group, "lr": group["lr"] * (1 - 0.9**self.made)}, bucket, w, g)


class Unsafe(CayleySGD):
    """Keeps an object that torch does not load safely."""

    def move(self, group, bucket):
        super().move(group, bucket)
        bucket.states[0]["checks"] = Check("nothing", bool)


class Trusting(CayleySGD):
    """Loads what it is given."""

    def _check_state_dict(self, state_dict):
        return state_dict


class Hasty(CayleySGD):
    """Moves the free parameters first."""

    def step(self, closure=None):
        free = [group for group in self.param_groups if group["manifold"] is None]
        self._free.param_groups, self._free.state = free, self.state
        self._step_of_free(self._free)
        return super().step(closure)


class WritingFirst(CayleySGD):
    """Writes the momentum before it looks at it."""

    def direction(self, group, bucket, w, g):
        found = super().direction(group, bucket, w, g)
        bucket._commit(bucket.w)
        return found


class Swallowing(CayleySGD):
    """Replaces NaN."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = torch.nan_to_num(p.grad, 0.0, 0.0, 0.0)
        return super().step(closure)


class Undeclared(CayleySGD):
    moves_frames = False


class Taking(CayleySGD):
    """Looks at no group."""

    def add_param_group(self, param_group):
        torch.optim.Optimizer.add_param_group(self, param_group)


class OneRate(CayleySGD):
    """Moves every group by the rate of the first."""

    def move(self, group, bucket):
        super().move({**group, "lr": self.param_groups[0]["lr"]}, bucket)


class Idle(CayleySGD):
    """Forgets the groups without a manifold."""

    def _begin(self):
        super()._begin()
        self._step_of_free = lambda optimizer: None


class Reading(CayleySGD):
    """Looks at a norm."""

    def direction(self, group, bucket, w, g):
        if torch.linalg.vector_norm(g) == 0:
            bucket.stage("momentum_buffer", g)
        return super().direction(group, bucket, w, g)


class Replacing(CayleySGD):
    """Has a new tensor for its remainder at each step, which a graph would not find."""

    def step(self, closure=None):
        for state in self.state.values():
            if "lo" in state:
                state["lo"] = state["lo"].clone()
        return super().step(closure)


class Careless(CayleySGD):
    """Takes every gradient."""

    def move(self, group, bucket):
        if not bucket.may_sync_host:
            bucket.g.nan_to_num_(0.0, 0.0, 0.0)
            bucket.bounds.clear()
        super().move(group, bucket)


class OnTheHost(CayleySGD):
    """Has a matrix that is always on the CPU."""

    def direction(self, group, bucket, w, g):
        return super().direction(group, bucket, w, g * torch.ones(g.shape[-1], dtype=g.dtype, device="cpu"))


class Unchecked(CayleySGD):
    settings = tuple(
        dataclasses.replace(each, check=Check("", lambda value: True)) if each.name == "q" else each
        for each in CayleySGD.settings
    )


class Unscaled(CayleySGD):
    """Keeps squares of gradients, which may leave the range of the dtype."""

    def direction(self, group, bucket, w, g):
        bucket.state("exp_avg_sq")
        bucket.stage("exp_avg_sq", g.square())
        return super().direction(group, bucket, w, g)


class Unnamed(CayleySGD):
    """Has a setting that it does not take."""

    def __init__(self, params, lr=0.1, *, warmup=3, **settings):
        super().__init__(params, lr, **settings)


SABOTEURS = {
    "descent": [Uphill, OneWay],
    "frames": [Leaving],
    "precision": [Coarse, Lowered],
    "invariance": [Magnifying],
    "batch": [FirstOfBatch],
    "resume": [Counting, Unsafe],
    "checkpoint": [Trusting],
    "finite": [Hasty, WritingFirst, Swallowing],
    "guard": [Undeclared, Taking],
    "groups": [OneRate, Idle],
    "settings": [Unchecked, Unnamed],
    "sizes": [Unscaled],
    "reads": [Reading, Replacing],
    "refusal": [Careless],
    "meta": [OnTheHost],
}


@pytest.mark.parametrize(
    ("saboteur", "law"),
    [pytest.param(saboteur, law, id=f"{saboteur.__name__}-{law}") for law in SABOTEURS for saboteur in SABOTEURS[law]],
)
def test_the_law_catches_its_saboteur(saboteur, law):
    with pytest.raises(LawBroken, match=f"^{law}: ") as caught:
        check_optimizer(saboteur, [law], only=f"{saboteur.__name__}-float32")
    assert {failure.law for failure in caught.value.failures} == {law}
    assert f"check_optimizer({saboteur.__name__}, [{law!r}]" in caught.value.failures[0].line


def test_every_law_has_a_saboteur():
    assert set(SABOTEURS) == set(OPTIMIZER_LAWS)


@pytest.mark.parametrize(
    ("cls", "laws", "only"),
    [(CayleySGD, ["fraems"], None), ("cayley_sgd", ["frames"], None), (CayleySGD, ["frames"], "CayleySGD-float31")],
)
def test_checking_nothing_is_an_error(cls, laws, only):
    with pytest.raises((errors.OptionError, errors.UnknownNameError)):
        check_optimizer(cls, laws, only)

"""Models keep their laws, each law catches one that breaks it, and what is no model is refused in one sentence."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, models
from stiefelkit.models import SequenceModel
from stiefelkit.models.sequence import read_out
from stiefelkit.testing import MODEL_LAWS, LawBroken, check_model, seeds


def turner(
    input_size, hidden_size, output_size, *, parametrization: Any = "matrix_exp", activation="modrelu", **options
):
    """Turns its state."""
    options |= {"parametrization": parametrization, "activation": activation, "batch_first": True}
    rnn = sk.nn.OrthogonalRNN(input_size, hidden_size, **options)
    return SequenceModel(rnn, read_out(rnn, output_size))


class Wrong(SequenceModel):
    """One that `turner` makes, and whose class is put in its place."""

    calls = 0
    rnn: Any
    scale: Any


class Flat(Wrong):
    """Gives one number a step less."""

    def forward(self, x, last_only=False):
        return super().forward(x, last_only)[..., 1:]


class Counting(Wrong):
    def forward(self, x, last_only=False):
        self.calls += 1
        return super().forward(x, last_only) * (1 + 1e-3 * self.calls)


class OfTheBatch(Wrong):
    """Takes the mean of the batch away."""

    def forward(self, x: Any, last_only=False):
        return super().forward(x - x.mean(0), last_only)


class Foreseeing(Wrong):
    """Takes the mean over time away."""

    def forward(self, x: Any, last_only=False):
        return super().forward(x - x.mean(1, keepdim=True), last_only)


class Forgetting(Wrong):
    def forward(self, x: Any, last_only=False):
        return super().forward(x[:, -1:] if last_only else torch.cat([0 * x[:, :-1].detach(), x[:, -1:]], 1), last_only)


class Unread(Wrong):
    """Has a parameter that nothing reads."""

    def forward(self, x, last_only=False):
        if not hasattr(self, "spare"):
            self.spare = nn.Parameter(torch.zeros(2))
        return super().forward(x, last_only)


class Unsaved(Wrong):
    """Keeps a scale where state dicts do not look."""

    def forward(self, x, last_only=False):
        return super().forward(x, last_only) * self.scale


class Idle(Wrong):
    """Has gradients of 0."""

    def forward(self, x, last_only=False):
        out = super().forward(x, last_only)
        return out.detach() + 0 * out if self.training else out


class Stretching(Wrong):
    """Makes its weight larger with each step."""

    def forward(self, x, last_only=False):
        if self.training:
            self.rnn.parametrizations.weight_hh_l0.param.stretch += 1e-3
        return super().forward(x, last_only)


class Narrow(Wrong):
    """Rounds to half the digits."""

    def forward(self, x, last_only=False):
        return super().forward(x, last_only).float()


def of_class(cls):
    def build(input_size, hidden_size, output_size, **options):
        model: Any = turner(input_size, hidden_size, output_size, **options)
        model.__class__ = cls
        model.scale = float(torch.rand(()))
        return model

    return build


class Loose(sk.parametrizations.MatrixExp):
    stretch = 0.0

    def forward(self, skew):
        return super().forward(skew) * (1 + self.stretch)


def stretching(input_size, hidden_size, output_size):
    model = turner(input_size, hidden_size, output_size, parametrization=Loose)
    model.__class__ = Stretching
    return model


def fixed(input_size, hidden_size, output_size):
    """Draws by a seed of its own."""
    with torch.random.fork_rng():
        seeds.reseed(5)
        return turner(input_size, hidden_size, output_size)


@pytest.fixture(autouse=True)
def _own_table(monkeypatch):
    monkeypatch.setattr(models, "_models", models._models.copy())


@pytest.mark.parametrize("name", models.names())
def test_every_model_keeps_the_laws(name):
    check_model(name)


def test_a_model_of_ones_own_keeps_the_laws():
    models.register("turner", turner)
    for options in ({}, {"bidirectional": True}, {"num_layers": 2, "dropout": 0.5}, {"parametrization": "stiefel"}):
        check_model("turner", options=options)


SABOTEURS = [
    (of_class(Flat), "outputs"),
    (of_class(Counting), "pure"),
    (of_class(OfTheBatch), "batch"),
    (of_class(Foreseeing), "causal"),
    (of_class(Forgetting), "gradients"),
    (of_class(Unread), "gradients"),
    (fixed, "seeds"),
    (of_class(Unsaved), "checkpoint"),
    (of_class(Idle), "frames"),
    (stretching, "frames"),
    (of_class(Narrow), "precision"),
]


@pytest.mark.parametrize(("build", "law"), SABOTEURS)
def test_the_law_catches_its_saboteur_and_says_how_to_see_it_again(build, law):
    models.register("wrong", build)
    with pytest.raises(LawBroken, match=f"^{law}: wrong: ") as caught:
        check_model("wrong", [law], offset=7)
    (failure,) = caught.value.failures
    for words in ("x (4, 6, 3) in torch.float32", "8 units", "STIEFELKIT_SEED_OFFSET=7"):
        assert words in str(failure)
    with pytest.raises(LawBroken) as again:
        exec(failure.line, {})
    assert str(again.value) == str(caught.value)


def test_every_law_has_a_saboteur():
    assert {law for _, law in SABOTEURS} == set(MODEL_LAWS)
    with pytest.raises(errors.UnknownNameError, match='did you mean "pure"'):
        check_model("gru", ["pur"])


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (3, "A model needs to be a function of input_size, hidden_size, output_size, got 3."),
        (
            lambda m, n: None,
            "A model needs the arguments input_size, hidden_size, output_size first, got <lambda> with m, n.",
        ),
    ],
)
def test_what_is_no_model_is_refused_in_a_sentence(target, says):
    with pytest.raises(errors.OptionError) as caught:
        models.register("mine", target)
    assert str(caught.value) == says
    models._models.register("mine", target)
    with pytest.raises(errors.OptionError, match="A model needs"):
        models.create("mine", 2, 3, 4)

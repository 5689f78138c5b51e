"""Every model keeps the laws of models, and each law catches a model that breaks it."""

import copy
import io
from typing import Any

import pytest
import torch
from optimizers_at_hand import descend
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit import errors, models
from stiefelkit.models import SequenceModel
from stiefelkit.models.sequence import read_out
from stiefelkit.testing import seeds
from stiefelkit.weights.find import orthogonal_weights

INPUT, HIDDEN, OUTPUT = 3, 8, 2
BATCH, STEPS = 4, 6


class Case:
    """A model by its name, with options, at small sizes."""

    def __init__(self, name: str, options: dict[str, Any]):
        self.name, self.options = name, options

    @property
    def reads_both_ways(self) -> bool:
        return bool(self.options.get("bidirectional"))

    def build(self, seed: int = 0) -> nn.Module:
        seeds.reseed(seed)
        return models.create(self.name, INPUT, HIDDEN, OUTPUT, **copy.deepcopy(self.options))

    def at_rest(self, seed: int = 0) -> nn.Module:
        return self.build(seed).eval()


def sequences(batch: int = BATCH, steps: int = STEPS) -> Tensor:
    return seeds.normal((batch, steps, INPUT), 1, torch.float32)


def is_near(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two roads to one output in float32 end within a tolerance, relative to the largest output."""
    return (a - b).abs().max().item() <= tolerance * max(1.0, b.abs().max().item())


@torch.no_grad()
def law_outputs(case: Case) -> None:
    """(B, T, m) goes to (B, T, p) in its dtype, and with `last_only` to (B, p): the last step, if it reads one way."""
    model = case.at_rest()
    for batch, steps in ((BATCH, STEPS), (1, 1), (2, 17)):
        x = sequences(batch, steps)
        out, last = model(x), model(x, last_only=True)
        assert (out.shape, last.shape) == ((batch, steps, OUTPUT), (batch, OUTPUT))
        assert out.dtype == last.dtype == x.dtype
        assert torch.isfinite(out).all()
        assert torch.isfinite(last).all()
        assert case.reads_both_ways or is_near(last, out[:, -1])


@torch.no_grad()
def law_pure(case: Case) -> None:
    """In evaluation mode the same sequences give the same bits, and stay as they are."""
    model, x = case.at_rest(), sequences()
    before, first = x.clone(), model(x)
    model(2 * x)
    assert torch.equal(first, model(x))
    assert torch.equal(x, before)


@torch.no_grad()
def law_batch(case: Case) -> None:
    """Each sequence alone gives what it gives in a batch."""
    model, x = case.at_rest(), sequences()
    together = model(x)
    for i in range(BATCH):
        assert is_near(model(x[i : i + 1])[0], together[i])


@torch.no_grad()
def law_causal(case: Case) -> None:
    """No output depends on later inputs, unless the model reads both ways."""
    model, x = case.at_rest(), sequences()
    later = x.clone()
    later[:, STEPS // 2 :] += 1
    assert case.reads_both_ways or is_near(model(later)[:, : STEPS // 2], model(x)[:, : STEPS // 2])


def law_gradients(case: Case) -> None:
    """Trained parameters have finite gradients, and so have the inputs, the first ones at the last step."""
    model, x = case.build(), sequences().requires_grad_()
    model(x)[:, -1].square().sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].any()
    for parameter in (*model.parameters(), x):
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()


def law_seeds(case: Case) -> None:
    """Initial weights follow torch's generator, and another seed gives others."""
    first, again, other = (case.build(seed).state_dict() for seed in (0, 0, 1))
    assert first.keys() == again.keys()
    assert is_same(first, again)
    assert not is_same(first, other)


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(value, other[key]) for key, value in one.items() if isinstance(value, Tensor))


@torch.no_grad()
def law_checkpoint(case: Case) -> None:
    """A state dict, saved and loaded, and a copy bring back the same bits."""
    model, x, other = case.at_rest(), sequences(), case.at_rest(1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def law_frames(case: Case) -> None:
    """Steps of an optimizer change the outputs, and leave exact weights orthogonal."""
    model, x = case.build(), sequences()
    groups = sk.optim.parameter_groups(model, lr=0.01)
    has_frames = any(group.get("manifold") for group in groups)
    optimizer = (sk.optim.CayleySGD if has_frames else torch.optim.SGD)(groups)
    before = model.eval()(x).detach().clone()
    model.train()
    descend(optimizer, lambda: model(x).square().mean(), 4)
    assert not torch.equal(model.eval()(x), before)
    exact = {weight.qualified for weight in orthogonal_weights(model) if weight.coordinate_list.param.traits.exact}
    for name, found in sk.drift(model).items():
        assert name not in exact or found.error <= 1.2 * found.limit + torch.finfo(torch.float32).eps


@torch.no_grad()
def law_precision(case: Case) -> None:
    """`.double()` gives the same model in float64."""
    model, x = case.at_rest(), sequences()
    out = model(x)
    wide = model.double()(x.double())
    assert wide.dtype == torch.float64
    assert is_near(out.double(), wide, 1e-3)


LAWS = {name.removeprefix("law_"): law for name, law in vars().copy().items() if name.startswith("law_")}


@pytest.fixture(autouse=True)
def _own_table(monkeypatch):
    monkeypatch.setattr(models, "_models", copy.deepcopy(models._models))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", models.names())
def test_every_model_keeps_the_laws(name, law):
    LAWS[law](Case(name, {}))


def turner(input_size, hidden_size, output_size, *, parametrization="matrix_exp", activation="modrelu", **options):
    """Turns its state."""
    options |= {"parametrization": parametrization, "activation": activation, "batch_first": True}
    rnn = sk.nn.OrthogonalRNN(input_size, hidden_size, **options)
    return SequenceModel(rnn, read_out(rnn, output_size))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True}, {"num_layers": 2, "dropout": 0.5}, {"parametrization": "stiefel"}], ids=str
)
def test_a_model_of_ones_own_keeps_the_laws(options, law):
    models.register("turner", turner)
    LAWS[law](Case("turner", options))


class Wrong(SequenceModel):
    """What `turner` makes, with a class that breaks a law put in its place."""

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
    """Subtracts the mean of the batch."""

    def forward(self, x: Any, last_only=False):
        return super().forward(x - x.mean(0), last_only)


class Foreseeing(Wrong):
    """Subtracts the mean over time."""

    def forward(self, x: Any, last_only=False):
        return super().forward(x - x.mean(1, keepdim=True), last_only)


class Forgetting(Wrong):
    def forward(self, x: Any, last_only=False):
        return super().forward(x[:, -1:] if last_only else torch.cat([0 * x[:, :-1].detach(), x[:, -1:]], 1), last_only)


class Unread(Wrong):
    """Has a parameter that nothing reads."""

    def forward(self, x, last_only=False):
        self.spare = nn.Parameter(torch.zeros(2))
        return super().forward(x, last_only)


class Unsaved(Wrong):
    """Keeps a scale outside of state dicts."""

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


class Loose(sk.parametrizations.MatrixExp):
    stretch = 0.0

    def forward(self, skew):
        return super().forward(skew) * (1 + self.stretch)


class Fixed(Wrong):
    """Draws by a seed of its own."""


SABOTEURS = [
    (Flat, "outputs"),
    (Counting, "pure"),
    (OfTheBatch, "batch"),
    (Foreseeing, "causal"),
    (Forgetting, "gradients"),
    (Unread, "gradients"),
    (Fixed, "seeds"),
    (Unsaved, "checkpoint"),
    (Idle, "frames"),
    (Stretching, "frames"),
    (Narrow, "precision"),
]


@pytest.mark.parametrize(("cls", "law"), SABOTEURS)
def test_the_law_catches_its_saboteur(cls, law):
    def build(input_size, hidden_size, output_size):
        if cls is Fixed:
            seeds.reseed(5)
        parametrization: Any = Loose if cls is Stretching else "matrix_exp"
        model: Any = turner(input_size, hidden_size, output_size, parametrization=parametrization)
        model.__class__, model.scale = cls, float(torch.rand(()))
        return model

    models.register("wrong", build)
    with pytest.raises(AssertionError):
        LAWS[law](Case("wrong", {}))


def test_every_law_has_a_saboteur():
    assert {law for _, law in SABOTEURS} == set(LAWS)


@pytest.mark.parametrize("target", [3, lambda m, n: None])
def test_what_is_no_model_is_refused(target):
    with pytest.raises(errors.OptionError, match="model"):
        models.register("mine", target)
    models._models.register("mine", target)
    with pytest.raises(errors.OptionError, match="model"):
        models.create("mine", 2, 3, 4)

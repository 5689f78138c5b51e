"""Gradients over time: what is drawn is the total derivative, and the command writes what it draws."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.models import SequenceModel
from stiefelkit.testing import seeds
from stiefelkit.training.config import Config
from stiefelkit.training.gradients import GradientCurve, draw, gradient_norms
from stiefelkit.training.recipes import Settings
from stiefelkit.training.session import Session
from stiefelkit.training.tasks import create

SMALL = ["--seed", str(seeds.seed()), "--T", "6", "--hidden-size", "4", "--batch-size", "3", "--steps", "0,2"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@dataclass(frozen=True)
class Scored:
    """The sum of all outputs that count, as a task of which only the loss is needed."""

    last_only: bool

    input_size: ClassVar[int] = 2

    def answer(self, model, x):
        return model(x, last_only=True) if self.last_only else model(x)

    def loss(self, output, y):
        return (output * y).flatten(1).sum(1).mean()


def linear_net(field: Any = "real") -> Any:
    rnn = sk.nn.OrthogonalRNN(
        2, 5, field=field, activation="identity", bias=False, batch_first=True, dtype=torch.float64
    )
    return SequenceModel(rnn, nn.Linear(10 if field == "complex" else 5, 1, dtype=torch.float64))


@pytest.mark.parametrize("field", ["real", "complex"])
def test_a_linear_orthogonal_net_hands_the_gradient_back_unchanged(field):
    net, x = linear_net(field), torch.randn(3, 7, 2, dtype=torch.float64)
    y = torch.randn(3, 1, dtype=torch.float64)
    loss, norms = gradient_norms(net, Scored(True), x, y)  # type: ignore[arg-type]
    expected = (net.output.weight.norm() * y.abs()).mean().item()
    assert norms == pytest.approx([expected] * 7, rel=1e-12)
    assert loss == pytest.approx(Scored(True).loss(net(x, last_only=True), y).item())


def test_where_every_step_is_scored_the_output_of_a_step_counts_in_its_gradient():
    net, x = linear_net(), torch.randn(3, 6, 2, dtype=torch.float64)
    y = torch.ones(3, 6, 1, dtype=torch.float64)
    _, norms = gradient_norms(net, Scored(False), x, y)  # type: ignore[arg-type]
    w, v = net.rnn.weight_hh_l0, net.output.weight[0]
    # dL/dh_t = v + W^T v + ... + (W^T)^(T - t) v
    total, expected = torch.zeros_like(v), []
    for _ in range(6):
        total = v + w.mT @ total
        expected.append(total.norm().item())
    assert norms == pytest.approx(expected[::-1], rel=1e-12)


@pytest.mark.parametrize("name", [name for name in sk.models.names() if name not in ("lru", "rotrnn")])
def test_the_total_derivative_is_that_of_the_net_restarted_after_each_step(name):
    net: Any = sk.models.create(name, 2, 4, 1).double()
    x, y = torch.randn(2, 5, 2, dtype=torch.float64), torch.randn(2, 1, dtype=torch.float64)
    task = Scored(True)
    loss, norms = gradient_norms(net, task, x, y)  # type: ignore[arg-type]
    assert loss == pytest.approx(task.loss(task.answer(net, x), y).item(), rel=1e-9)
    assert len(norms) == 5
    for t in (1, 4):
        with torch.no_grad():
            _, state = net.rnn(x[:, :t])
        h = (state[0] if isinstance(state, tuple) else state).clone().requires_grad_()
        restarted: Any = copy.deepcopy(net)
        restarted.rnn = Restarted(restarted.rnn, h, state)
        per_sequence = 2 * torch.autograd.grad(task.loss(task.answer(restarted, x[:, t:]), y), h)[0][-1]
        assert norms[t - 1] == pytest.approx(per_sequence.norm(dim=-1).mean().item(), rel=1e-9)


class Restarted(nn.Module):
    """A layer that begins with a state in place of h_0, an LSTM with the cell of another."""

    def __init__(self, rnn, h, state):
        super().__init__()
        self.rnn, self.first = rnn, (h, state[1]) if isinstance(state, tuple) else h

    def forward(self, x, **options):
        return self.rnn(x, self.first, **options)


def test_the_net_is_left_as_it_was():
    net: Any = sk.models.create("scornn", 2, 4, 1)
    task = create("adding", {"T": 5})
    x, y = task.batch(0, 3, 0)
    rnn, before = net.rnn, {name: value.clone() for name, value in net.state_dict().items()}
    gradient_norms(net, task, x, y)
    assert net.rnn is rnn
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (nn.Linear(2, 2), "of one direction"),
        (SequenceModel(nn.GRU(2, 3, batch_first=True, bidirectional=True), nn.Linear(6, 1)), "of one direction"),
        (sk.models.create("rotrnn", 2, 4, 1), "read from its states"),
    ],
)
def test_a_model_without_a_layer_of_one_direction_that_reads_its_states_is_refused(net, words):
    task = create("adding", {"T": 5})
    with pytest.raises(errors.OptionError, match=words):
        gradient_norms(net, task, *task.batch(0, 3, 0))


def test_tiny_gradients_do_not_underflow_in_their_squares():
    net: Any = SequenceModel(nn.RNN(2, 4, batch_first=True), nn.Linear(4, 1))
    with torch.no_grad():
        net.rnn.weight_hh_l0.copy_(1e-4 * torch.eye(4))
    _, norms = gradient_norms(net, Scored(True), torch.zeros(2, 9, 2), torch.ones(2, 1))  # type: ignore[arg-type]
    assert 0 < norms[0] < 1e-30


def test_the_command_draws_the_gradients_of_runs_of_the_recipes_and_writes_its_data(capsys):
    assert main(["plot", "gradients", *SMALL, "--out", "here"]) == 0
    shown = capsys.readouterr().out
    assert "Figure: here/gradients.png" in shown
    assert Path("here/gradients.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(Path("here/gradients.json").read_text())
    assert {name: run["hidden_size"] for name, run in found["runs"].items()} == {"scornn": 4, "lstm": 4}
    curves = iter(found["curves"])
    for model in ("scornn", "lstm"):
        settings = Settings(hidden_size=4, batch_size=3, seed=seeds.seed())
        session = Session.start(Config.resolve(create("adding", {"T": 6}), model, settings))
        for iteration in (0, 2):
            while session.step < iteration:
                session.advance()
            loss, norms = gradient_norms(session.model, session.task, *session.task.batch(iteration, 3, seeds.seed()))
            assert next(curves) == {"model": model, "iteration": iteration, "loss": loss, "norms": norms}
            assert f"{norms[0]:.3g} at the first step" in shown
    assert main(["plot", "gradients", *SMALL, "--models", "lstm", "--out", "here"]) == 0
    assert {curve["model"] for curve in json.loads(Path("here/gradients.json").read_text())["curves"]} == {"lstm"}


def test_gradients_that_vanish_altogether_are_drawn():
    vanished = GradientCurve("scornn", 0, 1.0, [0.0, 0.0])
    for name, others in (("zero.png", [GradientCurve("lstm", 0, 1.0, [0.0, 1.0])]), ("none.png", [])):
        assert draw(Path(name), "adding", [vanished, *others]).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--task addding", "adding"),
        ("--iterations=-1", "iterations"),
        ("--task digits --T 5", "option 'T'"),
        ("--out file/inside", "file"),
    ],
)
def test_an_error_of_the_user_is_one_sentence_and_leaves_nothing(words, says, capsys):
    Path("file").touch()
    assert main(["plot", "gradients", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("Error: ")
    assert len(err.splitlines()) == 1
    assert says in err
    assert [path.name for path in Path().iterdir()] == ["file"]

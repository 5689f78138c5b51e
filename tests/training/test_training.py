"""The laws of training: it stops before a step that is not finite, saves all that it changes, and tells what it did."""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import Killed, Watching, content, killed_at, longer
from torch import Tensor, nn

from stiefelkit.errors import NonFiniteError, OptimizerError, OptionError, UnknownNameError
from stiefelkit.measuring.moved_frames import own_optimizers
from stiefelkit.testing import seeds
from stiefelkit.training import checkpoint, train
from stiefelkit.training import session as sessions
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import read_log
from stiefelkit.training.session import Session


class Poison(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.nan


class Failing(nn.Module):
    """A net whose middle layer fails at a given call."""

    def __init__(self, call: int, where: str):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(10, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.call, self.where, self.calls = call, where, 0
        self.middle.register_forward_hook(self._fail)

    def _fail(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < self.call:
            return output
        return output * torch.inf if self.where == "output" else Poison.apply(output)  # type: ignore[return-value]

    def forward(self, x: Tensor, last_only: bool = False) -> Tensor:
        return self.last(self.middle(self.first(x)))


@pytest.mark.parametrize(
    ("where", "culprit"), [("output", 'output of "middle"'), ("gradient", 'gradient of "middle.bias"')]
)
def test_training_stops_before_a_step_that_is_not_finite(
    where: str, culprit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds.reseed()
    model = Failing(7, where)
    monkeypatch.setattr(Config, "build_model", lambda self, task=None: model)
    path = tmp_path / "run"
    seen: list[dict[str, Tensor]] = []
    watching = Watching(lambda step: seen.append({k: v.clone() for k, v in model.state_dict().items()}))
    with pytest.raises(NonFiniteError, match=f"step 6.*{culprit}.*step 4 is kept.*"):
        train.train(longer(eval_every=50, rates={}), path, watching)
    assert all(torch.equal(value, seen[-1][key]) for key, value in model.state_dict().items())
    assert [each.name for each in checkpoint.checkpoints(path / "checkpoints")] == ["step-00000000", "step-00000004"]


def test_a_diverging_run_keeps_its_last_finite_checkpoint(tmp_path: Path) -> None:
    diverging = longer(optimizer="sgd", lr=1e38, clip_norm=0.0, model="lstm", rates={}, checkpoint_every=1)
    with pytest.raises(NonFiniteError, match="--lr"):
        train.train(diverging, tmp_path / "run")
    _, state = checkpoint.load(checkpoint.checkpoints(tmp_path / "run/checkpoints")[-1])
    assert all(value.isfinite().all() for value in state["model"].values())


def test_a_checkpoint_holds_any_tensor(tmp_path: Path) -> None:
    shared = torch.randn(4, 4)
    state = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(2, 0),
        "complex": [torch.randn(2, 3, dtype=dtype) for dtype in (torch.complex64, torch.complex128)],
        "conjugate": torch.randn(3, dtype=torch.complex128).conj(),
        "complex scalar": torch.tensor(1 + 2j, dtype=torch.complex128),
        "transposed": shared.mT,
        "view": shared[1:, ::2],
        "shared": (shared, shared),
        "dtypes": [torch.ones(3, dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16)],
        "nan": torch.tensor([torch.nan, torch.inf]),
        3: {"betas": (0.9, 0.999), "none": None, "yes": True, "float": 0.1 + 0.2, "text": "a/b"},
    }
    checkpoint.save(tmp_path / "checkpoints", 7, state)
    step, loaded = checkpoint.load(tmp_path / "checkpoints/step-00000007")

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        if isinstance(a, dict):
            return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return type(a) is type(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        return a == b and type(a) is type(b)

    assert step == 7
    assert same(state, loaded)


FREE = ("adam", "adamw", "adagrad", "rmsprop", "sgd")
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FREE),
    *((name, dict(cls.examples[-1])) for name, cls in own_optimizers().items()),  # type: ignore[attr-defined]
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_run_of_every_optimizer_resumes_to_the_same_bits(
    optimizer: str, options: dict[str, Any], schedule: str, tmp_path: Path
) -> None:
    model, coordinate = ("scornn", "skew") if optimizer in FREE else ("full_urnn", "stiefel")
    own: dict[str, Any] = {"optimizer": optimizer, "optimizer_options": options, "rates": {coordinate: 1e-2}}
    config = longer(model=model, **own, schedule=schedule, clip_norm=0.01)
    train.train(config, tmp_path / "whole")
    with pytest.raises(Killed):
        train.train(config, tmp_path / "run", killed_at(10))
    assert train.resume(tmp_path / "run").step == 12
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    last = [line for line in read_log(tmp_path / "run/log.jsonl") if line["kind"] == "train"][-1]
    orthogonality = last["orthogonality"]["rnn.weight_hh_l0"]
    assert orthogonality["error"] <= 2 * orthogonality["limit"] + torch.finfo(torch.float32).eps


def test_graphs_of_a_model_serve_batches_of_one_shape_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, replayed, shapes = Session.start(longer()), Session.start(longer()), []

    def graphed(answer: nn.Module, x: Tensor) -> Any:
        return lambda x: shapes.append(x.shape) or answer(x)

    for number in range(3):
        plain.advance()
        with monkeypatch.context() as patched:
            patched.setattr(sessions, "graphed", graphed)
            replayed.advance()
        assert len(shapes) == number + 1
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), replayed.model.parameters(), strict=True))
    assert (replayed.train_record()["graph"], "graph" in plain.train_record()) == (True, False)
    replayed._output(replayed.task.held_out()[0][:1])
    assert len(shapes) == 3


def test_a_model_that_no_graph_can_hold_trains_without_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a value is read\nand more")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refused)
    monkeypatch.setattr(torch.random, "fork_rng", lambda *_, **__: contextlib.nullcontext())
    batch: Any = SimpleNamespace(device=torch.device("cuda"), clone=lambda: None)
    with pytest.warns(UserWarning, match="a value is read$"):
        assert sessions.graphed(nn.Identity(), batch) is None


def test_frames_are_clipped_by_their_riemannian_gradient() -> None:
    norms = []
    for clip_norm in (0.0, 1e-3):
        options: dict[str, Any] = {"optimizer": "cayley_sgd", "optimizer_options": {"momentum": 0.0}, "rates": {}}
        session = Session.start(longer(model="full_urnn", **options, clip_norm=clip_norm))
        before = {name: p.detach().clone() for name, p in session.model.named_parameters()}
        session.advance()
        norms.append(session.window.gradient_norm)
        moved = sum((p.detach() - before[name]).abs().square().sum() for name, p in session.model.named_parameters())
        norms.append(float(moved**0.5) / session.config.lr)
    assert norms[0] == norms[2] > 1e-3
    # in the canonical metric a tangent vector of a square frame has 0.71 of its Frobenius norm
    assert norms[3] == pytest.approx(1e-3, rel=0.5)
    assert norms[3] < 0.5 * norms[1]


def test_an_optimizer_that_would_take_a_frame_off_is_refused_before_the_folder_is_made(tmp_path: Path) -> None:
    for optimizer in ("adam", "sgd"):
        with pytest.raises(OptimizerError, match=r"weight_hh_l0\.stiefel.*--optimizer.*multiplicative_cayley"):
            train.train(longer(model="full_urnn", optimizer=optimizer, rates={}), tmp_path / "run")
    assert not any(tmp_path.iterdir())
    free = {"parametrization": "householder"}
    config = longer(model="full_urnn", options=free, rates={}, steps=1, eval_every=1, log_every=1)
    assert train.train(config, tmp_path / "run").step == 1


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    for changes, near in (({"rates": {"skw": 1e-3}}, "skew"), ({"optimizer_options": {"beta": 1}}, "betas")):
        with pytest.raises((UnknownNameError, OptionError), match=f'did you mean "{near}"'):
            train.train(longer(**changes), tmp_path / "run")
    assert not any(tmp_path.iterdir())


def test_a_config_has_the_fields_of_the_settings_and_what_they_are_for():
    of_config, of_settings = ([field.name for field in dataclasses.fields(cls)] for cls in (Config, Settings))
    assert of_config == ["task", "model", "task_options", *of_settings]

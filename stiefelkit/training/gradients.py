"""Sizes of the gradient of the loss on its way back through time; torch is imported where the command needs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stiefelkit.errors import OptionError, needs
from stiefelkit.figure import Figures, figure, literal
from stiefelkit.files import writable, write_json
from stiefelkit.numbers import integer, validate_fields_
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, create

if TYPE_CHECKING:
    from torch import Tensor, nn

SUBJECT = "The figure of gradients"
"""The first words of error messages."""
DECADES = 30
"""Shown below the largest norm at most: what is smaller is lost."""
LENGTH = 500
"""Steps of a sequence where the task has its length as an option."""


@dataclass(frozen=True)
class GradientPlan:
    """Models to train, and steps after which to look; what is left out comes from the recipe for each model.

    Args:
        task: name of the task; see stiefelkit list.
        T: length of the sequences, for tasks that have it; 500 if left out.
        models: names of models, separated by commas.
        iterations: optimizer steps after which to look, separated by commas; 0 for the initial weights.
        hidden_size: units of the recurrent layer.
        batch_size: sequences per step.
        lr: learning rate.
        clip_norm: gradients are scaled down to at most this norm; 0 switches it off.
        seed: fixes the initial weights and the training data.
        threads: CPU threads.
        device: cpu, cuda, cuda:1, ...
    """

    task: str = "adding"
    T: int | None = None
    models: tuple[str, ...] = ("scornn", "lstm")
    iterations: Annotated[tuple[int, ...], Parameter(name=("--steps", "--iterations"))] = (0, 300)
    hidden_size: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    clip_norm: float | None = None
    seed: int = 0
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        validate_fields_(self)
        needs(bool(self.models and self.iterations), OptionError, SUBJECT, "one model and iteration or more", "none")
        for iteration in self.iterations:
            integer(0).require(SUBJECT, "iterations", iteration)
        self.configs()

    def configs(self) -> dict[str, Config]:
        """Maps a model to the run of its recipe, made as long as the last iteration if it is shorter."""
        fields = ("hidden_size", "batch_size", "lr", "clip_norm", "seed", "threads", "device")
        settings = Settings(**{name: vars(self)[name] for name in fields})
        task = create(self.task, {} if self.T is None else {"T": self.T})
        if self.T is None and "T" in task.options():
            task = create(self.task, {"T": LENGTH})
        configs = {name: Config.resolve(task, name, settings) for name in self.models}
        last = max(self.iterations)
        return {name: dataclasses.replace(config, steps=max(config.steps, last)) for name, config in configs.items()}


@dataclass(frozen=True)
class GradientCurve:
    """The gradients of one model at one moment: for each step t, ||dL/dh_t||_2 averaged over the batch."""

    model: str
    iteration: int
    loss: float
    norms: list[float] = field(repr=False)


def measure(
    plan: GradientPlan,
    out: Path,
    watch: Callable[[str, int, int], None] = lambda words, done, steps: None,
    figures: Figures | None = None,
) -> tuple[list[GradientCurve], list[Path]]:
    """Trains every model, writes `gradients.json` and `gradients.png` into `out`, and returns curves and files.

    `watch` is called with the model's name, the number of steps done, and of all, after each step.
    """
    from stiefelkit.machine import threads
    from stiefelkit.training.session import Session

    configs, curves, iterations = plan.configs(), [], sorted(set(plan.iterations))
    for config in configs.values():
        with config.within_memory():
            config.build_task().batch(0, config.batch_size, config.seed)
    with writable(SUBJECT, out):
        out.mkdir(parents=True, exist_ok=True)
    for config in configs.values():
        with threads(config.threads), config.within_memory():
            session = Session.start(config)
            for iteration in iterations:
                while session.step < iteration:
                    session.advance()
                    watch(config.model, session.step, iterations[-1])
                batch = session.task.batch(session.step, config.batch_size, config.seed)
                x, y = (tensor.to(config.device) for tensor in batch)
                found = gradient_norms(session.model, session.task, x, y)
                curves.append(GradientCurve(config.model, session.step, *found))
    record, figures = out / "gradients.json", figures or Figures()
    runs = {name: dataclasses.asdict(config) for name, config in configs.items()}
    write_json(record, {"runs": runs, "curves": [dataclasses.asdict(curve) for curve in curves]})
    return curves, [record, draw(figures.path(out, "gradients"), plan.task, curves, figures.dpi)]


def gradient_norms(model: nn.Module, task: Task, x: Tensor, y: Tensor) -> tuple[float, list[float]]:
    """Returns the loss of a batch, and how strongly it depends on the hidden state after each step.

    dL/dh_t is the total derivative: h_t acts through all later states, and through the output of its own step where
    that counts. L is the loss of one sequence; the norms are averaged over the sequences. Of an LSTM it is h_t alone,
    with the cell c_t held; of stacked layers the uppermost. Inputs `x` are (B, T, m); the model has a recurrent layer
    `rnn`, batch first, of one direction, and reads nothing but its states: others are an OptionError.
    """
    import torch
    from torch.nn.utils.parametrize import cached

    with _step_by_step(model) as states, cached():
        loss = task.loss(task.answer(model, x), y)
        gradients = torch.autograd.grad(loss, states)
    # squares of float32 numbers underflow from 1e-23 down
    wide = [len(x) * g[-1].to(torch.complex128 if g.is_complex() else torch.float64) for g in gradients]
    return loss.item(), [torch.linalg.vector_norm(g, dim=-1).mean().item() for g in wide]


@contextmanager
def _step_by_step(model: nn.Module) -> Iterator[list[Tensor]]:
    """Runs the model's recurrent layer one step at a time, and gives the list of the states between."""
    import torch

    rnn: Any = getattr(model, "rnn", None)
    fits = isinstance(rnn, torch.nn.Module) and not getattr(rnn, "bidirectional", False)
    needs(fits, OptionError, SUBJECT, "a recurrent layer `rnn` of one direction", f"{type(model).__name__}")
    forward, states = rnn.forward, []

    def unrolled(x: Tensor, last_only: bool = False) -> tuple[Tensor, Any]:
        carried = None
        for step in x.split(1, dim=1):
            out, carried = forward(step, carried)
            states.append(carried[0] if isinstance(carried, tuple) else carried)
            is_read = torch.equal(out[:, -1], states[-1][-1])
            needs(is_read, OptionError, SUBJECT, "outputs that are read from its states", type(model).__name__)
        # read from the states that are kept, so that what is read counts in their gradients
        return torch.stack([h[-1] for h in states], dim=1), carried

    rnn.forward = unrolled
    try:
        yield states
    finally:
        del rnn.forward


def draw(path: Path, task: str, curves: Sequence[GradientCurve], dpi: int = 200) -> Path:
    """Draws norms against steps, a panel for each iteration, on one logarithmic scale."""
    iterations = sorted({curve.iteration for curve in curves})
    positive = [norm for curve in curves for norm in curve.norms if norm > 0]
    with figure(path, len(iterations), dpi) as panels:
        for axes, iteration in zip(panels, iterations, strict=True):
            for curve in (curve for curve in curves if curve.iteration == iteration):
                axes.plot(range(1, len(curve.norms) + 1), curve.norms, marker=".", label=literal(curve.model))
            axes.set(title=f"{literal(task)}, iteration {iteration}", xlabel="step t")
            if positive:
                lowest = max(min(positive), max(positive) * 10.0**-DECADES)
                axes.set(yscale="log", ylim=(lowest / 2, 2 * max(positive)))
        panels[0].set_ylabel(r"$\Vert\partial L / \partial h_t\Vert_2$, mean over the batch")
        panels[-1].legend()
    return path

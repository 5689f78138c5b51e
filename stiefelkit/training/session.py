"""The state that training changes: one step, one evaluation, what a checkpoint holds, what was first to be NaN."""

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit.errors import DivergedError, NonFiniteError
from stiefelkit.machine import peak_memory
from stiefelkit.numbers import above, at_least, integer, validate_fields_
from stiefelkit.optim import clip_grad_norm_
from stiefelkit.training.config import Config
from stiefelkit.training.tasks import Task

Record = dict[str, Any]  # a line of the log


@dataclass
class Window:
    """Sums over the steps since the last line of the log, and the largest norm of a gradient."""

    steps: int = 0
    loss: float = 0.0
    correct: float = 0.0
    gradient_norm: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        sums = dict.fromkeys(("correct", "gradient_norm", "seconds"), at_least(0))
        validate_fields_(self, "A window", steps=integer(0), loss=above(-math.inf), **sums)


@dataclass
class Session:
    """Everything that training changes."""

    config: Config
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    window: Window = field(default_factory=Window)
    epoch_seconds: float = 0.0
    graph: bool = False  # whether steps replay CUDA graphs of the model, forward and backward

    def __post_init__(self) -> None:
        self._batches = self.task.batches_per_epoch(self.config.batch_size)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._answer: Callable[[Tensor], Tensor] | None = None
        self._shape: torch.Size | None = None

    @classmethod
    def start(cls, config: Config) -> "Session":
        """Returns the session at step 0."""
        task = config.build_task()
        model = config.build_model(task)
        return cls(config, task, model, config.build_optimizer(model))

    def advance(self) -> None:
        """Does one optimizer step; raises DivergedError, with nothing changed, if loss or gradients are not finite."""
        started = time.process_time()
        batch = self.task.batch(self.step, self.config.batch_size, self.config.seed)
        x, y = (tensor.to(self.config.device) for tensor in batch)
        random_state, share = torch.get_rng_state(), 1.0
        if self.config.schedule == "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * self.step / self.config.steps))
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        output = self._output(x)
        loss = self.task.loss(output, y)
        value = loss.item()
        if not math.isfinite(value):
            torch.set_rng_state(random_state)
            raise self._stopped(f"the loss is {value}", self._first_bad(x))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        if not _all_finite(gradients):
            # the last layer is the first that the backward pass meets
            named = [name for name, p in self.model.named_parameters() if not _all_finite([p.grad])]
            raise self._stopped("a gradient is not finite", f'the gradient of "{(named or ["a frame"])[-1]}"')
        accuracy = self.task.accuracy(output.detach(), y)
        norm = clip_grad_norm_(self.optimizer, self.config.clip_norm or math.inf)
        self.optimizer.step()
        self.window.steps += 1
        self.window.loss += value
        self.window.correct += 0.0 if accuracy is None else float(accuracy)
        # finite entries may have an infinite norm in float32, and JSON has no word for that
        self.window.gradient_norm = max(self.window.gradient_norm, min(norm.item(), sys.float_info.max))
        seconds = time.process_time() - started
        self.window.seconds += seconds
        self.epoch_seconds += seconds
        self.step += 1

    def _output(self, x: Tensor) -> Tensor:
        """Returns the model's output; on a GPU by graphs of the first batch, for all batches of its shape."""
        if self._shape is None:
            self._shape, self._answer = x.shape, graphed(_Answer(self.task, self.model), x)
            self.graph = self._answer is not None
        if self._answer is not None and x.shape == self._shape:
            return self._answer(x)
        return self.task.answer(self.model, x)

    def train_record(self) -> Record:
        """Returns the line of the log about the steps of the window."""
        from stiefelkit.weights.change import drift_of_maps

        try:
            drifts = drift_of_maps(self.model)
        except NonFiniteError as error:
            raise self._stopped("a weight is not finite", str(error).rstrip(".")) from error
        window = self.window
        record: Record = {"kind": "train", "step": self.step, "loss": window.loss / window.steps}
        if "accuracy" in self.task.scores:
            record["accuracy"] = window.correct / window.steps
        errors = {name: {"error": float(each.error), "limit": float(each.limit)} for name, each in drifts.items()}
        record |= {"gradient_norm": window.gradient_norm, "orthogonality": errors}
        record["ms_per_step"] = round(1e3 * window.seconds / window.steps, 3)
        return record | {"graph": True} if self.graph else record

    def test_records(self) -> Iterator[Record]:
        """Gives the lines of the log for an evaluation, held out and set apart."""
        for kind, examples in (("test", self.task.held_out()), ("validation", self.task.validation())):
            if examples is not None:
                scores = self.task.evaluate(self.model, examples=examples)
                if not math.isfinite(scores["loss"]):
                    x = examples[0][:500].to(self.config.device)
                    raise self._stopped(f"the {kind} loss is {scores['loss']}", self._first_bad(x))
                yield {"kind": kind, "step": self.step, **scores}

    def _first_bad(self, x: Tensor) -> str:
        return first_bad_output(self.model, lambda: self.task.answer(self.model, x)) or "the loss itself"

    def epoch_records(self) -> Iterator[Record]:
        """Gives the line of the log for an epoch of the training data that ends here; none where each step is one."""
        epoch, rest = divmod(self.step, self._batches)
        if self._batches > 1 and rest == 0:
            record = {"kind": "epoch", "step": self.step, "epoch": epoch, "cpu_seconds": round(self.epoch_seconds, 3)}
            self.epoch_seconds = 0.0
            yield record | peak_memory(self.config.device)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds; raises DivergedError if a weight is not finite."""
        bad = first_bad_output(self.model, lambda: None)
        if bad:
            raise self._stopped("a weight is not finite", bad)
        state: dict[str, Any] = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "rng": {"cpu": torch.get_rng_state()},
            "window": dict(vars(self.window)),
            "epoch": {"cpu_seconds": self.epoch_seconds},
        }
        if torch.device(self.config.device).type == "cuda":
            state["rng"]["cuda"] = torch.cuda.get_rng_state(self.config.device)
        return state

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Goes back to the state of a checkpoint."""
        self.step = step
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["cpu"])
        if "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"], self.config.device)
        self.window = Window(**state["window"])
        self.epoch_seconds = state.get("epoch", {}).get("cpu_seconds", 0.0)

    def _stopped(self, what: str, culprit: str) -> DivergedError:
        found = f"{what} at step {self.step}"
        remedy = "start a new run with a smaller --lr, or with --clip-norm 1"
        words = f"Training needs finite numbers, but {found}, where the first to fail is {culprit}; {remedy}"
        return DivergedError(words, found)


class _Answer(nn.Module):
    """The model as a task asks it, a function of the batch alone, which graphs can be made of."""

    def __init__(self, task: Task, model: nn.Module):
        super().__init__()
        self.task, self.model = task, model

    def forward(self, x: Tensor) -> Tensor:
        return self.task.answer(self.model, x)


def graphed(answer: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Returns a module by CUDA graphs of a batch; None without CUDA, or, with a warning, where none can be captured."""
    if x.device.type != "cuda":
        return None
    try:
        with torch.random.fork_rng([x.device], device_type="cuda"):
            made: Any = torch.cuda.make_graphed_callables(answer, (x.clone(),), allow_unused_input=True)
        return made
    except RuntimeError as error:
        warnings.warn(f"Training goes on without CUDA graphs: {str(error).partition(chr(10))[0]}", stacklevel=2)
        return None


def _all_finite(tensors: Iterable[Tensor | None]) -> bool:
    found = [tensor.isfinite().all() for tensor in tensors if tensor is not None]
    return not found or bool(torch.stack(found).all())


def first_bad_output(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Names the first parameter, or else output of a module when `forward` calls the model, that is not finite."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f'the parameter "{name}"'
    culprits: list[str] = []
    with torch.no_grad(), ExitStack() as hooks:
        for name, module in model.named_modules():

            def look(module: nn.Module, inputs: object, output: object, name: str = name) -> None:
                outputs = output if isinstance(output, tuple) else (output,)
                if not _all_finite(each for each in outputs if isinstance(each, Tensor)):
                    culprits.append(f'the output of "{name or type(module).__name__}"')

            hooks.enter_context(module.register_forward_hook(look))
        forward()
    return culprits[0] if culprits else None

"""The laws of a model, ours or another's."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stiefelkit import models
from stiefelkit.optim.cayley_sgd import CayleySGD
from stiefelkit.optim.groups import parameter_groups
from stiefelkit.testing import seeds
from stiefelkit.testing.failure import NamedCase, check_laws, laws_of, named
from stiefelkit.testing.require import require, require_within, saved_and_loaded
from stiefelkit.weights.change import drift
from stiefelkit.weights.find import orthogonal_weights

INPUT, HIDDEN, OUTPUT = 3, 8, 2
BATCH, STEPS = 4, 6
CLOSE = 1e-5
"""What two roads to one output in float32 may differ by, over the largest output."""


@dataclass(frozen=True)
class _Case(NamedCase):
    """A model by its name, with options, at small sizes."""

    def build(self, seed: int = 0) -> Any:
        seeds.reseed(seed)
        return models.create(self.name, INPUT, HIDDEN, OUTPUT, **copy.deepcopy(dict(self.options)))

    def at_rest(self, seed: int = 0) -> Any:
        return self.build(seed).eval()

    def sequences(self, batch: int = BATCH, steps: int = STEPS) -> Tensor:
        return torch.randn(batch, steps, INPUT, generator=seeds.generator(1))

    def details(self) -> str:
        """Returns what the model is built with, and what it reads."""
        read = f"x {(BATCH, STEPS, INPUT)} in torch.float32"
        return f"options {dict(self.options)}, {read}, {HIDDEN} units, {OUTPUT} outputs"


def _require_near(a: Tensor, b: Tensor, what: str, tolerance: float = CLOSE) -> None:
    off = (a - b).abs().max().item()
    require_within(off, tolerance * max(1.0, b.abs().max().item()), f"{what} is off by")


@torch.no_grad()
def law_outputs(case: _Case) -> None:
    """(B, T, m) goes to (B, T, p) in its dtype, and with `last_only` to (B, p): the last step, if it reads one way."""
    model = case.at_rest()
    for batch, steps in ((BATCH, STEPS), (1, 1), (2, 17)):
        x = case.sequences(batch, steps)
        out, last = model(x), model(x, last_only=True)
        for found, shape, what in ((out, (batch, steps, OUTPUT), "all steps"), (last, (batch, OUTPUT), "the last")):
            require(tuple(found.shape) == shape, f"{what} of x {tuple(x.shape)} are {tuple(found.shape)}, not {shape}")
            require(found.dtype == x.dtype, f"{what} are {found.dtype}, for x in {x.dtype}")
            require(bool(torch.isfinite(found).all()), f"{what} of x {tuple(x.shape)} are not finite")
        if not case.options.get("bidirectional"):
            _require_near(last, out[:, -1], f"the last of {steps} steps")


@torch.no_grad()
def law_pure(case: _Case) -> None:
    """In evaluation mode the same sequences give the same bits, whatever came between, and stay as they are."""
    model, x = case.at_rest(), case.sequences()
    before, first = x.clone(), model(x)
    model(2 * x)
    again = model(x)
    off = (again - first).abs().max().item()
    require(torch.equal(first, again), f"two calls differ by {off:.3g}", off, 0.0)
    require(torch.equal(x, before), "it writes to its input")


@torch.no_grad()
def law_batch(case: _Case) -> None:
    """Each sequence alone gives what it gives in a batch."""
    model, x = case.at_rest(), case.sequences()
    together = model(x)
    for i in range(BATCH):
        _require_near(model(x[i : i + 1])[0], together[i], f"sequence {i} alone")


@torch.no_grad()
def law_causal(case: _Case) -> None:
    """No output knows of later inputs, unless the model reads both ways."""
    if case.options.get("bidirectional"):
        return
    model, x = case.at_rest(), case.sequences()
    later = x.clone()
    later[:, STEPS // 2 :] += 1
    _require_near(model(later)[:, : STEPS // 2], model(x)[:, : STEPS // 2], "what comes before a change of x")


def law_gradients(case: _Case) -> None:
    """Parameters that are trained have finite gradients, and so have the inputs, the first ones at the last step."""
    model, x = case.build(), case.sequences().requires_grad_()
    model(x)[:, -1].square().sum().backward()
    require(x.grad is not None and bool(x.grad[:, 0].any()), "the last output does not depend on the first input")
    for name, parameter in [*model.named_parameters(), ("x", x)]:
        if parameter.requires_grad:
            g: Any = parameter.grad
            require(g is not None, f"{name} has no gradient")
            require(bool(torch.isfinite(g).all()), f"{name} has a gradient that is not finite")


def law_seeds(case: _Case) -> None:
    """Initial weights follow torch's generator, and another seed has others."""
    first, again, other = (dict(case.build(seed).state_dict()) for seed in (0, 0, 1))
    require(first.keys() == again.keys() and _same(first, again), "one seed gives two models")
    require(not _same(first, other), "two seeds give one model")


@torch.no_grad()
def law_checkpoint(case: _Case) -> None:
    """A state dict, saved and loaded, and a copy bring back the same bits."""
    model, x = case.at_rest(), case.sequences()
    out, other = model(x), case.at_rest(1)
    other.load_state_dict(saved_and_loaded(model.state_dict()))
    require(torch.equal(other(x), out), "loading a state dict changes the outputs")
    require(torch.equal(copy.deepcopy(model)(x), out), "deepcopy changes the outputs")


def law_frames(case: _Case) -> None:
    """Steps of an optimizer change the outputs, and leave exact weights orthogonal."""
    model, x = case.build(), case.sequences()
    groups = parameter_groups(model, lr=0.01)
    has_frames = any(group.get("manifold") for group in groups)
    optimizer = (CayleySGD if has_frames else torch.optim.SGD)(groups)
    before = model.eval()(x).detach().clone()
    model.train()
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    require(not torch.equal(model.eval()(x), before), "four steps change nothing")
    exact = {weight.qualified for weight in orthogonal_weights(model) if weight.coordinate_list.param.traits.exact}
    for name, found in drift(model).items():
        if name in exact:
            require_within(found.error, 1.2 * found.limit + torch.finfo(torch.float32).eps, f"{name}: ||W^H W - I||_F")


@torch.no_grad()
def law_precision(case: _Case) -> None:
    """In float64, by `.double()`, it is the same model."""
    model, x = case.at_rest(), case.sequences()
    out = model(x)
    wide = model.double()(x.double())
    require(wide.dtype == torch.float64, f"after .double() outputs are {wide.dtype}")
    _require_near(out.double(), wide, "the model in float32", 1e-3)


MODEL_LAWS: dict[str, Callable[[Any], None]] = named(laws_of(__name__))
"""Name to law of models."""


def check_model(
    name: str,
    laws: Iterable[str] = tuple(MODEL_LAWS),
    *,
    options: Mapping[str, Any] | None = None,
    offset: int | None = None,
) -> None:
    """Checks a registered model against laws of `MODEL_LAWS`, with 3 inputs, 8 units and 2 outputs.

    Args:
        name: the model.
        laws: names in `MODEL_LAWS`, all by default.
        options: what `stiefelkit.models.create` takes beside the sizes.
        offset: shifts every seed; what `STIEFELKIT_SEED_OFFSET` says by default.

    Raises:
        LawBroken: lists every failure: the law, the model, shapes, figure and bound, seed, and a line that repeats it.
        UnknownNameError: no model or law has such a name.
        OptionError: it is no model, or has no such option.
    """
    case = _Case(name, dict(options or {}))
    laws = check_laws(laws, MODEL_LAWS, " of models")
    with seeds.shifted(offset), torch.random.fork_rng(devices=[]):
        case.build()
    case.settle("check_model", MODEL_LAWS, laws, offset)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(torch.equal(value, other[key]) for key, value in one.items() if isinstance(value, Tensor))

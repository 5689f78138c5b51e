"""Tables of the registered names, and a page about one of them, for `stiefelkit list`."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from stiefelkit import models
from stiefelkit.cli.words import entries, sections
from stiefelkit.contract import table
from stiefelkit.contract.param import OrthogonalParam, Traits
from stiefelkit.errors import StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.optim import minimizers, optimizers
from stiefelkit.registry import Registry, code_of_others
from stiefelkit.scan import activations
from stiefelkit.training import tasks
from stiefelkit.training.config import HANDLED

__all__ = ["in_short", "kinds", "show", "tables"]

FIELDS = {"real": torch.float32, "complex": torch.complex64}
SIZE = 8
"""Rows of the frames that are looked at."""
Rows = list[tuple[str, str]]


def tables() -> dict[str, Registry]:
    """Returns the registries, by kind."""
    return {
        "parametrization": table.registered,
        "optimizer": optimizers,
        "minimizer": minimizers,
        "activation": activations._activations,
        "model": models._models,
        "task": tasks.tasks,
    }


def kinds() -> dict[str, dict[str, Any]]:
    """Returns name to object, by kind; what cannot be used is warned about and left out."""
    return {kind: table.available() for kind, table in tables().items()}


def in_short(kind: str, target: Any) -> list[str]:
    """Returns the cells of a row between the name and where it comes from."""
    if kind == "optimizer":
        return [moved_by(target)]
    line = (sections(target.__doc__ or "")[""] or [""])[0].removeprefix("Builds ").removesuffix(".")
    if kind == "parametrization":
        return [line, *_image_and_cost(target)]
    return [line, states_of(target)] if kind == "activation" else [line]


def instances(cls: type[OrthogonalParam], p: int = SIZE) -> dict[str, OrthogonalParam]:
    """Returns "real" and "complex" to a map of 8 x p frames, for those that the class does."""
    maps = {}
    for field, dtype in FIELDS.items():
        if cls.supports((SIZE, p), dtype) is not None:
            continue
        with contextlib.suppress(StiefelkitError):
            maps[field] = cls((SIZE, p), dtype=dtype)
    return maps


def cost_of(traits: Traits) -> str:
    """Returns how the time of a square map grows."""
    return f"n^{traits.cost_exponent:g}"


def image_of(traits: Traits) -> str:
    """Returns in words which frames a map reaches."""
    if not traits.exact:
        image = "near-orthogonal"
    elif traits.onto:
        image = "every frame"
    else:
        image = "rotations only, det 1" if traits.component == "rotations" else "part of the frames"
    return image if traits.invertible else f"{image}, none assignable"


def states_of(activation: Any) -> str:
    """Returns in words which states an activation takes."""
    return "real" if activation.of_complex() is None else "real, complex"


def moved_by(optimizer: Any) -> str:
    """Returns in words which parameters an optimizer takes."""
    if not getattr(optimizer, "moves_frames", False):
        return "all parameters but frames"
    plain = getattr(optimizer, "plain", None)
    return "frames" if plain is None else f"frames, and all other parameters as {plain.__name__} does"


def _image_and_cost(cls: type[OrthogonalParam]) -> list[str]:
    fields: dict[str, list[str]] = {}
    maps = instances(cls) or instances(cls, SIZE // 2)
    for field, param in maps.items():
        fields.setdefault(image_of(param.traits), []).append(field)
    costs = {cost_of(param.traits): None for param in maps.values()}
    return ["\n".join(f"{', '.join(names)}: {image}" for image, names in fields.items()), ", ".join(costs)]


def show(name: str, console: Console) -> None:
    """Prints what is known of a name, once for each kind that has it.

    Raises:
        UnknownNameError: none has.
    """
    registered = kinds()
    targets = {kind: objects[name] for kind, objects in registered.items() if name in objects}
    if not targets:
        raise UnknownNameError(f"Nothing is named {name!r}{did_you_mean(name, set().union(*registered.values()))}")
    for kind, target in targets.items():
        with code_of_others(f"The {kind} {name!r} needs code that runs", StiefelkitError):
            _print(name, kind, target, console)


def _print(name: str, kind: str, target: Any, console: Console) -> None:
    paragraphs = sections("" if target.__module__.startswith("torch.") else target.__doc__ or "")
    words = entries(paragraphs.get("Args", ()))
    facts, options = _SECTIONS[kind](name, target)
    facts.append(("from", tables()[kind].origin(name) or "what was registered in this process"))
    console.print(f"{name}: {'an' if kind[0] in 'aeiou' else 'a'} {kind}", style="bold")
    for paragraph in paragraphs[""]:
        console.print()
        console.print(paragraph)
    _print_rows("", facts, console)
    rows = [(option, f"{words.get(option, '')} {default}".strip()) for option, default in options]
    rows += [(rest, words[rest]) for rest in words if rest.startswith("**")]
    _print_rows("Options", rows, console)
    _print_rows("References", [("", entry) for entry in paragraphs.get("References", ())], console)


def _print_rows(title: str, rows: Rows, console: Console) -> None:
    if not rows:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    if any(left for left, _ in rows):
        table.add_column(no_wrap=True, style="bold")
    for left, right in rows:
        table.add_row(*([left] if left else []), right)
    console.print()
    if title:
        console.print(title, style="bold")
    console.print(Padding(table, (0, 0, 0, 2)))


def _defaults(parameters: Iterable[inspect.Parameter], left_out: Iterable[str]) -> Rows:
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in left_out]
    return [(p.name, "" if p.default is p.empty else f"[default: {p.default}]") for p in named]


def _of_parametrization(name: str, cls: Any) -> tuple[Rows, Rows]:
    square, tall = instances(cls), instances(cls, SIZE // 2)
    facts = [("shapes", "n x p with n >= p, and wider ones by their adjoint" if tall else "n x n")]
    for field, param in square.items():
        sizes = ", ".join(f"{key} {_size(shape)}" for key, shape in param.coordinates.items())
        facts.append((field, f"{image_of(param.traits)}; coordinates of {SIZE} x {SIZE}: {sizes}"))
    first = next(iter({**square, **tall}.values()), None)
    if first is not None:
        facts.append(("cost", cost_of(first.traits)))
        facts.append(("init", ", ".join(first.schemes)))
        if first.manifolds:
            movers = [key for key, mover in optimizers.available().items() if getattr(mover, "moves_frames", False)]
            facts.append(("optimizers", f"those that move frames: {', '.join(movers)}"))
    facts.append(("precision", ", ".join(cls.precisions)))
    facts.append(("use", f'sk.orthogonal(layer, "weight", "{name}")'))
    left_out = ("self", "shape", "dtype", "device")
    return facts, _defaults(inspect.signature(cls.__init__).parameters.values(), left_out)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _of_optimizer(name: str, cls: Any) -> tuple[Rows, Rows]:
    facts = [("moves", moved_by(cls)), ("class", f"{cls.__module__}.{cls.__qualname__}")]
    facts.append(("use", f"--optimizer {name} --lr 1e-3 --optimizer-options.NAME VALUE"))
    return facts, _defaults(inspect.signature(cls).parameters.values(), {*HANDLED} - {"lr"})


def _of_minimizer(name: str, cls: Any) -> tuple[Rows, Rows]:
    facts = [("use", f'sk.optim.minimize(f, x0, method="{name}"), or sk.optim.{cls.__name__} and a closure')]
    return facts, _defaults(inspect.signature(cls).parameters.values(), ("params",))


def _of_activation(name: str, cls: Any) -> tuple[Rows, Rows]:
    facts = [("states", states_of(cls)), ("bias", "inside" if cls.bias_inside else "added to z")]
    facts.append(("kernels", "a program of triton" if cls.kernel else "none of triton, all other backends"))
    slope = "" if cls.default_slope is None else f", or with a number as in {name}(0.2)"
    facts.append(("use", f'sk.nn.OrthogonalRNN(3, 8, activation="{name}"){slope}'))
    return facts, []


def _of_model(name: str, build: Any) -> tuple[Rows, Rows]:
    parameters = inspect.signature(build).parameters
    defaults = _defaults(parameters.values(), list(parameters)[:3])
    inherited = [option for option in models.known_options(build, {})[0] if option not in dict(defaults)]
    default = getattr(parameters.get("parametrization"), "default", None)
    facts = [("use", f'sk.models.create("{name}", input_size, hidden_size, output_size), or --model {name}')]
    if inherited:
        whose = f" (stiefelkit list {default})" if isinstance(default, str) else ""
        facts.append(("also", f"{', '.join(inherited)}{whose}"))
    return facts, defaults


def _of_task(name: str, cls: Any) -> tuple[Rows, Rows]:
    baseline = ", ".join(f"{key} {value:.4f}" for key, value in cls().known_baseline.items())
    facts = [("baseline", baseline or "that of the data, which are not at hand"), ("recipes", ", ".join(cls.recipes))]
    facts.append(("use", f"stiefelkit train {name} --model NAME; its --help shows the recipes"))
    fields = dataclasses.fields(cls)
    return facts, [(field.name, f"[default: {field.default}]") for field in fields]


_SECTIONS = {
    "parametrization": _of_parametrization,
    "optimizer": _of_optimizer,
    "minimizer": _of_minimizer,
    "activation": _of_activation,
    "model": _of_model,
    "task": _of_task,
}

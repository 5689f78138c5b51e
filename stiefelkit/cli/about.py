"""`stiefelkit list [NAME]`: tables of the registered names, and a page about one of them."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Column, Table

from stiefelkit.cli.options import entries, options, sections
from stiefelkit.errors import StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.optim import minimizers, optimizers
from stiefelkit.registry import Registry, code_of_others
from stiefelkit.training import tasks
from stiefelkit.training.checks import listed
from stiefelkit.training.config import HANDLED
from stiefelkit.training.display import Screen

if TYPE_CHECKING:
    from stiefelkit.contract.param import OrthogonalParam, Traits

SIZE = 8
"""Rows of the frames that are looked at."""
COLUMNS = {
    "parametrization": ("map", "image", "cost"),
    "optimizer": ("moves",),
    "activation": ("what it is", "states"),
    "decoder": ("base models",),
}
COST = "cost: an n x n frame by the default options, up to log n; k < n reflections or layers: n^2 k"
FEW, WIDE = 4, 100
"""Columns of text beside which that of origins is narrow, on terminals narrower than this."""
Rows = list[tuple[str, str]]


@options()
def show(name: str | None = None, /) -> int:
    """Shows all that has a name, plugins included, and where it comes from.

    Args:
        name: one of them, to describe with its options, shapes, image, cost and reference.
    """
    console = Screen()
    if name is not None:
        _show(name, console)
        return 0
    for kind, registry in tables().items():
        rows = registry.map(lambda name, target, kind=kind: _in_short(kind, target))
        columns = [Column(title, overflow="fold") for title in (*COLUMNS.get(kind, ("what it is",)), "from")]
        caption = COST if kind == "parametrization" else None
        table = Table(Column(kind, no_wrap=True), *columns, title=f"{kind.capitalize()}s", caption=caption)
        if len(table.columns) > FEW and console.width < WIDE:
            table.columns[-1].max_width = 10
        for name, cells in rows.items():
            table.add_row(name, *cells, registry.origin(name) or "this process")
        console.print(table)
    console.print("stiefelkit list NAME describes one of them.")
    return 0


def tables() -> dict[str, Registry]:
    """Returns the registries, by kind."""
    from stiefelkit import models
    from stiefelkit.contract import table
    from stiefelkit.nn.decoders import decoders
    from stiefelkit.scan import activations

    nets = activations._activations, models._models, decoders
    return {known.kind: known for known in (table.registered, optimizers, minimizers, *nets, tasks.tasks)}


def kinds() -> dict[str, dict[str, Any]]:
    """Returns name to object, by kind; what cannot be used is warned about and left out."""
    return {kind: table.available() for kind, table in tables().items()}


def _in_short(kind: str, target: Any) -> list[str]:
    """Returns the cells of a row between the name and where it comes from."""
    if kind == "optimizer":
        return [_moved_by(target)]
    if kind == "decoder":
        return [", ".join(target.classes)]
    line = (sections(target.__doc__ or "")[""] or [""])[0].removeprefix("Builds ").removesuffix(".")
    if kind == "parametrization":
        fields: dict[str, list[str]] = {}
        maps = _instances(target) or _instances(target, SIZE // 2)
        for field, param in maps.items():
            fields.setdefault(_image_of(param.traits), []).append(field)
        costs = dict.fromkeys(_cost_of(param.traits) for param in maps.values())
        return [line, "\n".join(f"{', '.join(names)}: {image}" for image, names in fields.items()), ", ".join(costs)]
    return [line, _states_of(target)] if kind == "activation" else [line]


def _instances(cls: "type[OrthogonalParam]", p: int = SIZE) -> "dict[str, OrthogonalParam]":
    """Returns "real" and "complex" to a map of 8 x p frames, for those that the class does."""
    import torch

    maps = {}
    for field, dtype in (("real", torch.float32), ("complex", torch.complex64)):
        if cls.supports((SIZE, p), dtype) is None:
            with contextlib.suppress(StiefelkitError):
                maps[field] = cls((SIZE, p), dtype=dtype)
    return maps


def _cost_of(traits: "Traits") -> str:
    return f"n^{traits.cost_exponent:g}"


def _image_of(traits: "Traits") -> str:
    if not traits.exact:
        image = "near-orthogonal"
    elif traits.onto:
        image = "every frame"
    else:
        image = "rotations only, det 1" if traits.component == "rotations" else "part of the frames"
    return image if traits.invertible else f"{image}, none assignable"


def _states_of(activation: Any) -> str:
    return "real" if activation.of_complex() is None else "real, complex"


def _moved_by(optimizer: Any) -> str:
    """Returns in words which parameters an optimizer takes."""
    if not getattr(optimizer, "moves_frames", False):
        return "all parameters but frames"
    plain = getattr(optimizer, "plain", None)
    return "frames" if plain is None else f"frames, and all other parameters as {plain.__name__} does"


def _show(name: str, console: Screen) -> None:
    """Prints what is known of a name, once for each kind that has it."""
    registered = kinds()
    targets = {kind: objects[name] for kind, objects in registered.items() if name in objects}
    if not targets:
        raise UnknownNameError(f"Nothing is named {name!r}{did_you_mean(name, set().union(*registered.values()))}")
    for kind, target in targets.items():
        with code_of_others(f"The {kind} {name!r} needs code that runs", StiefelkitError):
            facts, options = FACTS[kind](name, target)
        _print(name, kind, target, facts, options, console)


def _print(name: str, kind: str, target: Any, facts: Rows, options: Rows, console: Screen) -> None:
    paragraphs = sections("" if target.__module__.startswith("torch.") else target.__doc__ or "")
    words = entries(paragraphs.get("Args", ()))
    facts.append(("from", tables()[kind].origin(name) or "what was registered in this process"))
    console.print(f"{name}: {'an' if kind[0] in 'aeiou' else 'a'} {kind}", style="bold")
    for paragraph in paragraphs[""]:
        console.print()
        console.print(paragraph)
    rows = [(option, f"{words.get(option, '')} {default}".strip()) for option, default in options]
    rows += [(rest, words[rest]) for rest in words if rest.startswith("**")]
    references = [("", entry) for entry in paragraphs.get("References", ())]
    for title, lines in (("", facts), ("Options", rows), ("References", references)):
        if lines:
            table = Table.grid(padding=(0, 2, 0, 0))
            if any(left for left, _ in lines):
                table.add_column(no_wrap=True, style="bold")
            for left, right in lines:
                table.add_row(*([left] if left else []), right)
            console.print()
            if title:
                console.print(title, style="bold")
            console.print(Padding(table, (0, 0, 0, 2)))


def _defaults(function: Any, left_out: Iterable[str]) -> Rows:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in left_out]
    return [(p.name, "" if p.default is p.empty else f"[default: {listed(p.default)}]") for p in named]


def _of_parametrization(name: str, cls: Any) -> tuple[Rows, Rows]:
    square, tall = _instances(cls), _instances(cls, SIZE // 2)
    facts = [("shapes", "n x p with n >= p, and wider ones by their adjoint" if tall else "n x n")]
    for field, param in square.items():
        sizes = ", ".join(f"{key} {' x '.join(map(str, shape))}" for key, shape in param.coordinates.items())
        facts.append((field, f"{_image_of(param.traits)}; coordinates of {SIZE} x {SIZE}: {sizes}"))
    for first in [*square.values(), *tall.values()][:1]:
        facts.append(("cost", f"{_cost_of(first.traits)} for an n x n frame, by these defaults"))
        facts.append(("init", ", ".join(first.schemes)))
        if first.manifolds:
            movers = [key for key, mover in optimizers.available().items() if getattr(mover, "moves_frames", False)]
            facts.append(("optimizers", f"those that move frames: {', '.join(movers)}"))
    facts.append(("precision", ", ".join(cls.precisions)))
    facts.append(("use", f'sk.orthogonal(layer, "weight", "{name}")'))
    return facts, _defaults(cls.__init__, ("self", "shape", "dtype", "device"))


def _of_optimizer(name: str, cls: Any) -> tuple[Rows, Rows]:
    facts = [("moves", _moved_by(cls)), ("class", f"{cls.__module__}.{cls.__qualname__}")]
    facts.append(("use", f"--optimizer {name} --lr 1e-3 --optimizer-options.NAME VALUE"))
    return facts, _defaults(cls, {*HANDLED} - {"lr"})


def _of_minimizer(name: str, cls: Any) -> tuple[Rows, Rows]:
    facts = [("use", f'sk.optim.minimize(f, x0, method="{name}"), or sk.optim.{cls.__name__} and a closure')]
    return facts, _defaults(cls, ("params",))


def _of_activation(name: str, cls: Any) -> tuple[Rows, Rows]:
    facts = [("states", _states_of(cls)), ("bias", "inside" if cls.bias_inside else "added to z")]
    facts.append(("kernels", "a program of triton" if cls.kernel else "none of triton, all other backends"))
    slope = "" if cls.default_slope is None else f", or with a number as in {name}(0.2)"
    facts.append(("use", f'sk.nn.OrthogonalRNN(3, 8, activation="{name}"){slope}'))
    return facts, []


def _of_model(name: str, build: Any) -> tuple[Rows, Rows]:
    from stiefelkit import models

    parameters = inspect.signature(build).parameters
    defaults = _defaults(build, list(parameters)[:3])
    inherited = [option for option in models.known_options(build, {})[0] if option not in dict(defaults)]
    default = getattr(parameters.get("parametrization"), "default", None)
    facts = [("use", f'sk.models.create("{name}", input_size, hidden_size, output_size), or --model {name}')]
    if inherited:
        whose = f" (stiefelkit list {default})" if isinstance(default, str) else ""
        facts.append(("also", f"{', '.join(inherited)}{whose}"))
    return facts, defaults


def _of_task(name: str, cls: Any) -> tuple[Rows, Rows]:
    baseline = ", ".join(f"{key} {value:.4f}" for key, value in cls().known_baseline.items())
    facts = [("baseline", baseline or "unknown without the data"), ("recipes", ", ".join(cls.recipes))]
    facts.append(("use", f"stiefelkit train {name} --model NAME; its --help shows the recipes"))
    return facts, [(field.name, f"[default: {field.default}]") for field in dataclasses.fields(cls)]


def _of_decoder(name: str, family: Any) -> tuple[Rows, Rows]:
    facts = [(field.name, getattr(family, field.name)) for field in dataclasses.fields(family)]
    use = [("use", "sk.nn.rotation_sites(model), sk.nn.rotate_, sk.nn.rotated")]
    return [(key, value if isinstance(value, str) else ", ".join(value)) for key, value in facts] + use, []


FACTS = {
    "parametrization": _of_parametrization,
    "optimizer": _of_optimizer,
    "minimizer": _of_minimizer,
    "activation": _of_activation,
    "model": _of_model,
    "decoder": _of_decoder,
    "task": _of_task,
}
"""Kind to what finds the facts about a name, and its options with their defaults."""

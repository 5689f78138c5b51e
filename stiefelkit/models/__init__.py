"""The papers' recurrent systems, one a file: a page of choices each, no mathematics."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from stiefelkit.contract.table import find_parametrization, option_names, registered
from stiefelkit.errors import OptionError, did_you_mean, needs, shown, suggest_names
from stiefelkit.models.gates import FrameGates
from stiefelkit.models.sequence import SequenceModel, count_parameters
from stiefelkit.numbers import as_python_number, integer
from stiefelkit.registry import Registry

__all__ = ["FrameGates", "SequenceModel", "available", "count_parameters", "create", "names", "register"]
suggest_names(__name__)

SIZES = ("input_size", "hidden_size", "output_size")


def _check(factory: object) -> None:
    first = tuple(inspect.signature(factory).parameters)[: len(SIZES)] if callable(factory) else ()
    needs(first == SIZES, OptionError, "A model", f"a function of {', '.join(SIZES)}", shown(factory))


_PAPERS = (
    "eurnn exprnn full_urnn goru gru henaff_rnn irnn lie_urnn lru lstm margin_rnn ornn reflector restricted_urnn rotrnn"
)
_BUILT_IN = {name: f"stiefelkit.models.{name}:{name}" for name in f"{_PAPERS} scornn scurnn".split()}
_models = Registry("stiefelkit.models", "model", _BUILT_IN, _check)


def create(name: str, input_size: int, hidden_size: int, output_size: int, **options: Any) -> nn.Module:
    """Builds a model by name.

    Args:
        name: one of `names()`.
        input_size: width m of the input.
        hidden_size: width n of the state, which may be complex.
        output_size: width p of the output.
        **options: the model's own, such as `activation=` and `parametrization=`, any for its field of numbers,
            `backend=` and `factored=`, and those of its parametrization, such as `negative=` for "scornn";
            `parametrization="none"` is None, a free matrix.
            `num_layers=`, `dropout=` between them and `bidirectional=` as in torch.nn.RNN: the papers have one layer
            of one direction, and each further one starts as theirs does.

    Returns:
        A module that maps (B, T, input_size), the batch first, unlike a layer on its own, to (B, T, output_size), or to
        (B, output_size) with `last_only=True`.

    >>> net = create("scornn", 1, 8, 10, negative=4)
    >>> import torch
    >>> net(torch.zeros(2, 5, 1), last_only=True).shape
    torch.Size([2, 10])
    """
    build: Callable[..., nn.Module] = _models.find(name)
    given = zip(SIZES, (input_size, hidden_size, output_size), strict=True)
    sizes = {key: integer(1).require(name, key, value) for key, value in given}
    options = as_python_number(options)
    if options.get("parametrization") == "none":  # the command line has no None
        options["parametrization"] = None
    got = f"batch_first={shown(options.get('batch_first'))}"
    needs("batch_first" not in options, OptionError, name, "no batch_first=: it reads (batch, time, features)", got)
    known, which = known_options(build, options)
    for key in options:
        if key not in known or key in sizes:
            is_fixed = key in ("activation", "nonlinearity") and "activation" not in known
            why = ": its activations are part of the model." if is_fixed else did_you_mean(key, known)
            raise OptionError(f"{name}{which} has no option {key!r}{why}")
    return build(**sizes, **options)


def known_options(build: Callable[..., nn.Module], options: dict[str, Any]) -> tuple[list[str], str]:
    """Returns the options of a model beside the sizes, its parametrization's included, and which one that is."""
    parameters = list(inspect.signature(build).parameters.values())[3:]
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    takes_more = len(known) < len(parameters)
    if not takes_more or "parametrization" not in known:
        return known, ""
    known += ["num_layers", "bidirectional", "dropout"]
    known += ["backend", "factored"] if "activation" in known else []  # of our own layers
    default = next(p.default for p in parameters if p.name == "parametrization")
    chosen = options.get("parametrization", default)
    known += ["init", "generator"]
    if chosen is None:
        return known, " without a parametrization"
    cls = find_parametrization(chosen)
    return [*known, "gain", *option_names(cls)], f" with {registered.name_of(cls) or cls.__name__}"


def names() -> list[str]:
    """Returns the name of every model."""
    return _models.names()


def available() -> dict[str, Callable[..., nn.Module]]:
    """Returns name to factory of every model: built-ins, installed plugins and registered ones."""
    return _models.available()


def register(name: str, factory: Callable[..., nn.Module] | str) -> None:
    """Adds a name and a factory (input_size, hidden_size, output_size, **options), or its "package.module:function"."""
    if not isinstance(factory, str):
        _models.check(factory)
    _models.register(name, factory)

"""Settings of optimizers of frames as data: what may be given, what it must be, and the words that tell."""

import inspect
import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stiefelkit.errors import OptionError
from stiefelkit.functional._reads import reads_are_free

__all__ = [
    "BETAS",
    "BOUNDED",
    "FINITE",
    "OF_PLAIN",
    "OF_TORCH",
    "PRECISIONS",
    "RATE",
    "SHARED",
    "SWITCH",
    "WEIGHT_DECAY",
    "Check",
    "Setting",
    "at_least",
    "is_number",
    "one_of",
    "signature",
    "told",
    "whole",
]

PRECISIONS = ("exact", "fast")
"""What `precision` may be."""
OF_PLAIN = "of the groups without a manifold."
"""Words of a setting that the torch optimizer of those groups has."""


@dataclass(frozen=True)
class Check:
    """What a setting must be: in words that go after "needs", with {key} for its name, and as a test of values."""

    words: str
    holds: Callable[[Any], bool]

    def require(self, who: str, key: str, value: Any) -> None:
        """Raises OptionError unless a value is such."""
        if not self.holds(value):
            raise OptionError(f"{who} needs {self.words.format(key=key)}, got {value!r:.80}.")


@dataclass(frozen=True)
class Setting:
    """One setting of an optimizer, of which each group may have another value; words tell of it in help texts."""

    name: str
    default: Any
    check: Check
    words: str


def is_number(value: Any) -> bool:
    """Whether a value is a number, and one that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def at_least(low: float, below: float = math.inf) -> Check:
    """A number, low <= number < below."""
    upper = "" if below == math.inf else f" and < {below:g}"
    return Check(f"{{key}} >= {low:g}{upper}", lambda value: is_number(value) and low <= value < below)


def whole(low: int) -> Check:
    """An int that is at least so large."""
    return Check(f"a whole {{key}} >= {low}", lambda value: type(value) is int and value >= low)


def one_of(*values: Any) -> Check:
    """One of some values, of the same type."""
    return Check(f"{{key}} in {values}", lambda value: any(type(value) is type(v) and value == v for v in values))


def _is_rate(lr: Any) -> bool:
    if isinstance(lr, Tensor) and lr.numel() == 1:
        if not reads_are_free(lr):
            return True
        lr = lr.item()
    return bool(is_number(lr) and 0 <= lr < math.inf)


def _are_betas(betas: Any) -> bool:
    two = isinstance(betas, tuple | list) and len(betas) == 2 and all(isinstance(b, int | float) for b in betas)
    return two and all(0 <= b < 1 for b in betas)


RATE = Check("a finite lr >= 0", _is_rate)
"""Of a learning rate: a number, or a tensor of one."""
SWITCH = Check("{key} to be True, False or None", lambda value: isinstance(value, bool | None))
"""Of what is on or off."""
FINITE = Check("a finite number for {key}", lambda value: is_number(value) and math.isfinite(value))
"""Of any number."""
BETAS = Check("two betas in [0, 1)", _are_betas)
"""Of the factors of two running means."""

WEIGHT_DECAY = Setting("weight_decay", 0.0, at_least(0), OF_PLAIN)
"""For what moves freely; frames refuse it."""
BOUNDED = (
    Setting(
        "q",
        0.5,
        Check("q > 0", lambda q: isinstance(q, int | float) and q > 0),
        "bounds the step a of a frame along a direction of generator A, a ||A||_F <= 2 q; infinity for no bound.",
    ),
    Setting(
        "tolerance",
        None,
        Check("a tolerance between 0 and 1, or None", lambda t: t is None or (isinstance(t, float) and 0 < t < 1)),
        "relative error that the Cayley transform of a square frame may have, as far as it stays a frame; 16 eps when "
        "None, and for tall frames, whose p x p part costs little.",
    ),
)
"""Those of steps along the manifold that are bounded by the generator."""
SHARED = (
    Setting("precision", "exact", one_of(*PRECISIONS), '"exact" or "fast", see `TangentOptimizer`.'),
    Setting("foreach", None, SWITCH, OF_PLAIN),
    Setting("maximize", False, one_of(False, True), "ascend instead."),
    Setting(
        "capturable",
        False,
        one_of(False, True),
        "for steps in a CUDA graph: frames go as on any device beside a CPU, without a value that is read, on a CPU "
        "as well; of the groups without a manifold as in torch's optimizer. A rate that shall change in a graph is "
        "a tensor on the device.",
    ),
)
"""What every optimizer of frames has."""

OF_TORCH = {
    **dict.fromkeys("amsgrad capturable centered decoupled_weight_decay foreach fused".split(), SWITCH),
    "differentiable": Check(
        "{key}=False, since its steps record no graph", lambda value: value is None or value is False
    ),
    "nesterov": SWITCH,
    **dict.fromkeys(("dampening", "momentum", "alpha", "eps"), FINITE),
    "weight_decay": at_least(0),
}
"""Names that torch's optimizers give their settings, which a group may have beside those of its own optimizer."""


def told(doc: str, settings: Collection[Setting]) -> str:
    """Returns a docstring with what the settings are, and what they raise, before its references and examples."""
    doc = inspect.cleandoc(doc)
    entries = [_PARAMS, *(f"{setting.name}: {setting.words}" for setting in settings)]
    wrapped = [textwrap.fill(entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
    place = min((doc.find(mark) for mark in ("References:", ">>> ") if mark in doc), default=len(doc))
    return "\n".join([doc[:place].rstrip(), "", "Args:", *wrapped, "", _RAISES, doc[place:]])


def signature(settings: Sequence[Setting], positional: int = 1) -> inspect.Signature:
    """Returns the call that the settings make: the parameters, the rate, and the others by keyword.

    Args:
        settings: the rate first.
        positional: how many of them may be given without their names.
    """
    first, then = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    taken = [
        inspect.Parameter(setting.name, first if i < positional else then, default=setting.default)
        for i, setting in enumerate(settings)
    ]
    return inspect.Signature([inspect.Parameter("params", first), *taken])


_PARAMS = "params: groups, as `sk.optim.parameter_groups` gives them."
_RAISES = """Raises:
    OptionError: a setting is out of range.
    ShapeError, NotAFrameError: a parameter of a manifold is no frame.
    OptimizerError: a frame stands in a group without a manifold.
"""

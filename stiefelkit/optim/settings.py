"""Settings of optimizers of frames as data: what may be given, what it must be, and the words that tell."""

import functools
import inspect
import math
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.numbers import PRECISION, Check, as_python_number, at_least, integer, is_number, one_of

__all__ = [
    "BETAS", "BOUND", "BOUNDED", "FINITE", "MOMENTUM", "OF_ADAM", "OF_FREE", "OF_SGD", "OF_TORCH", "RATE", "SHARED",
    "SWITCH", "WEIGHT_DECAY", "Check", "Setting", "at_least", "document_settings", "integer", "is_number", "one_of",
    "signature",
]  # fmt: skip

OF_FREE = "of the groups without a manifold."
"""Words of a setting that the torch optimizer of those groups has."""


@dataclass(frozen=True)
class Setting:
    """A setting of an optimizer, whose value may differ between groups; `words` describe it in help texts."""

    name: str
    default: object
    check: Check
    words: str


def _is_rate(lr: object) -> bool:
    if isinstance(lr, Tensor) and lr.numel() == 1 and not lr.is_meta:
        if not may_sync_host(lr):
            return True
        lr = lr.item()
    return is_number(lr) and bool(0 <= lr < math.inf)


def _are_betas(betas: object) -> bool:
    return isinstance(betas, tuple | list) and len(betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in betas)


RATE = Check("a finite {key} >= 0", _is_rate, functools.partial(as_python_number, keep=Tensor))
"""Of a learning rate: a number, or a tensor of one, which is kept."""
SWITCH = Check("{key} to be True, False or None", lambda value: isinstance(value, bool | None))
"""Of what is on or off."""
FINITE = Check("a finite number for {key}", lambda value: is_number(value) and math.isfinite(value))
"""Of any number."""
MOMENTUM = at_least(0, most=torch.finfo(torch.float32).max)
"""Of a factor of tensors of any dtype, which torch converts to it."""
BETAS = Check("two betas in [0, 1)", _are_betas)
"""Of the factors of two running means."""

BOUND = Check("{key} > 0", lambda q: is_number(q) and q > 0)
"""Of what bounds a step, which infinity does not."""

WEIGHT_DECAY = Setting("weight_decay", 0.0, at_least(0), f"{OF_FREE[:-1]}; refused where there are none.")
"""For what moves freely; frames refuse it."""
BOUNDED = (
    Setting(
        "q",
        0.5,
        BOUND,
        "bounds the step a of a frame along a direction of generator A, :math:`a ‖A‖_F ≤ 2 q`; infinity for no bound.",
    ),
)
"""Settings of the optimizers whose steps are bounded by the norm of the generator."""
SHARED = (
    Setting("precision", "exact", PRECISION, '"exact" or "fast", see `TangentOptimizer`.'),
    Setting("foreach", None, SWITCH, OF_FREE),
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
"""Settings of every optimizer of frames."""

OF_SGD = (
    Setting("dampening", 0.0, FINITE, "of the groups without a manifold, as in torch.optim.SGD."),
    WEIGHT_DECAY,
    Setting("nesterov", False, SWITCH, OF_FREE),
)
"""Settings of groups that torch.optim.SGD moves, without the momentum."""
OF_ADAM = (
    Setting("betas", (0.9, 0.999), BETAS, OF_FREE),
    Setting("eps", 1e-8, at_least(0), OF_FREE),
    WEIGHT_DECAY,
    Setting("amsgrad", False, SWITCH, OF_FREE),
)
"""Settings of groups that torch.optim.Adam moves."""

OF_TORCH = {
    **dict.fromkeys("amsgrad capturable centered decoupled_weight_decay foreach fused maximize".split(), SWITCH),
    "differentiable": Check("{key}=False, since its steps record no graph", lambda on: on is None or on is False),
    "nesterov": SWITCH,
    **dict.fromkeys(("dampening", "momentum", "alpha", "eps"), FINITE),
    "weight_decay": at_least(0),
}
"""Names that torch's optimizers give their settings, which a group may have beside those of its own optimizer."""


def document_settings(optimizer: type, settings: Collection[Setting], example: str) -> None:
    """Adds what the settings are to a docstring, before its references; to one of the package an example, if needed."""
    if not optimizer.__doc__ or not settings or "Args:\n" in optimizer.__doc__:
        return
    doc = inspect.cleandoc(optimizer.__doc__)
    if ">>> " not in doc and optimizer.__module__.startswith("stiefelkit."):
        defaults = {setting.name: setting.default for setting in settings}
        doc += "\n\n" + example.format_map({"lr": 0.01, **defaults, "name": optimizer.__name__})
    names = {"groups, as `sk.optim.parameter_groups` gives them.": ["params"]}
    for setting in settings:
        names.setdefault(setting.words, []).append(setting.name)
    entries = [f"{', '.join(alike)}: {words}" for words, alike in names.items()]
    wrapped = [textwrap.fill(entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
    end = min((doc.find(mark) for mark in ("References:", ">>> ") if mark in doc), default=len(doc))
    optimizer.__doc__ = "\n".join([doc[:end].rstrip(), "", "Args:", *wrapped, "", doc[end:]])


def signature(settings: Sequence[Setting], positional: int = 1) -> inspect.Signature:
    """Returns the call that settings make: the parameters, so many by position, and the others by keyword."""
    first, then = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    taken = [
        inspect.Parameter(setting.name, first if i < positional else then, default=setting.default)
        for i, setting in enumerate(settings)
    ]
    return inspect.Signature([inspect.Parameter("params", first), *taken])

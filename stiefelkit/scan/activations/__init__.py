"""Activations by name, built-ins and plugins on the same road, imported at first use.

One is its function, its loop in place, and its derivative from what the loop leaves behind. A pre-activation is a row
of N real numbers; complex ones are :math:`[Re | Im]`, :math:`N = 2n`. The derivative of an activation is a diagonal (or
the identity), or, where the two halves of a row are pairs, a symmetric 2 x 2 matrix for each pair.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit._torch import constant_in_traced_code
from stiefelkit.errors import DtypeError, OptionError, UnknownNameError, did_you_mean, needs, shown
from stiefelkit.registry import Registry

__all__ = ["Activation", "Loop", "find_activation", "in_place", "names", "register", "step_by_step"]

Views = tuple[Tensor, ...]
Loop = Callable[[Iterable[Views], Tensor, Callable[[Tensor, Tensor], object]], Tensor]
"""Takes `views` of steps, the state h before them, and add(z, h), which adds the product with W to z.

At each step it adds, turns z into h in place, and writes what the derivative needs besides; it returns the last h."""


@dataclass(frozen=True)
class Activation(ABC):
    """An activation, by which :math:`h = act(z)`.

    Args:
        name: as it was asked for, "leaky_relu(0.2)".
        slope: of activations that have one; any other number in a name, too.
    """

    name: str
    slope: float = 0.0

    bias_inside: ClassVar[bool] = False
    """True if it takes a real bias (n,) as an argument, and is the identity without one; others have it added to z."""
    is_paired: ClassVar[bool] = False
    """True if it acts on the pair i and i + N/2 of a row, which needs an even N."""
    saved: ClassVar[tuple[int, torch.dtype | None] | None] = None
    """(d, dtype): n / d numbers of this dtype (None: that of z) are kept for each row of n units; None for nothing."""
    default_slope: ClassVar[float | None] = None
    """The slope, or other number, where a name has none; None for activations without."""
    kernel: ClassVar[str | None] = None
    """Name of the activation in the programs of the GPU; None if they do not have it."""

    @classmethod
    def of_complex(cls) -> "type[Activation] | None":
        """Returns the class for complex states, as rows :math:`[Re | Im]`; None if there is none."""
        return None

    @abstractmethod
    def function(self, *z_and_bias: Tensor) -> Tensor:
        """Returns the activation of z (*, n), real or complex, and of the bias if it is inside; differentiable."""

    @abstractmethod
    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        """Returns the loop over steps, of rows such as `like` (batch, N), and with the bias (n,) if it is inside."""

    @abstractmethod
    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """Returns the derivative over states (k, batch, N): nothing, the diagonal, or that and the other one (N/2)."""

    def __call__(self, z: Tensor, b: Tensor | None = None) -> Tensor:
        """Returns the activation of z (*, n) and of a bias (n,), wherever it belongs."""
        if self.bias_inside:
            return z if b is None else self.function(z, b)
        return self.function(z if b is None else z + b)

    def of_rows(self, *z_and_bias: Tensor) -> Tensor:
        """`function` of rows (*, N), in operators of real numbers."""
        return self.function(*z_and_bias)

    def views(self, z: Tensor, saved: Tensor) -> list[Views]:
        """Returns what `loop` takes at each step of a chunk: z (batch, N) first, and the room for what is saved."""
        return list(zip(z.unbind(0), saved.unbind(0), strict=True))

    def bias_gradient(self, h: Tensor, saved: Tensor, delta: Tensor) -> Tensor:
        """Returns the gradient by the bias inside, (*, n), at each row of states and of gradients by z, both (*, N)."""
        raise NotImplementedError

    def is_ill(self, saved: Tensor) -> bool:
        """Returns whether `loop` was not accurate on this chunk, and `careful` has to take its place."""
        return False

    def careful(self, like: Tensor, bias: Tensor | None) -> Loop:
        """`loop`, slower and accurate for every z."""
        return self.loop(like, bias)

    def saved_like(self, n: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Width and dtype of what is kept for each row of n units besides the states; width 0 for nothing."""
        if self.saved is None:
            return 0, dtype.to_real()
        share, saved_dtype = self.saved
        return n // share, saved_dtype or dtype.to_real()


def in_place(apply: Callable[[Tensor], Tensor]) -> Loop:
    """Returns the loop of an activation that `apply` puts in the place of z, and that saves nothing."""
    return step_by_step(lambda z, _: apply(z))


def step_by_step(apply: Callable[..., object]) -> Loop:
    """Returns the loop of an activation that `apply`, which takes all `views` of a step, puts in the place of z."""

    def loop(views: Iterable[Views], h: Tensor, add: Callable[[Tensor, Tensor], object]) -> Tensor:
        for view in views:
            add(view[0], h)
            apply(*view)
            h = view[0]
        return h

    return loop


def _check(target: object) -> None:
    is_one = isinstance(target, type) and issubclass(target, Activation)
    needs(is_one, OptionError, "An activation", "to be a subclass of Activation", target)


_SIMPLE = dict(abs="Abs", identity="Identity", leaky_relu="LeakyReLU", oplu="OPLU", relu="ReLU", tanh="Tanh")
_BUILT_IN = {name: f"{__name__}.simple:{cls}" for name, cls in _SIMPLE.items()}
_BUILT_IN |= {"modrelu": f"{__name__}.modrelu:ModReLU", "modrelu_epsilon": f"{__name__}.modrelu:ModReLUEpsilon"}
_activations = Registry("", "activation", _BUILT_IN, _check)
_by_name: dict[tuple[str, bool], Activation] = {}
_found = SimpleNamespace()


def names() -> list[str]:
    """Returns every known name, without importing any."""
    return _activations.names()


def register(name: str, target: str | type[Activation]) -> None:
    """Adds an activation: a subclass of `Activation`, or a dotted string `"package.module:Class"`."""
    if not isinstance(target, str):
        _activations.check(target)
    _activations.register(name, target)


def find_activation(name: str, is_complex: bool) -> Activation:
    """Looks an activation up by a name, or one with a number, "leaky_relu(0.2)"; of complex states if `is_complex`.

    >>> import torch
    >>> find_activation("tanh", False)(torch.zeros(2))
    tensor([0., 0.])
    """
    try:
        return _by_name[name, is_complex]
    except (KeyError, TypeError):
        pass
    _remember(name, is_complex)
    # Traced code sees a dict as it was at the first look, and an attribute as it is.
    return getattr(_found, f"{name} {is_complex}")


@constant_in_traced_code
def _remember(name: str, is_complex: bool) -> None:
    """Makes a name known, outside of traced code: a compiler would look into the registry's imports."""
    _by_name[name, is_complex] = activation = _parsed(name, is_complex)
    setattr(_found, f"{name} {is_complex}", activation)


def _parsed(name: str, is_complex: bool) -> Activation:
    kind, parenthesis, rest = name.partition("(") if isinstance(name, str) else ("", "", "")
    if kind not in names():
        raise UnknownNameError(f"No activation is named {shown(name)}{did_you_mean(name, names())}")
    cls = _activations.find(kind)
    slope = cls.default_slope or 0.0
    if parenthesis:
        try:
            slope = float(rest.removesuffix(")")) if rest.endswith(")") else math.nan
        except ValueError:
            slope = math.nan
        if cls.default_slope is None or not 0 < slope < math.inf:
            example = "leaky_relu" if cls.default_slope is None else kind
            raise OptionError(f"Only {example} takes a number, one above zero, '{example}(0.2)'; got {shown(name)}.")
    cls = cls.of_complex() if is_complex else cls
    if cls is None:
        fitting = [key for key, other in _activations.available().items() if other.of_complex()]
        raise DtypeError(f"Complex states need an activation in {fitting}, got {name!r}.")
    return cls(name, slope)

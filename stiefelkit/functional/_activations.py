"""Activations of recurrent cells, real and complex, by name."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stiefelkit.errors import DtypeError, OptionError, ShapeError, UnknownNameError, did_you_mean

__all__ = [
    "ACTIVATIONS",
    "COMPLEX_ACTIVATIONS",
    "find_activation",
    "leaky_relu",
    "modrelu",
    "oplu",
    "split_activation",
]

Activation = Callable[[Tensor, Tensor | None], Tensor]

DEFAULT_SLOPE = 0.1


def modrelu(z: Tensor, b: Tensor) -> Tensor:
    r"""modReLU: relu(|z| + b) z / |z|, and 0 at z = 0.

    The phase (for real z, the sign) is kept and the modulus shifted; where |z| + b <= 0 the output and its gradient
    are 0. At z = 0 the value is 0 and so is the gradient, real and complex, with no epsilon: an epsilon in the
    denominator gives NaN gradients there or a gain above 4 for b = 0.01.

    Args:
        z: pre-activation, real or complex, shape (*, n); a modulus below the smallest normal number counts as 0.
        b: real bias, shape (n,).

    Returns:
        Tensor of the shape and dtype of z.

    References:
        Arjovsky, Shah, Bengio, Unitary evolution recurrent neural networks, ICML 2016, equation 8.

    >>> modrelu(torch.tensor([-2.0, 0.0, 0.5]), torch.tensor([-1.0, 1.0, -1.0]))
    tensor([-1.,  0.,  0.])
    """
    if not z.is_complex():
        # The sign has derivative 0, which autograd would add up at the price of the rest together.
        return torch.sgn(z.detach()) * torch.relu(z.abs() + b.to(z.dtype))
    # torch.sgn gives NaN where |z| is subnormal.
    z = torch.where(z.detach().abs() < torch.finfo(z.dtype).tiny, 0, z)
    modulus = z.abs()
    return torch.sgn(z) * torch.relu(modulus + b.to(modulus.dtype))


def oplu(z: Tensor) -> Tensor:
    """OPLU: the pair (z_i, z_{i + n/2}) in falling order, the larger in the first half; keeps every norm.

    Pairs as in Mhammedi et al. 2017. A pair of equals stays as it is, and so does its gradient.

    Args:
        z: real pre-activation, shape (*, n) with n even.

    Returns:
        Tensor of the shape of z.

    Raises:
        ShapeError: n is odd.

    References:
        Chernodub, Nowicki, Norm-preserving orthogonal permutation linear unit activation functions (OPLU), 2016.

    >>> oplu(torch.tensor([1.0, 5.0, 2.0, 4.0]))
    tensor([2., 5., 1., 4.])
    """
    if z.shape[-1] % 2:
        raise ShapeError(f"OPLU needs an even number of units, got {z.shape[-1]}.")
    first, second = z.chunk(2, dim=-1)
    swap = first < second
    return torch.cat([torch.where(swap, second, first), torch.where(swap, first, second)], dim=-1)


def leaky_relu(z: Tensor, slope: float = DEFAULT_SLOPE) -> Tensor:
    """Z where it is positive, else slope z; at 0 the gradient is the slope's."""
    return torch.nn.functional.leaky_relu(z, slope)


def _additive(function: Callable[[Tensor], Tensor]) -> Activation:
    def apply(z: Tensor, b: Tensor | None) -> Tensor:
        return function(z if b is None else z + b)

    return apply


def _modrelu_or_identity(z: Tensor, b: Tensor | None) -> Tensor:
    # Without a bias modReLU changes nothing.
    return z if b is None else modrelu(z, b)


ACTIVATIONS: dict[str, Activation] = {
    "modrelu": _modrelu_or_identity,
    "tanh": _additive(torch.tanh),
    "relu": _additive(torch.relu),
    "leaky_relu": _additive(leaky_relu),
    "abs": _additive(torch.abs),
    "oplu": _additive(oplu),
    "identity": _additive(lambda z: z),
}
"""Name to function of pre-activation and bias. modReLU shifts the modulus by a real bias, the others add theirs."""

COMPLEX_ACTIVATIONS = frozenset({"modrelu", "identity"})
"""Those that are defined for complex states."""


def split_activation(name: str) -> tuple[str, float]:
    """Takes the slope from an activation's name: "leaky_relu(0.2)"; 0.1 when it names none, as in Mhammedi et al.

    Raises:
        UnknownNameError: nothing has this name.
        OptionError: the slope is no positive number, or the activation has none.
    """
    kind, parenthesis, rest = name.partition("(") if isinstance(name, str) else ("", "", "")
    if kind not in ACTIVATIONS:
        raise UnknownNameError(f"No activation is named {name!r}{did_you_mean(name, ACTIVATIONS)}")
    if not parenthesis:
        return kind, DEFAULT_SLOPE
    try:
        slope = float(rest.removesuffix(")")) if rest.endswith(")") else math.nan
    except ValueError:
        slope = math.nan
    if kind != "leaky_relu" or not 0 < slope < math.inf:
        raise OptionError(f"Only leaky_relu takes a slope, as in 'leaky_relu(0.2)', and one above zero; got {name!r}.")
    return kind, slope


def find_activation(name: str, is_complex: bool) -> Activation:
    """Looks an activation up.

    Raises:
        UnknownNameError: nothing has this name.
        OptionError: the name holds a slope that is none.
        DtypeError: it is not defined for complex states.
    """
    kind, slope = split_activation(name)
    if is_complex and kind not in COMPLEX_ACTIVATIONS:
        raise DtypeError(f"Complex states need an activation in {sorted(COMPLEX_ACTIVATIONS)}, got {name!r}.")
    return _additive(lambda z: leaky_relu(z, slope)) if kind == "leaky_relu" else ACTIVATIONS[kind]

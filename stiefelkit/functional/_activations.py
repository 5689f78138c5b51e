"""Activations of recurrent cells, real and complex, by name."""

from collections.abc import Callable

import torch
from torch import Tensor

from stiefelkit.errors import DtypeError, UnknownNameError, did_you_mean

__all__ = ["ACTIVATIONS", "COMPLEX_ACTIVATIONS", "find_activation", "modrelu"]


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


def _additive(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor | None], Tensor]:
    def apply(z: Tensor, b: Tensor | None) -> Tensor:
        return function(z if b is None else z + b)

    return apply


def _modrelu_or_identity(z: Tensor, b: Tensor | None) -> Tensor:
    # Without a bias modReLU changes nothing.
    return z if b is None else modrelu(z, b)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "modrelu": _modrelu_or_identity,
    "tanh": _additive(torch.tanh),
    "relu": _additive(torch.relu),
    "identity": _additive(lambda z: z),
}
"""Name to function of pre-activation and bias. modReLU shifts the modulus by a real bias, the others add theirs."""

COMPLEX_ACTIVATIONS = frozenset({"modrelu", "identity"})
"""Those that are defined for complex states."""


def find_activation(name: str, is_complex: bool) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Looks an activation up.

    Raises:
        UnknownNameError: nothing has this name.
        DtypeError: it is not defined for complex states.
    """
    if name not in ACTIVATIONS:
        raise UnknownNameError(f"No activation is named {name!r}{did_you_mean(name, ACTIVATIONS)}")
    if is_complex and name not in COMPLEX_ACTIVATIONS:
        raise DtypeError(f"Complex states need an activation in {sorted(COMPLEX_ACTIVATIONS)}, got {name!r}.")
    return ACTIVATIONS[name]

"""Activations of recurrent cells that torch has not, real and complex."""

import torch
from torch import Tensor

from stiefelkit.errors import ShapeError
from stiefelkit.numbers import at_least
from stiefelkit.tensors import check_tensors

EPSILON = at_least(0)
"""Of modReLU's epsilon."""


def modrelu(z: Tensor, b: Tensor, epsilon: float = 0.0) -> Tensor:
    r"""modReLU: :math:`relu(|z| + b) z / |z|`, and 0 at :math:`z = 0`.

    The phase (for real z, the sign) is kept and the modulus shifted; where :math:`|z| + b ≤ 0` the output and its
    gradient are 0. At :math:`z = 0` the value is 0 and so is the gradient, real and complex, with no epsilon.

    With one it is that of scuRNN's paper, equation 5: :math:`relu(s + b) z / (s + epsilon)`,
    :math:`s = (|z|^2 + epsilon)^{1/2}`, which is smooth at :math:`z = 0`, where its gain is
    :math:`(epsilon^{1/2} + b) / (epsilon^{1/2} + epsilon)`: above 4 for b = 0.01 and their 1e-5, so that sixty steps of
    zero input may overflow.

    Args:
        z: pre-activation, real or complex, shape (*, n); a complex one below the smallest normal number counts as 0.
        b: real bias, shape (n,).
        epsilon: 0, or that of equation 5.

    Returns:
        Tensor of the shape and dtype of z.

    Raises:
        OptionError: epsilon is negative or not finite.

    References:
        Arjovsky, Shah, Bengio, Unitary evolution recurrent neural networks, ICML 2016, equation 8; Maduranga, Helfrich,
        Ye, Complex unitary recurrent neural networks using scaled Cayley transform, AAAI 2019, equation 5.

    >>> modrelu(torch.tensor([-2.0, 0.0, 0.5]), torch.tensor([-1.0, 1.0, -1.0]))
    tensor([-1.,  0.,  0.])
    """
    check_tensors("modrelu", z, b)
    epsilon = EPSILON.require("modrelu", "epsilon", epsilon)
    if epsilon:
        parts = modrelu_of_parts(torch.view_as_real(z) if z.is_complex() else z.unsqueeze(-1), b, epsilon, -1)
        return torch.view_as_complex(parts) if z.is_complex() else parts.squeeze(-1)
    if not z.is_complex():
        # The sign has derivative 0, which autograd would add up at the price of the rest together.
        return torch.sgn(z.detach()) * torch.relu(z.abs() + b.to(z.dtype))
    # torch.sgn gives NaN where |z| is subnormal.
    z = torch.where(z.detach().abs() < torch.finfo(z.dtype).tiny, 0, z)
    modulus = z.abs()
    return torch.sgn(z) * torch.relu(modulus + b.to(modulus.dtype))


def modrelu_of_parts(parts: Tensor, b: Tensor, epsilon: float, dim: int) -> Tensor:
    """Applies `modrelu` with an epsilon above zero to numbers whose real parts, one or two, lie along `dim`."""
    root = max(epsilon**0.5, torch.finfo(parts.dtype).tiny)
    # Of parts divided by the largest the squares neither overflow nor vanish; s does not depend on what divides.
    largest = parts.detach().abs().amax(dim, keepdim=True).clamp_min(root)
    s = largest * ((parts / largest).square().sum(dim, keepdim=True) + (root / largest).square()).sqrt()
    return torch.relu(s + b.to(s.dtype).unsqueeze(dim)) * (parts / (s + epsilon))


def oplu(z: Tensor) -> Tensor:
    """OPLU: the pair :math:`(z_i, z_{i + n/2})` in descending order, the larger in the first half; keeps every norm.

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
    check_tensors("oplu", z)
    if z.shape[-1] % 2:
        raise ShapeError(f"OPLU needs an even number of units, got {z.shape[-1]}.")
    first, second = z.chunk(2, dim=-1)
    swap = first < second
    return torch.cat([torch.where(swap, second, first), torch.where(swap, first, second)], dim=-1)


def leaky_relu(z: Tensor, slope: float = 0.1) -> Tensor:
    """Leaky ReLU: z where it is positive, else :math:`slope z`; at 0 the gradient is the slope's.

    Args:
        z: real pre-activation, any shape.
        slope: of the negative half.
    """
    return torch.nn.functional.leaky_relu(z, slope)

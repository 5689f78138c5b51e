"""Activations of recurrent cells that torch has not, real and complex."""

import torch
from torch import Tensor

from stiefelkit.errors import ShapeError, needs
from stiefelkit.numbers import at_least
from stiefelkit.tensors import check_tensors

EPSILON = at_least(0)


def modrelu(z: Tensor, b: Tensor, epsilon: float = 0.0) -> Tensor:
    r"""modReLU: :math:`relu(|z| + b) z / |z|`, and 0 at :math:`z = 0`.

    It keeps the phase (of real z, the sign) and shifts the modulus; where :math:`|z| + b ≤ 0`, and at :math:`z = 0`,
    the output and its gradient are 0.

    With an epsilon it is that of scuRNN's paper, equation 5: :math:`relu(s + b) z / (s + epsilon)`,
    :math:`s = (|z|^2 + epsilon)^{1/2}`, which is smooth at :math:`z = 0`, where its gain is
    :math:`(epsilon^{1/2} + b) / (epsilon^{1/2} + epsilon)`: above 4 for b = 0.01 and their 1e-5, so that sixty steps of
    zero input may overflow.

    Args:
        z: pre-activation, real or complex, shape (*, n); a complex one below the smallest normal number counts as 0.
        b: real bias, shape (n,).
        epsilon: 0, or that of equation 5.

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

    Pairs as in Mhammedi et al. 2017, of real z, shape (*, n) with n even. Equal ones, and their gradients, stay.

    References:
        Chernodub, Nowicki, Norm-preserving orthogonal permutation linear unit activation functions (OPLU), 2016.

    >>> oplu(torch.tensor([1.0, 5.0, 2.0, 4.0]))
    tensor([2., 5., 1., 4.])
    """
    check_tensors("oplu", z)
    if z.shape[-1] % 2:
        needs(False, ShapeError, "OPLU", "an even number of units", z.shape[-1])
    first, second = z.chunk(2, dim=-1)
    swap = first < second
    return torch.cat([torch.where(swap, second, first), torch.where(swap, first, second)], dim=-1)


def leaky_relu(z: Tensor, slope: float = 0.1) -> Tensor:
    """Leaky ReLU of a real z of any shape: z where it is positive, else :math:`slope z`, whose gradient it has at 0."""
    return torch.nn.functional.leaky_relu(z, slope)

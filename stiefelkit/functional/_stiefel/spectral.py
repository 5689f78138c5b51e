r"""The steepest tangent vector in the spectral norm: max <G, A> over tangent A with ||A||_2 <= 1.

Its dual is min ||G + 2 W L||_* over Hermitian L, with the same value. With K the skew part of S = W^H G and
P = G - W S, only matrices W a + P b with p x p matrices a and b count, so that but for P^H P nothing depends on n. For
a square frame P = 0, and the direction is W msign(K).
"""

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.devices import may_sync_host, switch
from stiefelkit.functional._arithmetic.norms import norms_of
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._packing import check_alike, minus_adjoint
from stiefelkit.functional._polar import msign
from stiefelkit.functional._stiefel.polar_step import inverse_root_less_one
from stiefelkit.functional._stiefel.tangents import Tangent, riemannian_gradient
from stiefelkit.metrics import working_dtype
from stiefelkit.numbers import integer


def spectral_direction(w: Tensor, g: Tensor, *, iterations: int = 10) -> tuple[Tensor, Tensor]:
    r"""Returns the tangent A, :math:`‖A‖_2 ≤ 1`, with the largest :math:`⟨G, A⟩ = Re tr(G^H A)`, and a certificate L.

    For any Hermitian L the value is at most :math:`‖G + 2 W L‖_*`; the L returned makes that nearly equal, and no A
    gains more than the difference. A square frame takes one `msign`, and A is the best at once (but for singular values
    of the skew part of :math:`W^H G` below 1e-3 of the largest). A tall one takes Douglas-Rachford iterations of one
    p x p eigenvalue problem each; A is tangent and within the unit ball after any number of them. On other devices than
    CPUs products replace eigenvalues, in the dtype of W, and A is within the ball to 1 %. Of :math:`⟨G, A⟩` is missing,
    for Gaussian matrices, at most

        iterations           5        10       20       40      100
        n >= 4p           5e-3      4e-4     1e-6     1e-9    1e-14
        p < n < 4p        1e-1      4e-2     2e-2     7e-3     1e-3

    Args:
        w: frames, shape (*, n, p).
        g: matrices of the same shape and dtype, as the gradient of a loss.
        iterations: for tall frames.

    Returns:
        A of the shape of W, and L of shape (*, p, p). Zero for :math:`G = 0`.

    References:
        Bernstein, Modular manifolds, 2025; Su, Steepest descent on manifolds: 3. Muon + Stiefel, 2025, for the problem.
        Eckstein, Bertsekas, On the Douglas-Rachford splitting method and the proximal point algorithm for maximal
        monotone operators, Math. Program. 55, 1992.

    >>> import torch
    >>> w, g = torch.eye(3, 2), torch.tensor([[0.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    >>> spectral_direction(w, g)[0]
    tensor([[ 0.,  1.],
            [-1.,  0.],
            [ 0.,  0.]])
    """
    check_alike("spectral_direction", w, g)
    iterations = integer(1, 10_000).require("spectral_direction", "iterations", iterations)
    direction, multiplier = steepest(w, riemannian_gradient(w, g, "euclidean"), iterations)
    s = w.mH @ g
    normal = (s + s.mH) / -4
    return direction.vector(w), normal if multiplier is None else normal + multiplier


def steepest(w: Tensor, gradient: Tangent, iterations: int) -> tuple[Tangent, Tensor | None]:
    """Returns the steepest direction for a Riemannian gradient W K + P in the Euclidean metric, and its L, or 0."""
    k, rest = gradient.rotation, gradient.rest
    if rest is None:
        signed = minus_adjoint(msign(k, precision="fast")).mul_(0.5)
        (norms,) = norms_of(signed)
        return Tangent(signed, None, norms, [0.0] * len(norms)), None
    is_read = may_sync_host(k)
    dtype = working_dtype(k.dtype) if is_read else k.dtype
    unit = _unit(gradient).to(dtype.to_real())
    fine, wide = k.to(dtype) / unit, rest.to(dtype) / unit
    gram = wide.mH @ wide
    square = fine.mH @ fine + gram
    mean = (_singular_values(square).mean(-1) if is_read else _mean_root(square))[..., None, None]
    tau = torch.where(mean > 0, mean, 1.0).reciprocal()
    fine, gram = fine * tau, gram * tau.square()
    eye = torch.eye(k.shape[-1], dtype=fine.dtype, device=k.device)
    a = b = along = torch.zeros_like(fine)
    clipped = (a, b)
    for _ in range(iterations):
        along, lower = a + fine, b + eye
        skew = minus_adjoint(along) / 2
        clipped = _clip(2 * skew - a, 2 * lower - b, gram)
        a, b = a + clipped[0] - skew, b + clipped[1] - lower
    skew, lower = minus_adjoint(clipped[0]) / 2, clipped[1]
    square = skew.mH @ skew + lower.mH @ gram @ lower
    largest = _singular_values(square).amax(-1) if is_read else _largest_root(square)
    longest = largest[..., None, None].clamp(min=1)
    vector = w @ (skew / longest).to(w.dtype) + wide.to(w.dtype) @ (lower * (tau / longest)).to(w.dtype)
    return split(w, vector, is_tangent=True), ((along + along.mH) / (-4 * tau) * unit).to(w.dtype)


def _unit(gradient: Tangent) -> Tensor:
    """Returns powers of 2 of the size of each matrix, shape (*, 1, 1), units that keep its squares ordinary."""
    length, k = gradient.norms("euclidean"), gradient.rotation
    if length and isinstance(length[0], Tensor):
        length = length[0]
    else:
        length = torch.tensor(length, dtype=torch.float64, device="cpu")
    size = torch.where(length > 0, length, 1.0).log2().floor().clamp(-1000, 1000).exp2()
    return size.to(k.device).view(*k.shape[:-2], 1, 1)


def split(w: Tensor, u: Tensor, *, is_tangent: bool) -> Tangent:
    """Splits U as W Omega + P; Omega is skew to the last bit for a tangent vector, and W^H U for any other."""
    s = w.mH @ u
    rotation = minus_adjoint(s).mul_(0.5) if is_tangent else s
    rest = plus_product(u, w, s, -1)
    return Tangent(rotation, rest, *norms_of(rotation, rest, s))


def _clip(a: Tensor, b: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Returns W a + P b with no singular value above 1, where `gram` is P^H P."""
    square = a.mH @ a + b.mH @ gram @ b
    if switch.forbidden or not square.is_cpu:
        # min(1, x^(-1/2)) = (1 + max(x - 1, 0))^(-1/2), and |H| = msign(H) H.
        beyond = square - torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
        size = msign(beyond, precision="fast") @ beyond
        less = inverse_root_less_one((beyond + (size + size.mH) / 2) / 2)
        return plus_product(a, a, less), plus_product(b, b, less)
    squares, v = torch.linalg.eigh(square)
    shrunk = (v * squares.clamp(min=1).rsqrt().unsqueeze(-2)) @ v.mH
    return a @ shrunk, b @ shrunk


def _mean_root(gram: Tensor) -> Tensor:
    """Returns the mean of the singular values, shape (*): tr(G G^(-1/2)) / p; those far below it count less."""
    mean_square = gram.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    scaled = gram / torch.where(mean_square > 0, mean_square, 1.0)[..., None, None]
    less = inverse_root_less_one(scaled - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))
    root = scaled + scaled @ less
    return root.diagonal(dim1=-2, dim2=-1).real.mean(-1) * mean_square.sqrt()


def _largest_root(gram: Tensor) -> Tensor:
    """Returns the largest singular value, shape (*), or a mean of those near it, by the 128th power."""
    power = gram
    for _ in range(7):
        power = _of_unit_trace(power @ power)
    return (_of_unit_trace(power) @ gram).diagonal(dim1=-2, dim2=-1).real.sum(-1).sqrt()


def _of_unit_trace(gram: Tensor) -> Tensor:
    trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)[..., None, None]
    return gram / torch.where(trace > 0, trace, 1.0)


def _singular_values(gram: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()

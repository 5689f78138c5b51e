r"""Tangent vectors whose geodesics end at given frames, by shooting, in any metric between canonical and Euclidean.

In a basis whose first p vectors are W, a tangent vector is X = [A; R], A skew, and its geodesic ends at
E(X) = exp([[alpha A, -R^H], [R, 0]])[:, :p] exp((1 - alpha) A). Newton's method solves E(X) = Y, for ends that move
from W to Y where it does not converge at once. Its linear map is the identity at X = 0, with eigenvalues like those of
(1 - e^{-ad}) / ad, so GMRES solves in few products with it.
"""

import torch
from torch import Tensor

from stiefelkit.functional._exponential.packed import whole
from stiefelkit.functional._polish import polished
from stiefelkit.functional._stiefel.tangents import skew_part

__all__ = ["shoot"]

_SHORTEST_STEP = 2.0**-9
_MOST_NEWTON = 12
_MOST_INNER = 60
_ROUNDED = 1e-12
_TINY = 1e-150


def shoot(y: Tensor, alpha: float) -> Tensor:
    """Finds tangent vectors at the first p columns of the identity whose geodesics end at Y.

    The ends are the frames nearest to the chord (1 - s) W + s Y; where Newton's method does not get from one to the
    next, a quarter of the step is tried.

    Args:
        y: frames of shape (b, m, p), m > p, float64 or complex128.
        alpha: of the metric, 1 for the canonical to 2 for the Euclidean one.

    Returns:
        [A; R] of the same shape, NaN where steps became too short, as at conjugate points and where the chord meets a
        matrix without full rank.

    References:
        Bryner, Endpoint geodesics on the Stiefel manifold embedded in Euclidean space, SIAM J. Matrix Anal. 38, 2017.
        Zimmermann, Hüper, Computing the Riemannian logarithm on the Stiefel manifold: metrics, methods, and
        performance, SIAM J. Matrix Anal. 43, 2022.
        Saad, Schultz, GMRES: a generalized minimal residual algorithm for solving nonsymmetric linear systems, SIAM J.
        Sci. Stat. Comput. 7, 1986.
    """
    w = torch.eye(y.shape[-2], y.shape[-1], dtype=y.dtype, device=y.device)
    x, at = torch.zeros_like(y), y.real.new_zeros(len(y))
    step = torch.ones_like(at)
    while len(going := ((at < 1) & (step >= _SHORTEST_STEP)).nonzero().squeeze(-1)):
        s = (at[going] + step[going]).clamp(max=1)
        part = s[:, None, None]
        left, _, right = torch.linalg.svd(w + part * (y[going] - w), full_matrices=False)
        end = torch.where(part == 1, y[going], left @ right)
        tried, ends = _newton(x[going], end, torch.full_like(s, alpha))
        x[going[ends]], at[going[ends]] = tried[ends], s[ends]
        step[going] = torch.where(ends, 2 * step[going], step[going] / 4)
    return x.masked_fill((at < 1)[:, None, None], torch.nan)


def _newton(x: Tensor, y: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Newton's method, given up where a step does not halve the error; and where it ends at Y."""
    x = x.clone()
    size = torch.full_like(alpha, torch.inf)
    ends = torch.zeros_like(alpha, dtype=torch.bool)
    active = torch.arange(len(x), device=x.device)
    for _ in range(_MOST_NEWTON):
        end = _End(x[active], alpha[active])
        off, now = end.error(y[active])
        halved = now < size[active] / 2
        ends[active] = now <= _ROUNDED
        keeps = halved & (now > 1e-15)
        size[active] = now
        active, now = active[keeps], now[keeps]
        if not len(active):
            break
        x[active] = x[active] + _gmres(end.only(keeps), off[keeps], now * now.clamp(1e-12, 1e-3))
    return x, ends


class _End:
    """The end of geodesics, and the derivative of it as tangent vectors there, turned back."""

    def __init__(self, x: Tensor, alpha: Tensor):
        p = x.shape[-1]
        self.p, self.alpha = p, alpha[:, None, None]
        a = x[..., :p, :]
        self.left = _Exponential(whole(self.alpha * a, x[..., p:, :]))
        self.right = _Exponential((1 - self.alpha) * a)

    def only(self, which: Tensor) -> "_End":
        one = object.__new__(_End)
        one.p, one.alpha = self.p, self.alpha[which]
        one.left, one.right = self.left.only(which), self.right.only(which)
        return one

    def error(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns Y as seen from the end, its tangent part; and how far Y is from the end."""
        seen = self.left.value.mH @ y @ self.right.value.mH
        p = self.p
        off = torch.cat([skew_part(seen[..., :p, :]), seen[..., p:, :]], dim=-2)
        return off, torch.linalg.matrix_norm(self.left.value[..., :p] @ self.right.value - y)

    def derivative(self, x: Tensor) -> Tensor:
        """Returns the derivative of the end along X, as seen from the end."""
        a = x[..., : self.p, :]
        moved = self.left.turned(whole(self.alpha * a, x[..., self.p :, :]))[..., : self.p]
        # exp(-B) dexp(B) on the left becomes the same of -B on the right.
        turn = self.right.value @ self.right.turned((1 - self.alpha) * a) @ self.right.value.mH
        return torch.cat([moved[..., : self.p, :] + turn, moved[..., self.p :, :]], dim=-2)


class _Exponential:
    """exp(L) of a skew L, and exp(-L) times its derivative."""

    def __init__(self, log: Tensor):
        t, q = torch.linalg.eigh(-1j * log.to(torch.complex128))
        self.real, self.q = not log.is_complex(), q
        value = (q * torch.exp(1j * t).unsqueeze(-2)) @ q.mH
        self.value = polished(value.real if self.real else value)
        # (1 - e^{-x}) / x of x = i (t_j - t_k) is e^{-x/2} sinc(|x| / 2).
        x = t.unsqueeze(-1) - t.unsqueeze(-2)
        self.phi = torch.exp(-0.5j * x) * torch.sinc(x / (2 * torch.pi))

    def only(self, which: Tensor) -> "_Exponential":
        one = object.__new__(_Exponential)
        one.real, one.q, one.value, one.phi = self.real, self.q[which], self.value[which], self.phi[which]
        return one

    def turned(self, d: Tensor) -> Tensor:
        turned = self.q @ (self.phi * (self.q.mH @ d.to(self.q.dtype) @ self.q)) @ self.q.mH
        return skew_part(turned.real if self.real else turned)


def _gmres(end: _End, b: Tensor, enough: Tensor) -> Tensor:
    """Solves end.derivative(X) = B by Arnoldi's method, members of the batch side by side."""
    most, size = min(_MOST_INNER, b[0].numel() * (2 if b.is_complex() else 1)), torch.linalg.matrix_norm(b)
    basis = b.new_zeros(most + 1, *b.shape)
    h = size.new_zeros(len(b), most + 1, most)
    # The vector with the first entry 1 that is orthogonal to all columns of H: the error is that of B over its norm.
    across = size.new_zeros(len(b), most + 1)
    across[:, 0] = 1
    basis[0] = b / size.clamp(min=_TINY)[:, None, None]
    for k in range(most):
        z, v = end.derivative(basis[k]), basis[: k + 1]
        for _ in range(2):
            c = (v.conj() * z).real.sum((-2, -1))
            z = z - (c[..., None, None] * v).sum(0)
            h[:, : k + 1, k] += c.mT
        h[:, k + 1, k] = length = torch.linalg.matrix_norm(z).clamp(min=_TINY)
        basis[k + 1] = z / length[:, None, None]
        across[:, k + 1] = -(across[:, : k + 1] * h[:, : k + 1, k]).sum(-1) / length
        if not (size > enough * torch.linalg.vector_norm(across, dim=-1)).any():
            break
    coefficients = size[:, None] * torch.linalg.pinv(h[:, : k + 2, : k + 1])[..., 0]
    return (coefficients.mT[..., None, None] * basis[: k + 1]).sum(0)

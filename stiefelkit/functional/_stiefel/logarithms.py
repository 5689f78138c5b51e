r"""Tangent vectors whose geodesics lead from frame to frame, in float64 or complex128.

By shooting, in any metric between canonical and Euclidean: in a basis whose first p vectors are W, a tangent vector is
X = [A; R], A skew, and its geodesic ends at
E(X) = exp([[alpha A, -R^H], [R, 0]])[:, :p] exp((1 - alpha) A). Newton's method solves E(X) = Y, for ends that move
from W to Y where it does not converge at once. Its linear map is the identity at X = 0, with eigenvalues like those of
(1 - e^{-ad}) / ad, so GMRES solves in few products with it.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.functional._arithmetic.function import Function
from stiefelkit.functional._exponential.packed import whole
from stiefelkit.functional._packing import check_alike
from stiefelkit.functional._polish import polished
from stiefelkit.functional._stiefel.completion import nearest_completion, shorten, skew_from, spectrum
from stiefelkit.functional._stiefel.geodesics import geodesic
from stiefelkit.functional._stiefel.tangents import METRICS, alpha_of, skew_part
from stiefelkit.metrics import defect

_CERTAIN = {False: 0.89 * math.pi, True: 0.5 * math.pi}
"""A geodesic of at most this length is the only shortest one, in real and in complex spaces."""

_OTHER_STARTS = 2
_SHORTEST_STEP = 2.0**-9
_MOST_NEWTON = 12
_MOST_INNER = 60
_ROUNDED = 1e-12
_TINY = 1e-150


def geodesic_logarithm(w: Tensor, y: Tensor, metric: str = "canonical") -> tuple[Tensor, Tensor]:
    """Finds a tangent U at W whose geodesic ends at Y.

    Square frames: :math:`W log(W^H Y)`, the shortest. Tall ones in the canonical metric: in a basis of W and of what Y
    adds, :math:`m = min(n, 2p)`, Y is completed to a unitary m x m matrix with the shortest logarithm. Newton's method
    with trust regions descends to a minimum from anywhere, and every minimum is a geodesic; it is the least if U is no
    longer than :math:`0.89 π` (complex: :math:`π / 2`), or if real and :math:`n = p + 1` or :math:`p = 1`. For longer
    ones the shortest of three starts is taken.

    :math:`0.89 π < π / √{5 / 4}`: the curvature is :math:`5 / 4` at most, and no closed geodesic is shorter than
    :math:`2 π`. In complex spaces the curvature is at most 4, as :math:`‖[X, Y]‖_F^2 ≤ 2 ‖X‖_F^2 ‖Y‖_F^2`, and no
    closed geodesic is shorter than :math:`√2 π`, the length of :math:`W e^{it}`; some tangent vectors of length
    :math:`0.66 π` are not the shortest.

    In the Euclidean metric tall frames are joined by shooting: U is the only shortest one if it is real and shorter
    than π; if longer there may be a shorter one, and some pairs have none. The frames of one column are a sphere in
    that metric, complex ones too, and real ones in both: U is the great circle in closed form, up to the opposite pole.

    Costs some 10 to 20 Hermitian eigenvalue problems of m x m for each start; by shooting 4 to 100 problems and up to
    60 times eight products of m x m for each.

    Args:
        w: frames of shape (*, n, p), float64 or complex128, :math:`‖W^H W - I‖_F ≤ 10^{-9} (1 + √p)^2`.
        y: frames of the same shape.
        metric: "canonical" or "euclidean".

    Returns:
        U of the same shape, which leads from the frame nearest to W to that nearest to Y, and which were found, shape
        (*): those whose geodesic was checked to end there; NaN in the others, which are square real frames with
        different determinants, what is no frame, and tall frames that shooting did not join. U has no derivative, and
        raises NotImplementedError when asked for one.

    Raises:
        ShapeError: W has more columns than rows, or Y another shape.
        OptionError: no metric has that name.

    References:
        Zimmermann, A matrix-algebraic algorithm for the Riemannian logarithm on the Stiefel manifold under the
        canonical metric, SIAM J. Matrix Anal. 38, 2017; its step is the one of steepest descent here.
        Rentmeesters, Algorithms for data fitting on some common homogeneous spaces, thesis, Louvain, 2013: curvature.
        Böttcher, Wenzel, The Frobenius norm and the commutator, Linear Algebra Appl. 429, 2008.
        Zimmermann, Stoye, The injectivity radius of the compact Stiefel manifold under the Euclidean metric, SIAM J.
        Matrix Anal. 46, 2025: it is pi.
    """
    check_alike("geodesic_logarithm", w, y)
    alpha_of("geodesic_logarithm", metric)
    return _Logarithm.of(*torch.broadcast_tensors(w, y), metric)  # type: ignore[return-value]


class _Logarithm(Function):
    @staticmethod
    def forward(w: Tensor, y: Tensor, metric: str) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        u, exists = _logarithm(w.reshape(-1, *w.shape[-2:]), y.reshape(-1, *y.shape[-2:]), metric)
        return u.view(w.shape), exists.view(w.shape[:-2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError("The logarithm of a frame has no derivative here.")


def _logarithm(w: Tensor, y: Tensor, metric: str) -> tuple[Tensor, Tensor]:
    u = torch.full_like(w, torch.nan)
    exists = _is_frame(w) & _is_frame(y)
    frames = exists.nonzero().squeeze(-1)
    if not len(frames):
        return u, exists
    w, y = polished(w[frames]), polished(y[frames])
    n, p = w.shape[-2:]
    u_frames = w @ skew_from(*spectrum(w.mH @ y), w.dtype) if n == p else _tall(w, y, metric)
    off = torch.linalg.matrix_norm(geodesic(w, u_frames, metric=metric)[0] - y)
    exists[frames] = off <= 2e-13 * math.sqrt(min(n, 2 * p))
    u[frames] = u_frames
    return u.masked_fill(~exists[:, None, None], torch.nan), exists


def _is_frame(w: Tensor) -> Tensor:
    # What is left, by `polished`, of the frames that manifolds move; one step more takes it below the end's tolerance.
    return torch.linalg.matrix_norm(defect(w)) <= 1e-9 * (1 + w.shape[-1] ** 0.5) ** 2


def _tall(w: Tensor, y: Tensor, metric: str) -> Tensor:
    p = w.shape[-1]
    q, _ = torch.linalg.qr(torch.cat([w, y], dim=-1))
    # Q holds W up to a unitary factor, and as many columns of a basis of the rest of both as there are.
    basis = torch.cat([w, q[..., p:]], dim=-1)
    if p == 1 and (metric == "euclidean" or not w.is_complex()):
        return basis @ _great_circle(basis.mH @ y)
    if metric == "euclidean":
        return basis @ _shoot(basis.mH @ y, METRICS[metric])
    v = nearest_completion(basis.mH @ y)
    log, rest = shorten(v, p)
    k = v.shape[-1] - p
    doubtful = (rest > 1e-11) | (_length(log) > _CERTAIN[v.is_complex()])
    which = doubtful.nonzero().squeeze(-1)
    if len(which) and (k > 1 or v.is_complex()):
        for phi in _turns(k, v.dtype).to(v.device):
            turned = torch.cat([v[which, :, :p], v[which, :, p:] @ phi], dim=-1)
            other, other_rest = shorten(turned, p)
            better = (other_rest <= 1e-11) & ((rest[which] > 1e-11) | (_length(other) < _length(log[which]) - 1e-9))
            log[which[better]], rest[which[better]] = other[better], other_rest[better]
    return basis @ log[..., :p]


def _great_circle(y: Tensor) -> Tensor:
    """Returns the tangent vector at the first unit vector that leads to Y (b, 2, 1), of length one, around a sphere."""
    along, x = y[..., :1, :].real, y.clone()
    x[..., :1, :] -= along
    sine = torch.linalg.matrix_norm(x, keepdim=True)
    # At the opposite pole every direction leads there.
    x[..., 1:, :] += (sine == 0) & (along < 0)
    return x * torch.atan2(sine, along) / torch.where(sine == 0, 1.0, sine)


def _length(log: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(log) / math.sqrt(2)


@functools.lru_cache(maxsize=16)
def _turns(k: int, dtype: torch.dtype) -> Tensor:
    """Fixed unitary matrices for the other starts, the same for all, so that members do not depend on each other."""
    with torch.inference_mode(False):
        phi = init.haar((_OTHER_STARTS, k, k), dtype, torch.Generator().manual_seed(k))
        if not dtype.is_complex:
            phi[..., 0] *= torch.linalg.det(phi).sign().unsqueeze(-1)
        return phi


def _shoot(y: Tensor, alpha: float) -> Tensor:
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

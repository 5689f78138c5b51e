"""Conjugate gradients within a trust region."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def dot(u: Tensor, v: Tensor) -> float:
    """Returns the real inner product of vectors, or of matrices."""
    return torch.vdot(u.reshape(-1), v.reshape(-1)).real.item()


class Model(NamedTuple):
    """Minimum of a model: the point; by how much the model falls; whether it is as long as permitted."""

    u: Tensor
    gain: float
    is_at_boundary: bool


def truncated(
    g: Tensor,
    hessian: Callable[[Tensor], Tensor],
    radius: float,
    kappa: float,
    theta: float,
    most: int,
    least: float = 0.0,
) -> Model:
    """Minimizes <g, u> + <u, H u> / 2 within a radius by conjugate gradients, by so many products at most.

    Until ||g + H u|| is the share `kappa` of ||g||, times the power `theta` of the first step's length, but no less
    than the share `least`, below which what is left is rounding.

    References:
        Steihaug, The conjugate gradient method and trust regions in large scale optimization, SIAM J. Numer. Anal. 20,
        1983.
    """
    u, hu = torch.zeros_like(g), torch.zeros_like(g)
    r, d = g, -g
    rr = dd = dot(g, g)
    uu, ud, gain, length = 0.0, 0.0, 0.0, math.sqrt(rr)
    near = enough = kappa * kappa * rr
    for i in range(most):
        hd = hessian(d)
        bend = dot(d, hd)
        if rr <= near and bend <= length * dd:
            break  # along the minima, if they are no points: such a curvature is as small as the gradient
        step = rr / bend if bend > 0 else math.inf
        if i == 0 and bend > 0:
            q = step * length
            enough = rr * max(min(kappa, min(q, 1.0) ** theta), least) ** 2
        reached = uu + 2 * step * ud + step * step * dd
        if not reached < radius * radius:
            step = (-ud + math.sqrt(ud * ud + dd * (radius * radius - uu))) / dd
            u, hu = torch.add(u, d, alpha=step), torch.add(hu, hd, alpha=step)
            return Model(u, -dot(g, u) - 0.5 * dot(u, hu), True)
        new_u, new_hu = torch.add(u, d, alpha=step), torch.add(hu, hd, alpha=step)
        new_gain = -dot(g, new_u) - 0.5 * dot(new_u, new_hu)
        if new_gain <= gain:
            break
        u, hu, gain = new_u, new_hu, new_gain
        r = torch.add(r, hd, alpha=step)
        before, rr = rr, dot(r, r)
        if rr <= enough:
            break
        beta = rr / before
        uu, ud, dd = reached, beta * (ud + step * dd), rr + beta * beta * dd
        d = torch.sub(beta * d, r)
    return Model(u, gain, False)

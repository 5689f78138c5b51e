"""Draws of the skew part A of a Cayley transform, packed."""

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.functional import cayley, cayley_inverse, pack_skew, unpack_skew
from stiefelkit.init import uniform

_STEEPEST = 32.0
"""The largest eigenvalue of A that a draw with fixed signs has; those of the transform stay 2/32 from -1.

Rounding A moves W by up to eps ||A||_F, and working with tall frames in float64 by about eps ||A||_2^2 / 20 more. Haar
frames have no bound: the spectrum of one of 64 x 64 in two comes so near -1 that float32 coordinates do not hold it.
"""
_LIGHT_TAILED = 4
"""With so many rows more than columns Haar frames hardly ever come near: P(||A|| > x) falls as x^-(n - p + 1)."""


def helfrich(shape: tuple[int, ...], is_complex: bool, generator: torch.Generator | None, arc: float) -> Tensor:
    """Draws tan(t/2) with t uniform on (0, arc) for consecutive pairs of axes, as scoRNN and scuRNN begin."""
    *batch, n, p = shape
    pairs = min(n // 2, (p + 1) // 2)
    t = uniform((*batch, pairs), generator) * arc
    below = t.new_zeros(*batch, n, p)
    first = torch.arange(0, 2 * pairs, 2, device=t.device)
    below[..., first + 1, first] = (t / 2).tan()
    a11, a21 = below[..., :p, :], below[..., p:, :]
    return pack_skew(a11 + 0j, a21 + 0j) if is_complex else pack_skew(a11, a21)


def haar_with_signs(shape: tuple[int, ...], signs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns that of a real Haar frame for a given D, eigenvalues of W D within 2/32 of -1 moved that far away."""
    w = init.draw("haar", shape, torch.float64, generator)
    signs = signs.to(w)
    if shape[-1] == shape[-2]:
        # The transform has det 1, so det W = det D: a reflection takes the Haar measure from one half to the other.
        w[..., 0] *= (torch.linalg.det(w) * signs.prod(-1)).sign()[..., None]
    return _moderate(cayley_inverse(w, signs)[0], signs, *shape[-2:])


def _moderate(skew: Tensor, signs: Tensor, n: int, p: int) -> Tensor:
    """Returns the same A with eigenvalues beyond `_STEEPEST` brought back to it."""
    if n - p >= _LIGHT_TAILED or not torch.isfinite(skew).all():
        return skew
    a11, a21 = unpack_skew(skew, n, p, False)
    beside = torch.cat([-a21.mT, a21.new_zeros(*a21.shape[:-2], n - p, n - p)], -2)
    a = torch.cat([torch.cat([a11, a21], -2), beside], -1)
    # A^T A commutes with A: what is done to its eigenvectors leaves A skew.
    square, vectors = torch.linalg.eigh(a.mT @ a)
    scale = (_STEEPEST / square.clamp(min=_STEEPEST**2).sqrt()).unsqueeze(-2)
    a = a @ (vectors * scale) @ vectors.mT
    whole = cayley(pack_skew((a - a.mT) / 2), n, n)
    return cayley_inverse(whole[..., :p] * signs.unsqueeze(-2), signs)[0]

"""Parametrizations with wrong derivatives, each of which some law must catch."""

import torch

from stiefelkit.functional import cayley, pack_skew
from stiefelkit.functional._arithmetic.function import Function
from stiefelkit.parametrizations.cayley import Cayley
from stiefelkit.parametrizations.stiefel_point import StiefelPoint


class Small(Cayley):
    """Keeps the laws, at few shapes."""

    @classmethod
    def examples(cls):
        return [((4, 4), {}), ((16, 16), {}), ((5, 3), {}), ((2, 3, 3), {})]


class WrongGradient(Small):
    def forward(self, skew, phase=None):
        skewed = skew + 1e-3 * (skew - skew.detach())
        return super().forward(skewed, phase)


class _DetachedFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, n):
        w = cayley(v, n, n)
        ctx.save_for_backward(w.clone())
        ctx.n = n
        return w

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        m = (w + torch.eye(ctx.n, dtype=w.dtype)) / 2
        v = m.mT @ g @ m.mT * -2
        return pack_skew(v - v.mT, v[:0]), None


class WrongHessian(Small):
    """Saves an intermediate that knows nothing of the coordinates."""

    def forward(self, skew, phase=None):
        if self.is_complex or any(self.shape[:-2]) or self.shape[-2] != self.shape[-1]:
            return super().forward(skew, phase)
        return (_DetachedFactor.apply(skew.double(), self.shape[-1]) * self.signs).to(self.dtype)


class _DetachedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, g):
        return g.detach()


class OfLinearLosses(Small):
    """Has second derivatives as if dL/dW were constant."""

    def forward(self, skew, phase=None):
        return _DetachedGradient.apply(super().forward(skew, phase))


class _WrongTangent(Function):
    @staticmethod
    def forward(v):
        return v.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def tangent(ctx, t):
        return 1.001 * t


class WrongTangent(Small):
    def forward(self, skew, phase=None):
        return super().forward(_WrongTangent.of(skew), phase)


class _LastOfBatch(torch.autograd.Function):
    """Keeps the gradient where the next one will overwrite it."""

    @staticmethod
    def forward(ctx, v):
        ctx.kept = torch.empty_like(v)
        return v.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.kept.copy_(g)


class LastOfBatch(Small):
    def forward(self, skew, phase=None):
        return super().forward(_LastOfBatch.apply(skew), phase)


class Dividing(Small):
    """Has an infinite gradient at zero coordinates."""

    def forward(self, skew, phase=None):
        norm = torch.linalg.vector_norm(skew.double()).pow(2).sqrt()
        return super().forward((skew * (norm.pow(2) / norm.pow(2))).to(skew.dtype), phase)


class WrongWhenLarge(Small):
    """Has a wrong gradient beyond the sizes of gradcheck."""

    def forward(self, skew, phase=None):
        return super().forward(skew + (0.1 * (skew - skew.detach()) if skew.numel() > 64 else 0), phase)


class Fading(StiefelPoint):
    """Has half the gradient."""

    def forward(self, stiefel):
        return super().forward((stiefel + stiefel.detach()) / 2)

"""Softsign: an activation of recurrences to begin with."""

from stiefelkit.scan import Activation


class Skeleton(Activation):
    """z / (1 + |z|); the derivative is (1 - |h|)^2."""

    def function(self, z):
        """The activation, differentiable."""
        return z / (1 + z.abs())

    def step(self, like, bias):
        """The activation in place."""
        return lambda z, saved: z.div_(z.abs().add_(1))

    def factors(self, h, saved):
        """Its derivative, by the states alone."""
        return ((1 - h.abs()).square_(),)

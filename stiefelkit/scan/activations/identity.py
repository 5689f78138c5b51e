"""The identity."""

from torch import Tensor

from stiefelkit.scan.activations.activation import Activation, Step

__all__ = ["Identity"]


class Identity(Activation):
    """z."""

    kernel = "identity"

    @classmethod
    def of_complex(cls) -> type[Activation]:
        """Itself."""
        return cls

    @staticmethod
    def function(z: Tensor) -> Tensor:
        """Z."""
        return z

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """Leaves z as it is."""
        return lambda z, saved: None

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """None."""
        return ()

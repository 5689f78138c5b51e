"""What a drift experiment is to measure."""

from dataclasses import dataclass

import torch

from stiefelkit.errors import OptionError, UnknownNameError, did_you_mean
from stiefelkit.experiments.checks import at_least, at_most, finite_positive
from stiefelkit.experiments.config import optimizers
from stiefelkit.experiments.frame_optimizers import PRECISIONS, check_method, own_optimizers, peer_optimizers

__all__ = ["DTYPES", "GRADIENTS", "UNCONSTRAINED", "Plan"]

DTYPES = {
    "complex128": torch.complex128,
    "complex64": torch.complex64,
    "float32": torch.float32,
    "float64": torch.float64,
}
GRADIENTS = ("random", "fixed", "rotation")
UNCONSTRAINED = "unconstrained"
"""The name of the reference: an ordinary weight that starts orthogonal and is held by nothing."""
WHO = "The drift experiment"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        steps: optimizer steps.
        methods: parametrizations, trained by `optimizer`; "unconstrained"; optimizers of frames, with ":fast" behind
            them for that precision; their peers. All of them if empty, but frames in precision "exact" only.
        sizes: (n, p) of the weights, n >= p.
        dtype: float32, float64, complex64 or complex128.
        gradients: "random" draws one for each step; "fixed" keeps the first; "rotation" is G = A W with one random
            skew A, which turns the weight for ever.
        optimizer: of the parametrizations, as in training.
        lr: its learning rate.
        step_length: of the first step of frames, the 2-norm of the skew A in W <- exp(-A) W, about; lr ||B||_2 of
            the multiplicative Cayley update.
        look_every: the error is looked at after one step out of so many in a row, drawn at random.
        threads: CPU threads.
        seed: fixes the initial weights and the gradients.
    """

    steps: int = 1000
    methods: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ((64, 64),)
    dtype: str = "float32"
    gradients: str = "random"
    optimizer: str = "adam"
    lr: float = 1e-3
    step_length: float = 1e-2
    look_every: int = 1
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        for name in ("steps", "look_every", "threads"):
            at_least(WHO, name, getattr(self, name), 1)
        at_least(WHO, "seed", self.seed, 0)
        at_most(WHO, "seed", self.seed, 2**63 - 1)
        at_most(WHO, "threads", self.threads, 1024)
        for name in ("lr", "step_length"):
            finite_positive(WHO, name, getattr(self, name))
        if not self.sizes:
            raise OptionError(f"{WHO} needs one size or more, got none.")
        for n, p in self.sizes:
            if not n >= p >= 1:
                raise OptionError(f"{WHO} needs sizes n x p with n >= p >= 1, got {n} x {p}.")
        for kind, value, known in (("dtype", self.dtype, DTYPES), ("gradients", self.gradients, GRADIENTS)):
            if value not in known:
                raise OptionError(f"{WHO} has no {kind} {value!r}{did_you_mean(value, known)}")
        optimizers.get(self.optimizer)
        maps, ours, peers = _known()
        known = [*maps, *ours, *(f"{name}:{PRECISIONS[1]}" for name in ours), *peers]
        for method in self.methods:
            if method.partition(":")[0] in ours:
                check_method(method)
            elif method not in known:
                raise UnknownNameError(
                    f"No parametrization or optimizer of frames is named {method!r}{did_you_mean(method, known)}"
                )
        if not self.methods:
            object.__setattr__(self, "methods", (*maps, *ours, *peers))


def _known() -> tuple[list[str], list[str], list[str]]:
    """Names of parametrizations, of our optimizers of frames, and of their peers."""
    from stiefelkit import available

    return [*available(), UNCONSTRAINED], list(own_optimizers()), peer_optimizers.names()

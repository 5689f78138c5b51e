"""What a drift experiment is to measure."""

from dataclasses import dataclass

import torch

from stiefelkit.errors import OptimizerError, OptionError, StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.measuring.moved_frames import check_method, own_optimizers, peer_optimizers
from stiefelkit.optim.frame_optimizer import PRECISIONS
from stiefelkit.training.checks import (
    at_least,
    finite_positive,
    known_words,
    step_length,
    tall_sizes,
    usable_device,
    usable_seed,
    usable_threads,
)
from stiefelkit.training.config import optimizers

__all__ = ["DTYPES", "GRADIENTS", "UNCONSTRAINED", "WEIGHT_DTYPES", "DriftPlan"]

DTYPES = {
    "complex128": torch.complex128,
    "complex64": torch.complex64,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Those that frames may be stored in while an optimizer moves them."""
WEIGHT_DTYPES = {**DTYPES, "bfloat16": torch.bfloat16}
"""Those of weights; what is below float32 has its coordinates in float32."""
GRADIENTS = ("random", "fixed", "rotation", "digits")
UNCONSTRAINED = "unconstrained"
"""The name of the reference: an ordinary weight that starts orthogonal and is held by nothing."""
WHO = "The drift experiment"


@dataclass(frozen=True)
class DriftPlan:
    """What to measure.

    Args:
        steps: optimizer steps.
        methods: parametrizations, trained by `optimizer`; "unconstrained"; optimizers of frames, with ":fast" behind
            them for that precision; their peers. All of them if empty, but frames in precision "exact" only, and
            parametrizations whose coordinate is a frame only with an `optimizer` that moves it.
        sizes: (n, p) of the weights, n >= p.
        dtype: float32, float64, complex64 or complex128; bfloat16 for parametrizations.
        gradients: "random" draws one for each step; "fixed" keeps the first; "rotation" is G = A W with one random
            skew A, which turns the weight for ever; "digits" trains the weight, between two fixed random layers, to
            tell handwritten digits apart.
        optimizer: of the parametrizations, as in training.
        lr: its learning rate.
        step_length: of the first step of frames, the 2-norm of the skew A in W <- exp(-A) W, about; lr ||B||_2 of
            the multiplicative Cayley update.
        look_every: the error is looked at after one step out of so many in a row, drawn at random.
        device: cpu or cuda.
        autocast: whether steps are made under autocast to bfloat16.
        tf32: whether the float32 products of a GPU may be lowered to TF32.
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
    device: str = "cpu"
    autocast: bool = False
    tf32: bool = False
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        for name in ("steps", "look_every"):
            at_least(WHO, name, getattr(self, name), 1)
        usable_seed(WHO, self.seed)
        usable_threads(WHO, self.threads)
        usable_device(WHO, self.device)
        if self.tf32 and torch.device(self.device).type != "cuda":
            raise OptionError(f"{WHO} needs a CUDA device for TF32, got {self.device!r}.")
        finite_positive(WHO, "lr", self.lr)
        step_length(WHO, self.step_length)
        tall_sizes(WHO, self.sizes)
        known_words(WHO, "dtype", [self.dtype], WEIGHT_DTYPES)
        known_words(WHO, "gradients", [self.gradients], GRADIENTS)
        moves_frames = getattr(optimizers.get(self.optimizer), "moves_frames", False)
        maps, ours, peers = _known()
        known = [*maps, *ours, *(f"{name}:{PRECISIONS[1]}" for name in ours), *peers]
        for method in self.methods:
            if method.partition(":")[0] in ours:
                check_method(method)
            elif method not in known:
                raise UnknownNameError(
                    f"No parametrization or optimizer of frames is named {method!r}{did_you_mean(method, known)}"
                )
        out_of_reach = [] if moves_frames else [name for name in self.methods or maps if _is_frame(name, self.dtype)]
        if self.methods and out_of_reach:
            raise OptimizerError(
                f"{WHO} needs an optimizer that keeps {out_of_reach[0]!r} on its manifold, got {self.optimizer!r}; "
                "name one with --optimizer, such as multiplicative_cayley."
            )
        if not self.methods:
            maps = [name for name in maps if name not in out_of_reach]
            object.__setattr__(self, "methods", (*maps, *ours, *peers))


def _is_frame(method: str, dtype: str) -> bool:
    """Whether a method is a parametrization with a coordinate that must stay on a manifold, at whatever size."""
    from stiefelkit import available

    cls = available().get(method)
    if cls is None or cls.supports((4, 4), WEIGHT_DTYPES[dtype]) is not None:
        return False
    try:
        return bool(cls((4, 4), dtype=WEIGHT_DTYPES[dtype]).manifolds)
    except StiefelkitError:
        return False


def _known() -> tuple[list[str], list[str], list[str]]:
    """Names of parametrizations, of our optimizers of frames, and of their peers."""
    from stiefelkit import available

    return [*available(), UNCONSTRAINED], list(own_optimizers()), peer_optimizers.names()

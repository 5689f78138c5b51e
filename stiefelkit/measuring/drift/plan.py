"""The plan of a drift experiment. Read for help, so torch comes in functions."""

from dataclasses import dataclass
from typing import ClassVar

from stiefelkit.errors import OptimizerError, OptionError, StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.measuring.races.plan import WIDE_DTYPES, Site
from stiefelkit.numbers import PRECISIONS, above, integer, validate_fields_
from stiefelkit.optim import names_in_words, optimizers
from stiefelkit.training.checks import STEP_LENGTH, Sizes, known_words, tall_sizes

WEIGHT_DTYPES = (*WIDE_DTYPES, "bfloat16")
"""Names of the dtypes of weights; coordinates of a bfloat16 weight are float32."""
GRADIENTS = ("random", "fixed", "rotation", "digits")
UNCONSTRAINED = "unconstrained"
"""The name of the reference: an ordinary weight that starts orthogonal and is held by nothing."""
SUBJECT = "The drift experiment"


@dataclass(frozen=True)
class DriftPlan(Site):
    """The weights, optimizers and gradients of a drift experiment.

    Args:
        steps: optimizer steps; 100000 for what adds up slowly.
        methods: separated by commas: parametrizations, "unconstrained", optimizers of frames ({of_frames}) and
            geoopt's; if left out all that --optimizer can train, and those of frames in precision exact.
        sizes: n, or n x p for tall frames (1024x64), separated by commas.
        dtype: float32, float64, complex64 or complex128; bfloat16 for parametrizations.
        gradients: random draws one for each step, fixed keeps the first, rotation turns the weight steadily, by
            G = A W with one random skew A, digits trains it to tell handwritten digits apart.
        optimizer: of the parametrizations: {free}, one that moves frames (the method "stiefel" needs such), or the
            name of an installed plugin.
        lr: its learning rate.
        step_length: lr ||B||_2, B = G W^H - W G^H, of the first step of a frame; at most 100.
        look_every: the error is looked at after one step, at random, out of so many in a row; more is faster, and may
            miss a peak.
        autocast: make the steps under autocast to bfloat16.
        tf32: let a GPU lower float32 products to TF32.
    """

    steps: int = 1000
    methods: tuple[str, ...] = ()
    sizes: Sizes = ((64, 64),)
    dtype: str = "float32"
    gradients: str = "random"
    optimizer: str = "adam"
    lr: float = 1e-3
    step_length: float = 1e-2
    look_every: int = 1
    autocast: bool = False
    tf32: bool = False

    subject: ClassVar[str] = SUBJECT

    def __post_init__(self) -> None:
        from stiefelkit.measuring.moved_frames import check_method, own_optimizers, peer_optimizers
        from stiefelkit.weights.attach import available

        super().__post_init__()
        validate_fields_(self, SUBJECT, steps=integer(1), look_every=integer(1), lr=above(0), step_length=STEP_LENGTH)
        if self.tf32 and not self.device.startswith("cuda"):
            raise OptionError(f"{SUBJECT} needs a CUDA device for TF32, got {self.device!r}.")
        tall_sizes(SUBJECT, self.sizes)
        if self.quick:
            object.__setattr__(self, "sizes", tuple(sorted(self.sizes, key=lambda size: size[0] * size[1] ** 2)))
        known_words(SUBJECT, "dtype", [self.dtype], WEIGHT_DTYPES)
        known_words(SUBJECT, "gradients", [self.gradients], GRADIENTS)
        moves_frames = getattr(optimizers.get(self.optimizer), "moves_frames", False)
        maps, ours, peers = [*available(), UNCONSTRAINED], list(own_optimizers()), peer_optimizers.names()
        methods = [*maps, *ours, *(f"{name}:{PRECISIONS[1]}" for name in ours), *peers]
        for method in self.methods:
            if method.partition(":")[0] in ours:
                check_method(method)
            elif method not in methods:
                raise UnknownNameError(
                    f"No parametrization or optimizer of frames is named {method!r}{did_you_mean(method, methods)}"
                )
        out_of_reach = [] if moves_frames else [name for name in self.methods or maps if _is_frame(name, self.dtype)]
        if self.methods and out_of_reach:
            raise OptimizerError(
                f"{SUBJECT} needs an optimizer that keeps {out_of_reach[0]!r} on its manifold, got {self.optimizer!r}; "
                "name one with --optimizer, such as multiplicative_cayley."
            )
        if not self.methods:
            maps = [name for name in maps if name not in out_of_reach]
            object.__setattr__(self, "methods", (*maps, *ours, *peers))


_free, _of_frames = names_in_words()
DriftPlan.__doc__ = (DriftPlan.__doc__ or "").replace("{free}", _free).replace("{of_frames}", _of_frames)


def _is_frame(method: str, dtype: str) -> bool:
    """Returns whether a method is a parametrization with a coordinate that must stay on a manifold, at any size."""
    import torch

    from stiefelkit.weights.attach import available

    cls, stored = available().get(method), getattr(torch, dtype)
    if cls is None or cls.supports((4, 4), stored) is not None:
        return False
    try:
        return bool(cls((4, 4), dtype=stored).manifolds)
    except StiefelkitError:
        return False

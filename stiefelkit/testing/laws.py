"""The table of the laws."""

from collections.abc import Callable

from stiefelkit.testing import forward, numerical, portable
from stiefelkit.testing.cases import Case
from stiefelkit.testing.running import named

__all__ = ["LAWS"]

LAWS: dict[str, Callable[[Case], None]] = named(
    {
        "frames": numerical.law_frames,
        "gradients": numerical.law_gradients,
        "second_derivatives": numerical.law_second_derivatives,
        "forward_mode": forward.law_forward_mode,
        "batched_gradients": forward.law_batched_gradients,
        "pure": numerical.law_pure,
        "threads": numerical.law_threads,
        "batch": numerical.law_batch,
        "round_trip": numerical.law_round_trip,
        "finite_gradients": numerical.law_finite_gradients,
        "decay": numerical.law_decay,
        "precision": numerical.law_precision,
        "schemes": portable.law_schemes,
        "linear": portable.law_linear,
        "checkpoint": portable.law_checkpoint,
        "functional_call": portable.law_functional_call,
        "compile": portable.law_compile,
        "contract": portable.law_contract,
    }
)
"""Name to law. Each takes a case and raises `LawBroken`."""

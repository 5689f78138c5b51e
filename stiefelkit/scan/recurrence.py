"""What a recurrence does, besides its tensors, as one value."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["GATED", "PLAIN", "SETTINGS", "TENSORS", "Recurrence"]

PLAIN, GATED = "plain", "gated"
"""The cells: h_t = act(x_t u^T + b + h_{t-1} w^T), and the gated one of `goru_scan`, whose matrices are stacked."""
TENSORS = ("x", "w", "h0", "u", "bias", "activation_bias")
"""The tensors of every recurrence, in their order; the last three may be None."""


class Recurrence(NamedTuple):
    """What `scan` and `goru_scan` have checked and hand on, in types that operators take.

    Attributes:
        cell: "plain" or "gated".
        activation: its name.
        sizes: rows alive at each step of packed input, or None.
        reverse: whether the last step comes first.
        last_only: whether the last states alone are asked for.
        half: whether Im h is left out of the gradient by w.
        backend: what runs it, no more "auto".
        structure: that of w if it is in factors, which stand in its place; else "".
    """

    cell: str
    activation: str
    sizes: Sequence[int] | None
    reverse: bool
    last_only: bool
    half: bool
    backend: str
    structure: str = ""


SETTINGS = "str cell, str activation, int[]? sizes, bool reverse, bool last_only, bool half, str backend, str structure"
"""A `Recurrence` in the schema of an operator."""

"""Functions that programs call."""

import triton
from triton import knobs

__all__ = ["inline"]


def inline(function):
    """Makes a function known to triton's compiler; its interpreter takes it as it is, for its calls take long."""
    return function if knobs.runtime.interpret else triton.jit(function)

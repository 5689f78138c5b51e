"""Functions that programs call."""

import triton
from triton import knobs

__all__ = ["inline"]


def inline(function):
    """Makes a function known to triton's compiler. Its interpreter takes it as it is: each call of its own takes long."""
    return function if knobs.runtime.interpret else triton.jit(function)

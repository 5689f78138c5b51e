"""Functions that programs call."""

import triton
from triton import knobs

__all__ = ["constant", "inline"]


def inline(function):
    """Makes a function known to triton's compiler; its interpreter takes it as it is, for its calls take long."""
    return function if knobs.runtime.interpret else triton.jit(function)


def constant(function):
    """Makes a function of constants, whose value is one, known to triton's compiler."""
    return function if knobs.runtime.interpret else triton.constexpr_function(function)

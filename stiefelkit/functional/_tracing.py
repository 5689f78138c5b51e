"""Whether what is done is written down, to be done again with other values."""

import torch

__all__ = ["is_jit_traced", "is_traced"]


def is_traced() -> bool:
    """Whether torch.compile, torch.export, make_fx or torch.jit.trace is tracing.

    No value may be branched on then, and no tensor kept for later that was made meanwhile.
    """
    if torch.compiler.is_compiling():
        return True
    # Only make_fx puts a proxy mode among the dispatch modes.
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
        return True
    return is_jit_traced()


def is_jit_traced() -> bool:
    """Whether torch.jit.trace is tracing, which does it twice and wants the same with and without gradients."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None

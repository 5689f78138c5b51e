"""Float32 products lowered as training scripts lower them, on any machine."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stiefelkit._torch import TorchDispatchMode, is_composite, kernels_of, lazy_conjugates, pop_mode, push_mode

# Which arguments of an operator are factors; what is added to the product is not rounded.
_FACTORS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv"), (0, 1)),
    **dict.fromkeys([f"aten::{name}" for name in ("addmm", "_addmm_activation", "addbmm", "baddbmm", "addmv")], (1, 2)),
}
# Kernels that multiply matrices out of Python's sight, unless they are entered with the mode on.
_MULTIPLIES_INSIDE = ("aten::linalg_matrix_exp",)
_LOWERED = {"cuda": "tf32", "cpu": "bf16"}
_LOCK = threading.Lock()
# How many are in, and what the flags were when the first came.
_inside = 0
_before: dict[str, str] = {}


class PrecisionFlags(Protocol):
    """The flag of torch's backends that lowers float32 products."""

    fp32_precision: str


def flags_of(kind: str) -> PrecisionFlags:
    """Returns the flag of products on a kind of device."""
    return torch.backends.cuda.matmul if kind == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@contextlib.contextmanager
def lowered_products() -> Iterator[None]:
    """Context in which float32 products are lowered to TF32 on CUDA and to bfloat16 on the CPU, where code allows it.

    Sets the flags of torch's backends as `torch.set_float32_matmul_precision("medium")` does, and sets them back. Many
    a CPU ignores its flag, and others heed it in some products and not in those with a vector or of complex matrices:
    a stand-in rounds the factors of all float32 and complex64 products to the ten bits of TF32, while the flag says
    lowered at the time of the product, so that code which takes the flag back is let alone.

    The flags are the process's. The stand-in reaches the thread that enters, its backward passes included; other
    threads enter themselves. Where they overlap, the first one in sets the flags and the last one out sets them back.
    """
    global _inside
    with _LOCK:
        if _inside == 0:
            for kind, lowered in _LOWERED.items():
                _before[kind] = _own(flags_of(kind))
                flags_of(kind).fp32_precision = lowered
        _inside += 1
    try:
        with _pushed(_Rounding()):
            yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0:
                for kind, value in _before.items():
                    flags_of(kind).fp32_precision = value


@contextlib.contextmanager
def _pushed(mode: TorchDispatchMode) -> Iterator[None]:
    # A mode's own __enter__ notes in the process, not the thread, that it is on: overlapping threads leave that set.
    push_mode(mode)
    try:
        yield
    finally:
        pop_mode()


class _Rounding(TorchDispatchMode):
    """Rounds the factors of products on devices whose flag says lowered."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile refuses to trace under other modes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        factors = _FACTORS.get(name.rstrip("_"))
        if factors is not None:
            rounded = [self._lowered(a) if i in factors else a for i, a in enumerate(args)]
            return func(*rounded, **kwargs)
        if types:
            return func(*args, **kwargs)
        if name in _MULTIPLIES_INSIDE or func.namespace not in ("aten", "prim", "prims"):
            kinds = {a.device.type for a in args if isinstance(a, Tensor)}
            kernels = kernels_of(kinds.pop()) if kinds else None
            if kernels is not None:
                with _pushed(self), lazy_conjugates():
                    return func.redispatch(kernels, *args, **kwargs)
        elif is_composite(func):
            # In inference mode a matmul arrives whole.
            with _pushed(self):
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def _lowered(self, a: object) -> object:
        if (
            not isinstance(a, Tensor)
            or type(a) not in (Tensor, torch.nn.Parameter)
            or a.dtype not in (torch.float32, torch.complex64)
            or a.device.type not in _LOWERED
        ):
            return a
        return a if flags_of(a.device.type).fp32_precision in ("ieee", "none") else _to_ten_bits(a)


def _to_ten_bits(a: Tensor) -> Tensor:
    """Rounds float32, or the parts of complex64, to the nearest number with ten bits behind the point."""
    if a.is_complex():
        return torch.view_as_complex(_to_ten_bits(torch.view_as_real(a.resolve_conj())))
    a = a.resolve_neg().contiguous()
    bits = a.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(torch.isfinite(a), rounded.view(torch.float32), a)


def _own(flags: PrecisionFlags) -> str:
    """Returns what a flag is set to; "none" if it follows a wider flag, which it must go on to do."""
    value = flags.fp32_precision
    flags.fp32_precision = "none"
    is_inherited = flags.fp32_precision == value
    flags.fp32_precision = value
    return "none" if is_inherited else value

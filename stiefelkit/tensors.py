"""Dtypes of weights, coordinates and computations; sharded and plain tensors."""

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stiefelkit.errors import DtypeError, shown

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

Device = torch.device | str | None  # the type of an argument `device`
Generator = torch.Generator | None  # the type of an argument `generator`


def check_tensors(who: str, *values: object) -> None:
    """Raises DtypeError unless all values are tensors."""
    for value in values:
        if not isinstance(value, Tensor):
            raise DtypeError(f"{who} needs tensors, got {shown(value)}.")


def check_dtype(who: str, dtype: object) -> None:
    """Raises DtypeError unless a dtype is one of floating or complex numbers."""
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(f"{who} needs a floating or complex dtype, got {shown(dtype)}.")


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Returns the dtype with fewer digits."""
    return a if torch.finfo(a).eps >= torch.finfo(b).eps else b


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns complex128 for a complex dtype and float64 for a real one."""
    return torch.complex128 if dtype.is_complex else torch.float64


def coordinate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the free coordinates of a weight: real, float64 for float64 and complex128, else float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a composite works its frames out: that of the weight, float32 at least."""
    return dtype if dtype.is_complex else coordinate_dtype(dtype)


def dtype_of_parts(parts: torch.dtype, is_complex: bool) -> torch.dtype:
    """Returns the dtype of numbers with such parts; torch's own `to_complex` is not traced by torch.compile."""
    if not is_complex:
        return parts
    return torch.complex128 if parts == torch.float64 else torch.complex64


def keep_precision(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Wraps the function of `Module._apply` so that tensors end in `coordinate_dtype(dtype)`, never below.

    Complex ones end in the complex dtype of that precision, and keep their imaginary part whatever they are cast to;
    integers, which `Module.type` casts as well, stay what they are. What is moved stays row-major: formats of memory
    are those of images.
    """

    def apply(t: Tensor) -> Tensor:
        if t.dim() in (4, 5) and not _keeps_rows(fn, t.dim()):
            row = t.flatten()
            moved = apply(row)
            return t if moved is row else moved.view(t.shape)
        moved = _silently(fn, t) if t.is_complex() else fn(t)
        wanted = coordinate_dtype(dtype)
        wanted = wanted.to_complex() if t.is_complex() else wanted
        wanted = wanted if t.is_floating_point() or t.is_complex() else t.dtype
        if moved.dtype == wanted:
            return moved
        return moved.to(wanted) if t.is_meta else t.to(device=moved.device, dtype=wanted)

    return apply


def keeps_values(fn: Callable[[Tensor], Tensor]) -> bool:
    """Returns whether what `Module._apply` is given keeps values: to_empty's empty_like does not.

    A cast and `to_empty` look the same to `_apply`; probing with random powers of two, which eight bits hold, tells
    them apart.
    """
    sample = torch.exp2(-torch.tensor([1.0 + byte % 4 for byte in os.urandom(64)], device="cpu"))  # no generator's
    probe = fn(sample.clone())
    return not probe.is_meta and torch.equal(probe.detach().cpu().real.float(), sample)


def followed(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that the function of `Module._apply` gives; a complex one stays complex, complex64 at least."""
    result = _silently(fn, torch.empty(0, dtype=dtype, device="cpu")).dtype
    if not dtype.is_complex:
        return result
    return torch.complex128 if result in (torch.float64, torch.complex128) else torch.complex64


def _keeps_rows(fn: Callable[[Tensor], Tensor], dim: int) -> bool:
    """Returns whether a function given to `Module._apply` keeps tensors row-major, unlike `.to(memory_format=)`."""
    sample = torch.empty((2,) * dim, device="cpu")
    try:
        return fn(sample).is_contiguous()
    except RuntimeError:  # the format is of another number of dimensions
        return False


def _silently(fn: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Calls without torch's warning that a complex tensor loses its imaginary part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(t)


def _is_dtensor(t: Tensor) -> "TypeIs[DTensor]":
    """Returns whether a tensor is a DTensor, without an import of torch.distributed.tensor."""
    return hasattr(t, "device_mesh")


def is_sharded(*tensors: Tensor) -> bool:
    """Returns whether one of the tensors is."""
    for t in tensors:
        if hasattr(t, "device_mesh"):  # without a call of `_is_dtensor`: weights ask at each read
            return True
    return False


def is_sharding(hook: Callable[..., Any]) -> bool:
    """Returns whether a hook of a module is FSDP2's."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def is_sharding_unit(module: nn.Module) -> bool:
    """Returns whether FSDP2 gathers and frees a module's parameters together, units inside left out."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def full_tensor(t: Tensor) -> Tensor:
    """Returns the tensor, gathered if it is sharded."""
    return t.full_tensor() if _is_dtensor(t) else t


def local_part(t: Tensor) -> Tensor:
    """Returns what this rank has of a tensor."""
    return t.to_local() if _is_dtensor(t) else t


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor that every rank has, with the placement of a sharded one."""
    if not _is_dtensor(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.contiguous(), like.device_mesh, like.placements, src_data_rank=None)


def as_on_the_first(value: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor of the first rank that shares `like`, if that is sharded; else the one given."""
    if not _is_dtensor(like):
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim).to_local()

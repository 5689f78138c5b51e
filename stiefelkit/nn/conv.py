"""Convolutions that keep norms as operators, with kernels of a stated size, and their transposes."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit._torch import Convolution as TorchConvolution
from stiefelkit._torch import class_name
from stiefelkit.contract.param import Parametrization
from stiefelkit.contract.paraunitary import Paraunitary
from stiefelkit.errors import OptionError, ShapeError, needs, shown
from stiefelkit.nn.recurrent import require_options
from stiefelkit.numbers import FLAG, as_python_number, integer, sizes
from stiefelkit.tensors import check_dtype
from stiefelkit.weights import attach


class Convolution(TorchConvolution):
    """Base of convolutions of any dimension: checks, the map of the kernel, and where the layer is orthogonal."""

    dims: ClassVar[int]
    """Number of axes of an image."""
    is_circular: bool
    """Whether images are padded by their other end."""
    padding: Any

    def _checked(self, options: dict[str, Any], **given: Any) -> dict[str, Any]:
        """Returns the arguments of torch's convolution, once a layer of them can be orthogonal."""
        name, mode = type(self).__name__, given["padding_mode"]
        out = channels(name, **{key: given[key] for key in ("in_channels", "out_channels", "groups", "bias")})
        out |= {key: each_axis(name, key, given[key], self.dims, 1) for key in ("kernel_size", "stride", "dilation")}
        needs(mode in ("circular", "zeros"), OptionError, name, 'padding_mode "circular" or "zeros"', mode)
        self.__dict__["is_circular"] = mode == "circular"
        require_options(type(self), given["parametrization"], options)
        if given["dtype"] is not None:
            check_dtype(name, given["dtype"])
        wraps, padding = _wraps(out["kernel_size"], out["dilation"]), as_python_number(given["padding"])
        is_known = not isinstance(padding, str) or padding in ("same", "valid")
        needs(is_known, OptionError, name, 'padding "same", "valid" or integers', shown(padding))
        same = tuple(wrap // 2 for wrap in wraps)
        is_asymmetric = any(wrap % 2 and step == 1 for wrap, step in zip(wraps, out["stride"], strict=True))
        is_moved = given["transposed"] or max(out["stride"]) > 1
        odd = 'an odd kernel along an axis of stride 1 for padding="same" of a strided or transposed convolution'
        needs(not (padding == "same" and is_asymmetric and is_moved), OptionError, name, odd, out["kernel_size"])
        if padding == "same" and not is_asymmetric:
            padding = same
        elif padding != "same":
            padding = each_axis(name, "padding", 0 if padding == "valid" else padding, self.dims, 0)
        circular = f'padding="same", {same} here, for circular images (padding_mode="zeros" takes any)'
        needs(not self.is_circular or padding in ("same", same), OptionError, name, circular, shown(padding))
        return {**out, "padding": padding}

    def _keep_orthogonal(self, parametrization: Parametrization, init: str | None, options: dict[str, Any]) -> None:
        """Puts the map on the kernel; raises OptionError where no kernel of this shape is orthogonal."""
        w, generator, given = self.weight, options.pop("generator", None), as_python_number(options)
        rows, columns = w.shape[0] // self.groups, w.shape[1]
        most = columns * math.prod(self._patch)
        wanted = f"at most {most} channels for each {columns} of the larger image, where strides leave pixels out"
        got = f"{rows}; take a kernel as large as the stride, and a dilation without common factor with it"
        needs(self._patch == self.stride or rows <= most, OptionError, type(self).__name__, wanted, got)
        maps: dict[str, Any] = {"parametrization": parametrization, "options": given, "dtype": w.dtype}
        param = Paraunitary(w.shape, groups=self.groups, stride=self._patch, device=w.device, **maps)
        attach.attach_map(self, "weight", param, init, generator)

    def _check_reach(self, image: tuple[int, ...], reach: Sequence[int]) -> None:
        """Raises ShapeError for circular images around which the kernel would go more than once."""
        if any(n < ends for n, ends in zip(image, reach, strict=False)):
            wanted = f"circular images of at least {tuple(reach)}, which its kernel reaches over an end"
            raise ShapeError(f"{class_name(self)} needs {wanted}, got {tuple(image)}; sk.nn.CayleyConv2d takes any.")

    @property
    def _patch(self) -> tuple[int, ...]:
        """Of the pixels that a step along each axis passes, how many are under the kernel.

        Taps lie at multiples of the dilation d, steps at multiples of the stride s: both at multiples of gcd(s, d),
        and so, between those, a kernel of stride s / gcd(s, d).
        """
        geometry = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        return tuple(min(taps, step // math.gcd(step, d)) for taps, step, d in geometry)

    @property
    def is_orthogonal(self) -> bool:
        """Whether the map's kernels have all min(inputs, outputs) singular values 1 on every image; else at most 1.

        With zeros around the image: only without padding, where outputs are no more than inputs, or with padding on
        both sides by the whole kernel but one tap, where inputs are no more; a transposed layer the other way round.
        """
        if self.is_circular:
            return True
        rows, columns = self.weight.shape[0] // self.groups, self.weight.shape[1] * math.prod(self._patch)
        padding = (0,) * self.dims if self.padding == "valid" else self.padding
        if isinstance(padding, str):
            return False
        wraps = _wraps(self.kernel_size, self.dilation)
        keeps_outputs = self._patch == self.stride
        keeps_outputs &= all(p >= wrap for p, wrap in zip(padding, wraps, strict=True))
        # A transposed layer may grow an image beyond the last step, whose rows are missing then.
        keeps_outputs &= all(more < step for more, step in zip(self.output_padding, self.stride, strict=True))
        return (rows <= columns and not any(padding)) or (rows >= columns and keeps_outputs)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", circular" if self.transposed and self.is_circular else "")


class _Forward(Convolution):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = "same",
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        parametrization: Parametrization = "cayley",
        init: str | None = None,
        **options: Any,
    ):
        given = {key: value for key, value in locals().items() if key not in ("self", "options", "__class__")}
        checked = self._checked(options, transposed=False, **given)
        super().__init__(**checked, padding_mode=given["padding_mode"], device=device, dtype=dtype)
        self._keep_orthogonal(parametrization, init, options)

    def forward(self, input: Tensor) -> Tensor:
        image = input.shape[-self.dims :]
        if self.is_circular:
            if any(n % step for n, step in zip(image, self.stride, strict=False)):
                requirement = f"circular images whose sizes the stride {self.stride} divides"
                raise ShapeError(f"{class_name(self)} needs {requirement}, got {tuple(image)}.")
            wraps = _wraps(self.kernel_size, self.dilation)
            self._check_reach(image, [-(-wrap // 2) for wrap in wraps] if self.padding == "same" else self.padding)
        return super().forward(input)


class _Transposed(Convolution):
    """The adjoint of a convolution, with circular images as well, which torch's transposed ones do not have."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = "same",
        output_padding: int | tuple[int, ...] | None = None,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: str = "circular",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        parametrization: Parametrization = "cayley",
        init: str | None = None,
        **options: Any,
    ):
        given = {key: value for key, value in locals().items() if key not in ("self", "options", "__class__")}
        out = self._checked(options, transposed=True, **given)
        geometry = zip(out["kernel_size"], out["stride"], out["dilation"], out["padding"], strict=True)
        same = tuple(step - 1 - (taps - 1) * d + 2 * p for taps, step, d, p in geometry)
        if output_padding is None:
            output_padding = same if self.is_circular or padding == "same" else 0
        extra = each_axis(type(self).__name__, "output_padding", output_padding, self.dims, 0)
        name, circular = type(self).__name__, f"output_padding={same} for circular images"
        needs(not self.is_circular or extra == same, OptionError, name, circular, extra)
        super().__init__(**out, output_padding=extra, device=device, dtype=dtype)
        self._keep_orthogonal(parametrization, init, options)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Applies the layer; see the class. `output_size` is for zeros around the image, as of torch's."""
        if not self.is_circular:
            return super().forward(input, output_size)
        no_size = "no output_size for circular images"
        needs(output_size is None, OptionError, class_name(self), no_size, shown(output_size))
        # Repeated as far as taps reach over an end, and cut to one image.
        ends, cut = [], []
        for taps, step, d, p in zip(self.kernel_size, self.stride, self.dilation, self.padding, strict=True):
            q = -(-max(p, (taps - 1) * d - p) // step)
            ends = [q, q, *ends]
            cut.append(step * q + p)
        self._check_reach(input.shape[-self.dims :], ends[::-2])
        call = F.conv_transpose1d if self.dims == 1 else F.conv_transpose2d
        batched = input if input.dim() == self.dims + 2 else input[None]
        geometry = self.stride, tuple(cut), self.output_padding, self.groups, self.dilation
        y = call(F.pad(batched, ends, "circular"), self.weight, self.bias, *geometry)
        return y if batched is input else y[0]


class OrthogonalConv2d(_Forward, nn.Conv2d):
    """`torch.nn.Conv2d` that is orthogonal as an operator: its singular values are 1, not only its kernel's.

    It keeps norms where it has as many outputs as inputs or more, and those of what its rows span where it has fewer.
    The kernel is a product of projectors and one frame (`weight`; Li et al. 2019, strides as Boissin et al. 2025), so
    that any number of taps, stride, dilation and groups will do; refused is what cannot be orthogonal: more outputs
    than the pixels that are seen, one channel a group of stride 1. `sk.metrics.lipschitz` measures
    the operator, `sk.drift` the kernel, and `sk.bake` leaves a kernel of torch's.

    Circular images are orthogonal, to rounding. With zeros around the image the norm is still at most 1, and
    `is_orthogonal` says where all singular values are 1: with padding="same" they are not, at the edges.

    Args:
        in_channels, out_channels, groups, bias, device: as of torch's.
        kernel_size, stride, dilation: integers, or one for each axis; images need sizes that the stride divides.
        padding, padding_mode: "same" (an output for each step) and "circular", or with "zeros" also "valid", integers.
        dtype: of weight and bias, real or complex.
        parametrization: of projectors and frame, a registered name or a class.
        init: a scheme of that map; "identity" leaves an image as it is, where kernel sizes are odd and strides 1.
        **options: of the map, and `generator=`.

    Shape:
        (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride) with padding="same".

    References:
        Li, Haque, Anil, Lucas, Grosse, Jacobsen, Preventing gradient attenuation in Lipschitz constrained convolutional
        networks, NeurIPS 2019.
        Boissin, Mamalet, Fel, Picard, Massena, Serrurier, An adaptive orthogonal convolution scheme for efficient and
        flexible CNN architectures, ICML 2025.

    >>> layer = OrthogonalConv2d(4, 8, 3, stride=2, bias=False)
    >>> x = torch.randn(1, 4, 6, 6)
    >>> layer(x).shape, layer.is_orthogonal
    (torch.Size([1, 8, 3, 3]), True)
    """

    dims: ClassVar[int] = 2


class OrthogonalConv1d(_Forward, nn.Conv1d):
    """`torch.nn.Conv1d` that is orthogonal as an operator; see `OrthogonalConv2d`."""

    dims: ClassVar[int] = 1


class OrthogonalConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` that is orthogonal as an operator: the adjoint of an `OrthogonalConv2d`.

    Circular images, which torch's layer does not have, grow by the stride. Arguments and errors are those of
    `OrthogonalConv2d`, in the order of torch's layer; `output_padding`, where left out, is what padding="same" needs.

    Shape:
        (B, in_channels, H, W) to (B, out_channels, stride H, stride W) with padding="same".

    >>> down = OrthogonalConv2d(2, 8, 2, stride=2)
    >>> up = OrthogonalConvTranspose2d(8, 2, 2, stride=2)
    >>> up(down(torch.randn(1, 2, 6, 6))).shape
    torch.Size([1, 2, 6, 6])
    """

    dims: ClassVar[int] = 2


class OrthogonalConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` that is orthogonal as an operator; see `OrthogonalConvTranspose2d`."""

    dims: ClassVar[int] = 1


def _wraps(kernel_size: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Returns how far the last tap lies behind the first, along each axis."""
    return [(taps - 1) * d for taps, d in zip(kernel_size, dilation, strict=True)]


def channels(who: str, *, groups: object, bias: object, **sides: object) -> dict[str, Any]:
    """Returns the arguments; raises OptionError unless they are integers, which groups divides, and a flag."""
    out = {key: integer(1).require(who, key, value) for key, value in {**sides, "groups": groups}.items()}
    for key in sides:
        divided = f"{key} that groups={out['groups']} divides"
        needs(out[key] % out["groups"] == 0, OptionError, who, divided, out[key])
    return {**out, "bias": FLAG.require(who, "bias", bias)}


def each_axis(who: str, key: str, value: object, dims: int, low: int) -> tuple[int, ...]:
    """Returns an integer for each axis; raises OptionError unless it is one, or one for each."""
    value = as_python_number(value)
    axes = (value,) * dims if type(value) is int else sizes(value)
    if axes is None or len(axes) != dims or min(axes) < low:
        raise OptionError(f"{who} needs an integer {key} >= {low}, or {dims} of them, got {shown(value)}.")
    return axes

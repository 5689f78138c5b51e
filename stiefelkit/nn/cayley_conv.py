"""Convolutions of circular images that are Cayley transforms of skew convolutions, worked out by frequency."""

import itertools
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from stiefelkit import init as start
from stiefelkit._torch import is_exported, is_jit_traced
from stiefelkit.errors import DtypeError, OptionError, ShapeError
from stiefelkit.functional import cayley, cayley_inverse
from stiefelkit.functional._packing import remembered
from stiefelkit.nn.conv import channels, each_axis
from stiefelkit.numbers import one_of
from stiefelkit.tensors import coordinate_dtype
from stiefelkit.weights.modules import CoordinateParameters


class _CayleyConv(CoordinateParameters):
    coordinate_parameters: ClassVar[tuple[str, ...]] = ("skew", "diagonal")
    dims: ClassVar[int]
    signs: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        groups: int = 1,
        bias: bool = True,
        *,
        init: str = "haar",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        name = type(self).__name__
        found = channels(name, in_channels=in_channels, out_channels=out_channels, groups=groups, bias=bias)
        self.in_channels, self.out_channels, self.groups, has_bias = found.values()
        self.kernel_size = each_axis(name, "kernel_size", kernel_size, self.dims, 1)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in (torch.float32, torch.float64):
            raise DtypeError(f"{name} needs float32 or float64, the dtypes of Fourier transforms, got {dtype}.")
        sides = self.in_channels // self.groups, self.out_channels // self.groups
        self.is_wide = sides[1] < sides[0]
        n, p = self._frame_shape = max(sides), min(sides)
        self._offsets = [*itertools.product(*(range(-((k - 1) // 2), k // 2 + 1) for k in self.kernel_size))]
        taps, after = len(self._offsets), len(self._offsets) - 1 - self._offsets.index((0,) * self.dims)
        triangle, factory = p * (p - 1) // 2, {"device": device, "dtype": dtype}
        self.skew = nn.Parameter(torch.empty(self.groups, taps, triangle + (n - p) * p, **factory))
        self.diagonal = nn.Parameter(torch.empty(self.groups, after, p, **factory))
        self.register_buffer("signs", torch.ones(self.groups, p, dtype=torch.int8, device=device))
        self.bias = nn.Parameter(torch.empty(self.out_channels, **factory)) if has_bias else None
        self._init = one_of(*start.SCHEMES).require(name, "init", init)
        if not self.skew.is_meta:
            self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the middle tap, a frame, and zeros for the others; the bias as torch does."""
        skew, d = cayley_inverse(start.draw(self._init, (self.groups, *self._frame_shape), torch.float64, generator))
        self.diagonal.zero_()
        self.skew.zero_()[:, self._offsets.index((0,) * self.dims)] = skew.to(self.skew)
        self.signs.copy_(d.sign())
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_channels // self.groups * len(self._offsets))
            self.bias.uniform_(-bound, bound)

    def frames(self, *size: int) -> Tensor:
        """Returns the frames of all frequencies of a size, as `rfftn` orders them, shape (groups, frequencies, n, p).

        n and p are the larger and the smaller number of channels of a group.
        """
        n, p = self._frame_shape
        waves = torch.view_as_real(_waves(self.kernel_size, tuple(size), self.skew.device))
        cos, sin = waves.view(2, -1, len(self._offsets)).unbind()
        skew, diagonal = self.skew.double(), self.diagonal.double()
        parts = [cos @ skew, sin @ skew, sin[:, len(self._offsets) - diagonal.shape[1] :] @ diagonal]
        places = _places(p, skew.shape[-1], skew.device)
        packed = torch.cat(parts, -1).index_select(-1, places).to(coordinate_dtype(self.skew.dtype))
        w = cayley(packed, n, p, phase=packed.new_zeros(*packed.shape[:-1], p))
        return w * self.signs[:, None, None, :].to(w.dtype)

    def kernel(self, *size: int) -> Tensor:
        """Returns the kernel that the layer has on images of a size, (out_channels, in_channels / groups, *size).

        Tap 0 stands first: `irfftn` of the frames. It has as many taps as the image, which decay from the middle.
        """
        size = each_axis(type(self).__name__, "size", size, self.dims, 1)
        w = self.frames(*size)
        w = (w.mH if self.is_wide else w).movedim(1, -1).unflatten(-1, (*size[:-1], size[-1] // 2 + 1)).flatten(0, 1)
        return torch.fft.irfftn(w, size, tuple(range(-self.dims, 0)))

    @torch.no_grad()
    def baked(self, *size: int) -> nn.Module:
        """Returns torch's circular convolution that does the same to images of a size, to rounding; ONNX has it."""
        axes, call = tuple(range(-self.dims, 0)), getattr(nn, f"Conv{self.dims}d")
        # torch correlates, with the tap of the pixel itself at (n - 1) // 2.
        state = {"weight": self.kernel(*size).flip(axes).roll([(n + 1) // 2 for n in size], axes), "bias": self.bias}
        options = {"padding": "same", "padding_mode": "circular", "groups": self.groups, "bias": self.bias is not None}
        baked = call(self.in_channels, self.out_channels, size, **options).to(self.skew)
        baked.load_state_dict({name: tensor for name, tensor in state.items() if tensor is not None})
        return baked

    def forward(self, input: Tensor) -> Tensor:
        name, image = type(self).__name__, ", ".join("HW"[-self.dims :])
        if is_exported():
            kernel = f"a kernel for images of one size, got {name}; put layer.baked({image}) in its place"
            raise OptionError(f"torch.onnx.export needs {kernel}.")
        images = input if input.dim() == self.dims + 2 else input[None]
        is_image = images.dim() == self.dims + 2 and images.shape[1] == self.in_channels and min(images.shape[2:]) > 0
        if not is_image or not images.is_floating_point():
            wanted = f"floating images ({self.in_channels}, {image}), or a batch of them"
            raise ShapeError(f"{name} needs {wanted}, got {input.dtype} of shape {tuple(input.shape)}.")
        size, axes = images.shape[2:], tuple(range(-self.dims, 0))
        w = self.frames(*size)
        # MKL takes no empty batch, and a trace may meet one.
        is_padded = is_jit_traced() or images.shape[0] == 0
        filled = torch.cat([images, images.new_zeros(1, *images.shape[1:])]) if is_padded else images
        spectrum = torch.fft.rfftn(filled.to(w.real.dtype), dim=axes)
        x = spectrum.flatten(2).unflatten(1, (self.groups, -1)).permute(1, 3, 2, 0)  # (groups, frequencies, c, B)
        y = (w.mH if self.is_wide else w) @ x
        y = y.permute(3, 0, 2, 1).flatten(1, 2).unflatten(-1, spectrum.shape[2:])
        out = torch.fft.irfftn(y, size, axes).to(input.dtype)
        out = out[:-1] if is_padded else out
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).view(-1, *(1,) * self.dims)
        return out if images is input else out[0]

    def extra_repr(self) -> str:
        more = (f", groups={self.groups}" if self.groups > 1 else "") + (", bias=False" if self.bias is None else "")
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{more}"


class CayleyConv2d(_CayleyConv):
    """A convolution of circular images of any size that is orthogonal: the Cayley transform of a skew convolution.

    :math:`Q = (I + A)^{-1} (I - A) D`. A has a real kernel of k x k taps with :math:`A_{ij}(t) = -A_{ji}(-t)`, so that
    at each frequency its Fourier transform is skew-Hermitian, Q is a frame, and all of them are one call of
    `stiefelkit.functional.cayley`. D are signs. Q has as many taps as the image, which decay: `baked` fixes one size.
    All-pass filters of one channel a group, which no finite kernel gives, are among them. With fewer outputs than
    inputs Q is the adjoint of a tall one. Singular values are 1 to rounding. Strides: `torch.nn.PixelUnshuffle`.

    Coordinates are plain parameters for any optimizer: `skew`, the taps of :math:`A_{ij}` below the diagonal, and
    `diagonal`, those of its diagonal, which is odd: :math:`n^2 k^2 / 2 - n / 2` numbers if n channels are kept and k is
    odd. Costs an inverse of complex matrices for each frequency, (H, W / 2 + 1) of them.

    Args:
        in_channels, out_channels, bias, device, dtype: as of torch's, the dtype float32 or float64.
        kernel_size: an odd or even integer, or one for each axis.
        groups: with a skew convolution each.
        init, generator: a scheme of `stiefelkit.init`, by which the middle tap is drawn; the others start as zeros.

    Shape:
        (B, in_channels, H, W) to (B, out_channels, H, W).

    References:
        Trockman, Kolter, Orthogonalizing convolutional layers with the Cayley transform, ICLR 2021.
        Xiao, Bahri, Sohl-Dickstein, Schoenholz, Pennington, Dynamical isometry and a mean field theory of CNNs: how to
        train 10,000-layer vanilla convolutional neural networks, ICML 2018, for the start.

    >>> layer, x = CayleyConv2d(4, 4, 3, bias=False), torch.randn(1, 4, 6, 7)
    >>> bool(torch.isclose(layer(x).norm(), x.norm()))
    True
    """

    dims: ClassVar[int] = 2


class CayleyConv1d(_CayleyConv):
    """A convolution of circular sequences that is orthogonal; see `CayleyConv2d`."""

    dims: ClassVar[int] = 1


@remembered
def _waves(kernel_size: tuple[int, ...], size: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the parts of exp(-i t f) for all frequencies f and taps t, of shape (2, frequencies, taps).

    They stand as pairs in one complex128 vector, since `remembered` keeps no floating tensors. Angles are counted in
    whole parts of a turn, so that a frequency that is its own conjugate has no imaginary part to the bit, and its frame
    is real.
    """
    total, dims = math.prod(size), len(size)
    counts = [*size[:-1], size[-1] // 2 + 1]
    parts = (torch.arange(n, device=device) * (total // m) for n, m in zip(counts, size, strict=True))
    offsets = (torch.arange(-((k - 1) // 2), k // 2 + 1, device=device) for k in kernel_size)
    f, t = (torch.cartesian_prod(*each).view(-1, dims) for each in (parts, offsets))
    turns = (f[:, None] * t).sum(-1) % total
    angle = turns.double() * (2 * math.pi / total)
    sin = torch.where(2 * turns % total == 0, 0.0, -angle.sin())
    return torch.view_as_complex(torch.stack([angle.cos(), sin]).view(-1, 2))


@remembered
def _places(p: int, total: int, device: torch.device) -> Tensor:
    """Returns where `functional.cayley` finds real parts, imaginary parts and the diagonal, side by side."""
    below, triangle = torch.tril_indices(p, p, -1, device=device), p * (p - 1) // 2
    table = torch.arange(2 * total, 2 * total + p, device=device).diag_embed()
    lower, rest = torch.arange(total, device=device).split([triangle, total - triangle])
    table[below[0], below[1]], table[below[1], below[0]] = lower, lower + total
    return torch.cat([table.flatten(), rest, rest + total])

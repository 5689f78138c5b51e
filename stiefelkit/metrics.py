"""Distances of matrices from frames, what rounding alone causes, and the singular values of layers as operators."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from stiefelkit.errors import NonFiniteError, OptionError, ShapeError, needs, shown, suggest_names
from stiefelkit.numbers import FLAG, as_python_number, check_counts, integer, optional, sizes
from stiefelkit.tensors import check_dtype, check_tensors, working_dtype

__all__ = [
    "FRAME_TOLERANCE", "Lipschitz", "bits_lost", "defect", "frame_tolerance", "lipschitz", "orthogonality_error",
    "permitted_error", "permitted_return", "rounding_limit", "scale_of", "working_dtype",
]  # fmt: skip
suggest_names(__name__)

FRAME_TOLERANCE = 100
"""A frame has :math:`‖W^H W - I‖_F` at most this many times the rounding limit of its dtype.

In bfloat16 and float16, where that would admit any matrix, at most 4 limits or 0.1, the larger.
"""
_WORK = 2**32  # multiplications in decompositions, up to a factor, and 128 times the numbers in them, begun by default
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FAILS = 1e-10
_NEAR = 1.02  # lanczos steps end where no stretch is larger than that found by more than this


def orthogonality_error(w: Tensor) -> Tensor:
    r"""Returns :math:`‖W^H W - I‖_F` in float64, shape (*), for matrices w of shape (*, n, p), of any dtype.

    Of a wide weight, whose rows are orthonormal, pass `.mT`.

    >>> import torch
    >>> orthogonality_error(torch.eye(3)).item()
    0.0
    """
    if not isinstance(w, Tensor):
        check_tensors("orthogonality_error", w)
    if w.dim() < 2 or w.shape[-2] < w.shape[-1]:
        got = f"shape {tuple(w.shape)}; of a wide weight pass .mT"
        needs(False, ShapeError, "orthogonality_error", "matrices of shape (*, n, p), n >= p", got)
    return torch.linalg.matrix_norm(defect(w.detach().to(working_dtype(w.dtype))))


def defect(w: Tensor) -> Tensor:
    """Returns :math:`W^H W - I` of matrices w, (*, n, p), in their dtype, summed over blocks of max(16, p) rows.

    In one long sum the rounding errors of equal rows align and grow as :math:`n eps`.
    """
    n, p = w.shape[-2:]
    rows = max(16, p)
    if n <= rows:
        gram = w.mH @ w
    else:
        even = n - n % rows
        blocks = w[..., :even, :].unflatten(-2, (even // rows, rows))
        gram = (blocks.mH @ blocks).sum(-3)
        gram = gram if even == n else w[..., even:, :].mH @ w[..., even:, :] + gram
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram


def rounding_limit(p: int, dtype: torch.dtype) -> float:
    r"""Returns the cost of rounding an exact p x p frame to a dtype: :math:`0.30 eps √p` in :math:`‖W^H W - I‖_F`.

    A tall frame of n rows whose entries are alike costs about :math:`√(p / n)` of it, one with few rows up to several.

    Measured on Haar, Cayley and polar frames; :math:`3.6 · 10^{-8} √p` in float32. Below p = 16 single draws scatter by
    up to one eps around it.

    >>> import torch
    >>> round(rounding_limit(64, torch.float32) / 2.9e-7, 1)
    1.0
    """
    check_counts("rounding_limit", p=p)
    check_dtype("rounding_limit", dtype)
    return _limit(p, dtype)


def _limit(p: int, dtype: torch.dtype) -> float:
    return 0.30 * torch.finfo(dtype).eps * math.sqrt(p)


def frame_tolerance(p: int, dtype: torch.dtype) -> float:
    """Returns the largest :math:`‖W^H W - I‖_F` taken for a frame of p columns in a dtype; see `FRAME_TOLERANCE`."""
    limit = _limit(p, dtype)
    return min(FRAME_TOLERANCE * limit, max(4 * limit, 0.1))


def scale_of(w: Tensor, dtype: torch.dtype) -> float | None:
    """Returns the s of matrices w = s W, (*, n, p), W frames up to the tolerance of a dtype; None if there is none."""
    s = torch.linalg.svdvals(w.detach().to(working_dtype(w.dtype)))
    scale = (s.max() + s.min()).item() / 2
    if not 0 < scale < math.inf:
        return None
    error = orthogonality_error(w / scale).max().item()
    return scale if error <= frame_tolerance(w.shape[-1], dtype) else None


def permitted_error(p: int, dtype: torch.dtype) -> float:
    """Returns the largest :math:`‖W^H W - I‖_F` of an exact frame of p columns in a dtype.

    1.2 limits + eps, in double precision 20 limits.
    """
    limit = rounding_limit(p, dtype)
    return 20 * limit if dtype in (torch.float64, torch.complex128) else 1.2 * limit + torch.finfo(dtype).eps


def permitted_return(shape: Sequence[int], dtype: torch.dtype, *, unspared: bool = False) -> float:
    """Returns how far a frame of a shape (*, n, p) and dtype, exact to rounding, may come back from its coordinates.

    8 limits; 100 for every 64 rows in float64 and complex128, where the inverse of the map has nothing finer to hide
    its rounding in, and where the map is `unspared`: its fixed chart may put the frame where rounding costs as much.
    """
    wide = unspared or dtype == working_dtype(dtype)
    return (100 * max(1.0, shape[-2] / 64) if wide else 8) * rounding_limit(shape[-1], dtype)


def bits_lost(w: Tensor | float, limit: float | None = None) -> float:
    """Returns the bits of orthogonality lost beyond rounding: :math:`log_2(max(error / limit, 1))`.

    Of tall matrices, whose rounding may cost less than the limit, up to :math:`log_2 √(n / p)` more are not seen.

    Args:
        w: matrices (*, n, p), real or complex, of which the worst counts, and wide ones by rows; or an error.
        limit: of an error; that of a matrix follows from its shape and dtype, as `rounding_limit` says.

    >>> bits_lost(torch.eye(8, 4)), bits_lost(8e-7, 1e-7)
    (0.0, 3.0)
    """
    if limit is None:
        if not isinstance(w, Tensor):
            raise OptionError(f"bits_lost needs a matrix, or an error and its limit, got {w!r} alone.")
        tall = w if w.dim() < 2 or w.shape[-2] >= w.shape[-1] else w.mH
        w, limit = orthogonality_error(tall).max().item(), rounding_limit(tall.shape[-1], tall.dtype)
    return math.log2(max(float(w) / limit, 1.0))


class Lipschitz(NamedTuple):
    """Singular values of a linear layer as an operator: how far it stretches, and shrinks, differences of inputs.

    Attributes:
        largest: the largest singular value, the layer's Lipschitz constant; the largest stretch found, if not exact.
        smallest: the smallest of min(inputs, outputs) singular values; the smallest found, if not exact.
        bound: of the stretch of every input: `largest` if exact, else one that fails for one in 1e10 of the directions
            that the search may start from.
        is_exact: whether all singular values were computed, to rounding.
        residual: :math:`‖A^H A v - s^2 v‖ / s^2` at the largest stretch s found, along v; 0 if exact.
    """

    largest: float
    smallest: float
    bound: float
    is_exact: bool
    residual: float


def lipschitz(
    layer: nn.Module,
    input_size: int | Sequence[int] | None = None,
    *,
    exact: bool | None = None,
    steps: int = 100,
    dtype: torch.dtype | None = None,
) -> Lipschitz:
    """Returns the extreme singular values of a layer in evaluation mode that is linear up to a bias.

    A convolution whose kernel is a frame as a matrix need not be 1-Lipschitz; this measures the operator. FFT takes
    apart the axes along which the layer commutes with shifts, found by value (Sedghi, Gupta, Long 2018): circular
    padding of any stride, groups and dilation, also in a chain of layers. Where the rest is too large to decompose,
    Lanczos steps on the layer itself find the largest and the smallest stretch from inside, and end where the largest
    is within 2 % of a bound that holds for nearly all starts (Kuczynski, Wozniakowski 1992), after some eighty.

    Args:
        layer: any module that maps a tensor with a batch axis to one; real or complex.
        input_size: shape of one input, without the batch: (channels, height, width), or (height, width) for a
            convolution; the layer's `in_features` if left out.
        exact: True computes all singular values at any cost, False takes Lanczos steps; None decides by size.
        steps: Lanczos steps, at most.
        dtype: of the inputs; that of the first weight if left out.

    Raises:
        NonFiniteError: a weight is not finite, or products of those of a chain are not.

    >>> import torch
    >>> conv = torch.nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    >>> _ = torch.nn.init.constant_(conv.weight, 1 / 3)  # a frame as a matrix, of norm 1
    >>> round(lipschitz(conv, (8, 8)).largest, 4)
    3.0
    """
    needs(isinstance(layer, nn.Module), OptionError, "lipschitz", "a torch.nn.Module", layer)
    exact = optional(FLAG).require("lipschitz", "exact", exact)
    if dtype is not None:
        check_dtype("lipschitz", dtype)
    steps = integer(1).require("lipschitz", "steps", steps)
    has_size = not any(is_lazy(p) for p in layer.parameters())
    needs(has_size, OptionError, "lipschitz", "a layer with a size", "a lazy one; call it on a batch first")
    is_finite = all(not p.is_meta and bool(p.isfinite().all()) for p in layer.parameters())
    needs(is_finite, NonFiniteError, "lipschitz", "finite weights, none on meta", f"those of a {type(layer).__name__}")
    operator = _Operator(layer, _input_shape(layer, input_size), dtype)
    with operator.held():
        operator.check()
        grid = operator.grid()
        frequencies = math.prod(grid)
        n, m = math.prod(operator.shape) // frequencies, math.prod(operator.out_shape) // frequencies
        if exact or (exact is None and frequencies * n * m * max(128, min(n, m)) <= _WORK):
            values = _by_frequency(operator, grid)
            largest, smallest = values.max().item() * operator.unit, values.min().item() * operator.unit
            return Lipschitz(largest, smallest, largest, True, 0.0)
        return _lanczos(operator, steps)


def _input_shape(layer: nn.Module, input_size: int | Sequence[int] | None) -> tuple[int, ...]:
    size = getattr(layer, "in_features", None) if input_size is None else input_size
    needs(size is not None, OptionError, "lipschitz", f"the input_size of a {type(layer).__name__}", "none")
    shape = sizes([size] if isinstance(as_python_number(size), int) else size)
    if shape is None or not all(length > 0 for length in shape):
        raise OptionError(f"lipschitz needs positive integers in input_size, got {shown(input_size)}.")
    if isinstance(layer, _CONVOLUTIONS) and len(shape) == len(layer.kernel_size):
        return layer.in_channels, *shape
    return shape


class _Operator:
    """The linear part of a layer, by what the layer does to inputs and to gradients."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype | None):
        self.layer, self.shape = layer, shape
        weights = (getattr(module, "weight", None) for module in layer.modules())  # a mapped one is no parameter
        tensors = [w for w in (*weights, *layer.parameters(), *layer.buffers()) if isinstance(w, Tensor)]
        first = next((w for w in tensors if w.is_floating_point() or w.is_complex()), torch.empty(0, device="cpu"))
        self.dtype, self.device = dtype or first.dtype, first.device
        self._random = torch.Generator().manual_seed(0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the layer in evaluation mode, with its weights mapped once."""
        modes = {module: module.training for module in self.layer.modules()}
        self.layer.eval()
        try:
            with torch.inference_mode(False), torch.enable_grad(), parametrize.cached():
                self._origin = torch.zeros(1, *self.shape, dtype=self.dtype, device=self.device, requires_grad=True)
                self.at_origin = self._called(self._origin)
                self.out_shape, self.out_dtype = tuple(self.at_origin.shape[1:]), self.at_origin.dtype
                self._measure()
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _called(self, x: Tensor) -> Tensor:
        who = type(self.layer).__name__
        try:
            y = self.layer(x)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise ShapeError(f"lipschitz needs an input_size that {who} takes, got {self.shape}: {reason}.") from error
        is_map = isinstance(y, Tensor) and y.shape[:1] == x.shape[:1]
        needs(is_map, OptionError, "lipschitz", "a layer from a tensor to a tensor, example by example", who)
        return torch.view_as_real(y) if y.is_complex() and not x.is_complex() else y

    def _measure(self) -> None:
        """Finds `unit`, the size of A, a power of two; products of A / unit with numbers near one stay in the dtype."""
        self.unit, self._there, self._back = 1.0, 1.0, 1.0
        offset, most = self.at_origin.abs().max().item(), torch.finfo(self.dtype).max
        y = self.draw(self.out_shape, self.out_dtype)[None]
        for small in (1.0, 2.0 ** -int(math.log2(most) / 2)):
            size = self.adjoint(small * y).abs().max().item() / small
            if 0 < size < math.inf:
                self.unit = 2.0 ** round(math.log2(size))
                break
        wanted, got = "finite products of the layer", "others; scale its weights"
        needs(math.isfinite(size), NonFiniteError, "lipschitz", wanted, got)
        self._back = min(1 / self.unit, most / 2**14)
        self._there = min(max(1.0, offset) / self.unit, most / 2**14)  # or a large bias would cost digits
        is_lost = size > 0 and self._there * self.unit < 64 * torch.finfo(self.dtype).eps * offset
        got = f"{type(self.layer).__name__} with entries of {self.unit:.2g}, which its bias rounds away; set it to zero"
        needs(not is_lost, OptionError, "lipschitz", "a layer whose linear part counts beside its bias", got)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns A x / unit of one input of its shape, in working precision."""
        with torch.no_grad():
            y = self._called((x * self._there).to(self.dtype)[None]) - self.at_origin
        return y[0].to(working_dtype(y.dtype)) / (self._there * self.unit)

    def adjoint(self, y: Tensor) -> Tensor:
        """Returns A^H y / unit of a batch of outputs, in working precision."""
        origin, out = self._origin, self.at_origin
        if len(y) > 1:
            origin = torch.zeros_like(origin).expand(len(y), *self.shape).contiguous().requires_grad_()
            out = self._called(origin)
        if not out.requires_grad:
            return torch.zeros_like(origin, dtype=working_dtype(origin.dtype))
        along = (y * self._back).to(out.dtype)
        (x,) = torch.autograd.grad(out, origin, along, retain_graph=len(y) == 1, materialize_grads=True)
        return x.to(working_dtype(x.dtype)) / (self._back * self.unit)

    def draw(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Draws Gaussian numbers, the same in each call of `lipschitz`."""
        return torch.randn(*shape, dtype=working_dtype(dtype), generator=self._random, device="cpu").to(self.device)

    def tolerance(self, y: Tensor, terms: int = 1) -> Tensor:
        """Returns the rounding error to allow in entries of outputs such as these, sums of so many terms."""
        # Lowered products round to 10 or 8 bits.
        is_lowered = torch.get_float32_matmul_precision() != "highest" or self.device.type != "cpu"
        coarse = 2.0**-8 if is_lowered and torch.finfo(self.dtype).bits == 32 else 0.0
        eps = max(torch.finfo(self.dtype).eps, coarse)
        return (min(0.05, 64 * eps * math.sqrt(terms)) * y.abs().max()).clamp_min(1e-300)

    def check(self) -> None:
        """Raises OptionError unless sums, multiples of several sizes and gradients are those of a linear layer."""
        largest = min(2.0**10, torch.finfo(self.dtype).max ** 0.25)
        x, z = self.draw(self.shape, self.dtype), self.draw(self.shape, self.dtype)
        y = self(x)
        factors = [largest, -0.125] + [1j] * self.dtype.is_complex
        pairs = [(self(factor * x) / factor, y) for factor in factors] + [(self(x + z), y + self(z))]
        back = self.draw(self.out_shape, self.out_dtype)
        products = ((back.conj() * y).sum(), (self.adjoint(back[None])[0].conj() * x).sum())
        allowed = self.tolerance(y, math.prod(self.shape))
        off = [(one - other).abs().max() / allowed for one, other in pairs]
        off.append((products[0] - products[1]).abs() / (allowed * back.abs().sum()))
        got = f"{type(self.layer).__name__}, which is not on random inputs; take layers between activations one by one"
        needs(max(map(float, off)) <= 1, OptionError, "lipschitz", "a layer that is linear up to a bias", got)

    def grid(self) -> tuple[int, ...]:
        """Returns along each axis by how many shifts the layer commutes, 1 for none: those of a grid in both ends."""
        if len(self.shape) != len(self.out_shape):
            return ()
        x = self.draw(self.shape, self.dtype)
        y, found = self(x), []
        for axis, (n, m) in enumerate(zip(self.shape, self.out_shape, strict=True)):
            g = math.gcd(n, m)
            shifted = self(x.roll(n // g, axis)) - y.roll(m // g, axis)
            found.append(g if bool(shifted.abs().max() <= self.tolerance(y)) else 1)
        return tuple(found)


def _by_frequency(operator: _Operator, grid: tuple[int, ...]) -> Tensor:
    """Returns the singular values of an operator that commutes with the shifts of a grid, min(n, m) a frequency.

    The rows of the operator in one cell of the grid, the only one of (), determine it: their Fourier transform over the
    grid is a matrix for each frequency.
    """
    out_shape, like = operator.out_shape, operator.at_origin
    cell = [m // g for m, g in zip(out_shape, grid, strict=True)] if grid else list(out_shape)
    count = math.prod(cell)
    impulses = torch.eye(count, dtype=like.dtype, device=like.device).view(count, *cell)
    beside = [(0, m - c) for m, c in zip(out_shape, cell, strict=True)]
    rows = operator.adjoint(F.pad(impulses, [length for pair in reversed(beside) for length in pair]))
    if not grid:
        return torch.linalg.svdvals(rows.flatten(1))
    rows = rows.reshape(count, *(size for n, g in zip(rows.shape[1:], grid, strict=True) for size in (g, n // g)))
    axes = tuple(range(1, rows.dim(), 2))
    rows = torch.fft.fftn(rows, dim=axes) if rows.is_complex() else torch.fft.rfftn(rows, dim=axes)
    rows = rows.permute(*axes, *range(0, rows.dim(), 2)).flatten(len(axes) + 1).flatten(0, len(axes) - 1)
    return torch.linalg.svdvals(rows)


def _lanczos(operator: _Operator, steps: int) -> Lipschitz:
    """Finds the extreme singular values by Lanczos steps with full reorthogonalization on the smaller side."""
    sides = [(operator.shape, operator.dtype), (operator.out_shape, operator.out_dtype)]
    along: list[Callable[[Tensor], Tensor]] = [operator, lambda y: operator.adjoint(y[None])[0]]
    if math.prod(operator.out_shape) < math.prod(operator.shape):
        sides, along = sides[::-1], along[::-1]
    shape, dtype = sides[0]
    start = operator.draw(shape, dtype).flatten()
    basis, matrix = [start / start.norm()], torch.zeros(steps, steps, dtype=torch.float64, device="cpu")
    largest, smallest, residual, k, tolerance = 0.0, 0.0, 0.0, 0, max(8 * torch.finfo(dtype).eps, 1e-9)
    count = len(start) * (2 if dtype.is_complex else 1)
    is_exhausted, short = False, 1.0
    while k < min(steps, len(start)) and not is_exhausted:
        q = torch.stack(basis)
        w = along[1](along[0](basis[-1].view(shape))).flatten()
        matrix[k, k] = torch.vdot(basis[-1], w).real
        for _ in range(2):
            w = w - q.mT @ (q.conj() @ w)
        rest, k = w.norm().item(), k + 1
        values, vectors = torch.linalg.eigh(matrix[:k, :k])
        smallest, largest = values[0].clamp_min(0).item(), values[-1].clamp_min(0).item()
        residual = rest * vectors[-1, -1].abs().item() / max(largest, 1e-300)
        # The start has a part in all that there is.
        is_exhausted = rest <= 1e-14 * largest or k == len(start)
        # Kuczynski and Wozniakowski 1992: Pr[theta < (1 - e) lambda] <= 1.648 sqrt(n) exp(-sqrt(e) (2k - 1)).
        short = (math.log(1.648 * math.sqrt(count) / _FAILS) / (2 * k - 1)) ** 2
        short = tolerance if is_exhausted else min(short, 1.0)
        if (k > 2 and 1 <= _NEAR**2 * (1 - short)) or k == steps:
            break
        matrix[k - 1, k] = matrix[k, k - 1] = rest
        basis.append(w / max(rest, 1e-300))
    found = math.sqrt(largest) * operator.unit
    bound = found / math.sqrt(1 - short) if short < 1 else math.inf
    return Lipschitz(found, math.sqrt(smallest) * operator.unit, bound, False, residual)

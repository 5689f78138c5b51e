"""Initial frames, drawn in float64 and independent of any parametrization.

Each scheme is a function `(shape, dtype, generator) -> W` with shape (*, n, p); `draw` picks one by name.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stiefelkit.errors import OptionError, ShapeError, did_you_mean, needs, shown, suggest_names
from stiefelkit.metrics import defect
from stiefelkit.numbers import one_of, sizes
from stiefelkit.tensors import Generator, check_dtype, working_dtype

__all__ = ["SCHEMES", "draw", "haar", "hadamard", "henaff", "identity", "unit_circle"]
suggest_names(__name__)


def haar(shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: Generator = None) -> Tensor:
    """Draws frames, exact to rounding, from the uniform (Haar) measure of :math:`St(n, p)`, each independently.

    Args:
        shape: (*, n, p), :math:`n ≥ p`.
        dtype: of the frames, real or complex; drawn in float64 or complex128, and rounded once.
        generator: source of randomness, on whose device the frames are; torch's default when None.

    >>> haar((2, 5, 3)).shape
    torch.Size([2, 5, 3])
    """
    shape = _check("haar", shape, dtype)
    gaussian = torch.randn(*shape, dtype=working_dtype(dtype), device=device_of(generator), generator=generator)
    q, r = torch.linalg.qr(gaussian)
    # QR leaves the phases of R's diagonal free; making them positive makes Q unique, hence Haar (Mezzadri 2007).
    w = q * torch.sgn(r.diagonal(dim1=-2, dim2=-1))[..., None, :]
    if dtype == w.dtype:  # LAPACK's Q is off by up to 13 eps, more than an exact frame may be: one Newton step
        w = torch.sub(w, w @ defect(w), alpha=0.5)
    return w.to(dtype).contiguous()


def identity(shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: Generator = None) -> Tensor:
    """Returns the first p columns of the identity; shape, dtype and generator as of `haar`."""
    shape = _check("identity", shape, dtype)
    eye = torch.eye(shape[-2], shape[-1], dtype=dtype, device=device_of(generator))
    return eye.expand(*shape).clone()


def henaff(shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: Generator = None) -> Tensor:
    """Rotates consecutive pairs of axes by angles uniform on :math:`(-π, π)` (Henaff, Szlam, LeCun 2016).

    Eigenvalues are uniform on the unit circle. Takes shape, dtype and generator as `haar`.
    """
    shape = _check("henaff", shape, dtype)
    *batch, n, p = shape
    t = uniform((*batch, n // 2), generator) * (2 * math.pi) - math.pi
    w = identity((*batch, n, n), torch.float64, generator)
    even, odd = torch.arange(0, n - 1, 2, device=t.device), torch.arange(1, n, 2, device=t.device)
    w[..., even, even] = w[..., odd, odd] = t.cos()
    w[..., odd, even] = t.sin()
    w[..., even, odd] = -t.sin()
    return w[..., :p].to(dtype).contiguous()


def unit_circle(shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: Generator = None) -> Tensor:
    """Draws frames with eigenvalues uniform on the unit circle: `henaff` if real, :math:`diag(e^{it})` if complex.

    Takes shape, dtype and generator as `haar`.
    """
    shape = _check("unit_circle", shape, dtype)
    if not dtype.is_complex:
        return henaff(shape, dtype, generator)
    *batch, _, p = shape
    t = uniform((*batch, p), generator) * (2 * math.pi) - math.pi
    return (identity(shape, dtype, generator) * torch.exp(1j * t)[..., None, :]).to(dtype)


def hadamard(
    n: int,
    *,
    random: bool = True,
    dtype: torch.dtype = torch.float64,
    generator: Generator = None,
    order: str | None = None,
) -> Tensor:
    """Returns :math:`H / √n`, H a Hadamard matrix (entries 1 and -1, orthogonal rows), with columns of random sign.

    H is a product of Sylvester's matrices, of order :math:`2^k`, with one of Paley's, of order :math:`q + 1` or
    :math:`2 (q + 1)` for a prime power q, or with Williamson's of order 92, 116, 156 or 172.
    `stiefelkit.functional.hadamard_transform` applies it without forming it.

    Args:
        n: the order: 1, 2, or a multiple of 4 of the form above, as about three in four of those up to 2000 are.
        random: multiplies each column by a random sign.
        dtype: of the matrix, real or complex.
        generator: source of randomness, on whose device the matrix is; torch's default when None.
        order: "fast_hadamard_transform" for the matrices of the library of that name: Sylvester's, or one of order 12,
            20 or 28 times Sylvester's, in this order.

    References:
        Paley, On orthogonal matrices, Journal of Mathematics and Physics, 1933.
        Williamson, Hadamard's determinant theorem and the sum of four squares, Duke Mathematical Journal 1944.

    >>> hadamard(2, random=False)
    tensor([[ 0.7071,  0.7071],
            [ 0.7071, -0.7071]], dtype=torch.float64)
    """
    shape = _check("hadamard", (n, n), dtype)
    h = functools.reduce(torch.kron, hadamard_factors(shape[0], order)).to(device_of(generator))
    if random:
        h = h * symmetric((shape[0],), 1.0, generator).sign()
    return (h / math.sqrt(shape[0])).to(dtype)


@functools.lru_cache(64)
def hadamard_factors(n: int, order: str | None = None) -> tuple[Tensor, ...]:
    """Returns matrices of order 2, and one of another order, whose Kronecker product is the matrix of `hadamard`.

    In the order of `fast_hadamard_transform` that one is the first.
    """
    one_of(None, _KERNELS).require("A Hadamard matrix", "order", order)
    m = _odd_factor(n, order)
    if m is None and order is not None:
        raise ShapeError(f"{_KERNELS} needs an order of 2^k times 1, 12, 20 or 28, got {n}; order=None takes more.")
    if m is None:
        near, block = "{} and {} are near".format(*hadamard_orders(n)), _largest_block(n)
        wide = f", and a transform with block={block} takes blocks" if block > 2 else ""
        raise ShapeError(f"sk.init.hadamard needs an order like 2^k or 12, 20, 28, ..., got {n}; {near}{wide}.")
    with torch.inference_mode(False):
        two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
        if m == 1:
            return (two,) * (n.bit_length() - 1) if n > 1 else (two[:1, :1],)
        twos = (two,) * ((n // m).bit_length() - 1)
        if order:
            return (_paley(5) if m == 12 else _williamson(m), *twos)
        q = _field(m)
        return (*twos, _paley(q) if q else _williamson(m))


def _odd_factor(n: int, order: str | None = None) -> int | None:
    """Returns the order of the factor that is not Sylvester's, 1 if all are, None if no such matrix is known."""
    twos = (n & -n).bit_length() - 1 if n > 0 else -1
    rests = [n >> k for k in range(twos, -1, -1)]
    if rests and rests[0] == 1:
        return 1
    if order is not None:
        return next((m for m in rests if m in (12, 20, 28)), None)
    first = next((m for m in rests if m == 172 or _field(m)), None)  # files hold weights that were turned by these
    return first or next((m for m in rests if m in (92, 116, 156)), None)


def _largest_block(n: int) -> int:
    """Returns a large divisor of n that is a known order."""
    parts = (n // q for q in range(1, math.isqrt(max(n, 0)) + 1) if n % q == 0)
    return next((m for m in parts if _odd_factor(m)), n & -n)


def hadamard_orders(n: int) -> tuple[int, int]:
    """Returns the nearest known orders, at most n (or 1) and at least n."""
    n = max(n, 1)
    below, above = itertools.count(n, -1), itertools.count(n)
    return next(m for m in below if _odd_factor(m)), next(m for m in above if _odd_factor(m))


def _field(n: int) -> int:
    """Returns the order of the field by which Paley makes a matrix of order n, 0 if there is none."""
    orders = () if n % 4 else (n - 1, n // 2 - 1) if n % 8 else (n - 1,)
    return next((q for q in orders if _prime_power(q)[0]), 0)


def _prime_power(q: int) -> tuple[int, int]:
    """Returns p and k of q = p^k, k at most 3; (0, 0) if q is no such power of a prime."""
    for k in (1, 2, 3):
        p = round(q ** (1 / k))
        if p > 1 and p**k == q and all(p % d for d in range(2, math.isqrt(p) + 1)):
            return p, k
    return 0, 0


def _paley(q: int) -> Tensor:
    s = torch.zeros(q + 1, q + 1, dtype=torch.float64, device="cpu")
    s[1:, 1:] = _jacobsthal(q)
    s[0, 1:] = 1
    s[1:, 0] = 1 if q % 4 == 1 else -1
    eye = torch.eye(q + 1, dtype=s.dtype, device="cpu")
    if q % 4 == 3:
        return eye + s
    one, other = (torch.tensor(m, dtype=s.dtype, device="cpu") for m in ([[1, 1], [1, -1]], [[1, -1], [-1, -1]]))
    return torch.kron(s, one) + torch.kron(eye, other)


def _jacobsthal(q: int) -> Tensor:
    """Returns the matrix of the quadratic character of a - b, for the elements a, b of the field of q elements."""
    p, degree = _prime_power(q)
    elements = list(itertools.product(range(p), repeat=degree))

    def times(a: Sequence[int], b: Sequence[int], monic: Sequence[int]) -> tuple[int, ...]:
        product = [0] * (2 * degree - 1)
        for i, j in itertools.product(range(degree), repeat=2):
            product[i + j] += a[i] * b[j]
        for i in range(2 * degree - 2, degree - 1, -1):  # x^degree = -monic
            for j in range(degree):
                product[i - degree + j] -= product[i] * monic[j]
        return tuple(c % p for c in product[:degree])

    def has_root(monic: Sequence[int]) -> bool:
        return any((x**degree + sum(c * x**j for j, c in enumerate(monic))) % p == 0 for x in range(p))

    # Of degree 2 and 3 a polynomial without roots is irreducible.
    monic = next(m for m in elements if degree == 1 or not has_root(m))
    squares = {times(a, a, monic) for a in elements}
    zero = (0,) * degree
    character = [0 if a == zero else 1 if a in squares else -1 for a in elements]
    digits = torch.tensor(elements, device="cpu")
    differences = (digits[:, None] - digits[None, :]) % p
    weights = torch.tensor([p ** (degree - 1 - i) for i in range(degree)], device="cpu")
    return torch.tensor(character, dtype=torch.float64, device="cpu")[(differences * weights).sum(-1)]


_KERNELS = "fast_hadamard_transform"
_CIRCULANTS = {
    20: (0x1E, 0x1E, 0xC, 0x12),
    28: (0x7E, 0x3C, 0x5A, 0x66),
    92: (0x7CA53E, 0x289914, 0x2C6634, 0x7A5E0),
    116: (0x1A700396, 0x4873848, 0x14EC0DCA, 0x15E4C9EA),
    156: (0x761EA5786E, 0x3165FFA68C, 0x4FCD42B3F2, 0x7749E792EE),
    172: (0x4F4C932F20, 0x1CD53FCAB38, 0x285B198DA14, 0x4F85108A1F2),
}
"""First rows of four symmetric circulants whose squares add up to n I; a bit is -1, its place the power of two.

Those of 20 and 28 are in Sloane's library of Hadamard matrices, the others were found by searches.
"""


def _williamson(n: int) -> Tensor:
    """Returns the matrix of order n of four symmetric circulants."""
    places = torch.arange(n // 4, device="cpu")
    bits = (torch.tensor(_CIRCULANTS[n], device="cpu")[:, None] >> places) & 1
    a, b, c, d = (1.0 - 2.0 * bits.double())[:, (places[:, None] - places) % (n // 4)]
    rows = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
    return torch.cat([torch.cat(row, 1) for row in rows])


SCHEMES: dict[str, Callable[..., Tensor]] = {
    "haar": haar,
    "identity": identity,
    "henaff": henaff,
    "unit_circle": unit_circle,
}
"""Name to function of the shape, dtype and generator, of what every map can start from."""


def draw(scheme: str, shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: Generator = None) -> Tensor:
    """Draws initial frames by a scheme in `SCHEMES`, with shape, dtype and generator as `haar`."""
    if not one_of(*SCHEMES).holds(scheme):
        raise OptionError(f"No init scheme is named {shown(scheme)}{did_you_mean(scheme, SCHEMES)}")
    return SCHEMES[scheme](shape, dtype, generator)


def _check(who: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    frame = sizes(shape)
    if frame is None or len(frame) < 2 or frame[-2] < frame[-1] or min(frame) < 0:
        raise ShapeError(
            f"sk.init.{who} needs a shape (*, n, p) with n >= p, got {shown(shape if frame is None else frame)}; "
            ".mH of a tall frame is wide."
        )
    check_dtype(f"sk.init.{who}", dtype)
    return frame


def device_of(generator: Generator) -> torch.device | None:
    """Returns where a generator draws; None, torch's default, without one."""
    if generator is None:
        return None
    needs(isinstance(generator, torch.Generator), OptionError, "A draw", "a torch.Generator or None", generator)
    return generator.device


def uniform(shape: Sequence[int], generator: Generator) -> Tensor:
    """Draws uniformly from [0, 1)."""
    return torch.rand(*shape, dtype=torch.float64, device=device_of(generator), generator=generator)


def symmetric(shape: Sequence[int], bound: float, generator: Generator) -> Tensor:
    """Draws uniformly from (-bound, bound)."""
    return (2 * uniform(shape, generator) - 1) * bound


def gaussian(shape: Sequence[int], generator: Generator) -> Tensor:
    """Draws from N(0, 1)."""
    return torch.randn(*shape, dtype=torch.float64, device=device_of(generator), generator=generator)

"""The laws of a Stiefel manifold in geoopt's interface, ours or another's."""

import copy
import functools
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.errors import OptionError
from stiefelkit.metrics import orthogonality_error, permitted_error, working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.failure import check_laws, laws_of, named, run, settle
from stiefelkit.testing.require import require, require_within

if TYPE_CHECKING:
    from geoopt import Manifold

_SHAPES = ((1, 1), (6, 6), (7, 5), (9, 2), (5, 1), (2, 6, 3))
_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_TIMES = tuple(2.0**-k for k in range(3, 9))


def retraction_order(manifold: "Manifold", w: Tensor, u: Tensor, times: Sequence[float] = _TIMES) -> float:
    """Measures the order of a retraction.

    It is the slope of :math:`log ‖retr(W, t U) - expmap(W, t U)‖_F` over :math:`log t`, less 1.

    Args:
        manifold: a manifold whose `expmap` is right.
        w: frames, shape (*, n, p); measured at the nearest float64 ones.
        u: matrices of the same shape, whose tangent part, scaled to :math:`‖U‖_F = 1`, is the direction.
        times: at least two positive times t, small.

    Returns:
        About 1 for a retraction of first order, 2 for one of second order, less than 1 for none; infinity where the
        two are equal.

    Raises:
        OptionError: less than two times, or one that is not positive.
    """
    if len(set(times)) < 2 or not all(t > 0 for t in times):
        raise OptionError(f"retraction_order needs two positive times at least, got {tuple(times)}.")
    w, u = _direction(w, u)
    return _slope(times, [(manifold.retr(w, t * u) - manifold.expmap(w, t * u)).norm().item() for t in times]) - 1


@dataclass(frozen=True)
class _Sample:
    """A frame, two tangent vectors of length 1 and a Euclidean gradient of one shape and dtype."""

    manifold: "Manifold"
    w: Tensor
    u: Tensor
    v: Tensor
    g: Tensor

    @property
    def tolerance(self) -> float:
        return 50 * torch.finfo(self.w.dtype).eps * self.w.shape[-1] ** 0.5

    def __str__(self) -> str:
        shape, dtype = "x".join(map(str, self.w.shape)), str(self.w.dtype).removeprefix("torch.")
        return f"{self.manifold!r}-{shape}-{dtype}"

    def require_equal(self, a: Tensor, b: Tensor, what: str, scale: float = 1.0) -> None:
        """Requires two tensors to be equal up to rounding."""
        require(a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape}, {a.dtype} for {b.shape}, {b.dtype}")
        off = torch.linalg.vector_norm((a - b).to(working_dtype(a.dtype))).item()
        require_within(off, scale * self.tolerance, f"{what} is off by")

    def require_frame(self, w: Tensor, what: str) -> None:
        """Requires the rounding limit, and the shape and dtype of the sample."""
        require(w.shape == self.w.shape and w.dtype == self.w.dtype, f"{what} has {tuple(w.shape)}, {w.dtype}")
        error, permitted = orthogonality_error(w).max().item(), permitted_error(w.shape[-1], w.dtype)
        require_within(error, permitted, f"{what}: ||W^H W - I||_F =")

    def require_tangent(self, w: Tensor, u: Tensor, what: str) -> None:
        """Requires W^H U to be skew up to rounding."""
        s = w.to(working_dtype(w.dtype)).mH @ u.to(working_dtype(w.dtype))
        off = torch.linalg.matrix_norm(s + s.mH).max().item()
        permitted = self.tolerance * max(1.0, torch.linalg.vector_norm(u).item())
        require_within(off, permitted, f"{what}: ||W^H U + U^H W||_F =")


def law_projections(s: _Sample) -> None:
    """`projx` gives the nearest frame; `proju` is the orthogonal projector on the tangent space."""
    m = s.manifold
    left, _, right = torch.linalg.svd((s.w + s.g / 4).to(working_dtype(s.w.dtype)), full_matrices=False)
    projected = m.projx(s.w + s.g / 4)
    s.require_frame(projected, "projx")
    # A small singular value magnifies rounding: X is a frame plus something of half its size.
    s.require_equal(projected, (left @ right).to(s.w.dtype), "projx", 20)
    s.require_equal(m.projx(s.w), s.w, "projx of a frame")
    tangent = m.proju(s.w, s.g)
    s.require_tangent(s.w, tangent, "proju")
    s.require_equal(m.proju(s.w, tangent), tangent, "proju of proju")
    s.require_equal(m.proju(s.w, s.u), s.u, "proju of a tangent vector")
    off = (_euclidean(tangent, s.u) - _euclidean(s.g, s.u)).abs().max().item()
    require(off <= s.tolerance, f"proju changes the inner product with a tangent vector by {off:.2g}")


def law_inner(s: _Sample) -> None:
    """The inner product is real, symmetric, linear and positive, and `norm` is its square root."""
    m, shape = s.manifold, s.w.shape[:-2]
    value = m.inner(s.w, s.u, s.v)
    require(value.shape == shape and not value.is_complex(), f"inner has {tuple(value.shape)}, {value.dtype}")
    s.require_equal(value, m.inner(s.w, s.v, s.u), "inner with its arguments swapped")
    s.require_equal(m.inner(s.w, s.u + s.v, s.v), value + m.inner(s.w, s.v), "inner of a sum")
    squares = m.inner(s.w, s.u)
    least = squares.min().item() if s.u.norm() > 0 else 1.0
    require(least > 0, f"the square of a tangent vector is {least:.2g}")
    s.require_equal(m.norm(s.w, s.u) ** 2, squares, "the square of norm")
    component = m.component_inner(s.w, s.u)
    require(component.dim() == s.w.dim() and not component.is_complex(), "component_inner does not broadcast")
    s.require_equal(component, m.inner(s.w, s.u, keepdim=True).expand(component.shape), "component_inner")


def law_gradient(s: _Sample) -> None:
    """`egrad2rgrad` gives the tangent R with inner(R, V) = Re tr(G^H V) for tangent V."""
    r = s.manifold.egrad2rgrad(s.w, s.g)
    s.require_tangent(s.w, r, "egrad2rgrad")
    for v in (s.u, s.v):
        off = (s.manifold.inner(s.w, r, v) - _euclidean(s.g, v)).abs().max().item()
        require(off <= s.tolerance, f"inner(egrad2rgrad(G), V) is {off:.2g} off Re tr(G^H V)")


def law_hessian(s: _Sample) -> None:
    """`ehess2rhess`, where there is one, gives second derivatives along `expmap`, self-adjoint in the metric."""
    m: Any = s.manifold
    if not hasattr(m, "ehess2rhess"):
        return
    b = s.g + s.v

    def gradient(w: Tensor) -> Tensor:
        return s.g + _euclidean(b, w)[..., None, None].to(b.dtype) * b

    along_u, along_v = (
        m.ehess2rhess(s.w, gradient(s.w), _euclidean(b, z)[..., None, None].to(b.dtype) * b, z) for z in (s.u, s.v)
    )
    s.require_tangent(s.w, along_u, "ehess2rhess")
    one, other = m.inner(s.w, along_u, s.v), m.inner(s.w, s.u, along_v)
    s.require_equal(one, other, "inner(Hess U, V) less inner(U, Hess V)", 20)
    if s.w.dtype != working_dtype(s.w.dtype):
        return
    h = 2.0**-8
    ends = [m.expmap(s.w, k * h * s.u) for k in (-2, -1, 0, 1, 2)]
    f = [_euclidean(s.g, w) + _euclidean(b, w).square() / 2 for w in ends]
    second = (16 * (f[1] + f[3]) - f[0] - f[4] - 30 * f[2]) / (12 * h * h)
    off = (m.inner(s.w, s.u, along_u) - second).abs().max().item()
    # Derivatives of order k along a geodesic of speed 1 are at most 3^k; the stencil errs by h^4 / 90 of the sixth.
    permitted = h**4 / 90 * 3**6 * (1 + 2**6 * 9)
    require(off <= permitted, f"inner(U, Hess U) is {off:.2g} off the second derivative", off, permitted)


def law_logarithm(s: _Sample) -> None:
    """`logmap`, where there is one, undoes `expmap`, and `dist` is the length of it."""
    end = s.manifold.expmap(s.w, s.u)
    try:
        direction = s.manifold.logmap(s.w, end)
    except NotImplementedError:
        return
    s.require_tangent(s.w, direction, "logmap")
    s.require_equal(direction, s.u, "logmap of expmap", 20)
    s.require_equal(s.manifold.dist(s.w, end), s.manifold.norm(s.w, s.u), "dist to expmap", 20)


def law_retraction(s: _Sample) -> None:
    """`retr` and `expmap` give frames at any length, W itself at 0, and agree with W + t U to first order in t."""
    for name in ("retr", "expmap"):
        move: Callable[[Tensor, Tensor], Tensor] = getattr(s.manifold, name)
        for length in (0.0, 1e-3, 1.0, 100.0):
            s.require_frame(move(s.w, length * s.u), f"{name} at length {length:g}")
        s.require_equal(move(s.w, 0 * s.u), s.w, f"{name} at length 0")
        if s.w.dtype == working_dtype(s.w.dtype) and s.u.norm() > 0:
            slope = _slope(_TIMES, [(move(s.w, t * s.u) - s.w - t * s.u).norm().item() for t in _TIMES])
            require(slope > 1.8, f"{name} leaves W + t U with a slope of {slope:.2f}, not 2")


def law_geodesic(s: _Sample) -> None:
    """`expmap` has constant speed, and `retr` agrees with it to first order or better."""
    if s.w.dtype != working_dtype(s.w.dtype) or s.u.norm() == 0:
        return
    m, h = s.manifold, 1e-4
    speed = m.norm(s.w, s.u)
    for t in (0.5, 1.5):
        step = (m.expmap(s.w, (t + h) * s.u) - m.expmap(s.w, (t - h) * s.u)) / (2 * h)
        off = (m.norm(m.expmap(s.w, t * s.u), step) - speed).abs().max().item()
        require(off <= 1e-6, f"the speed of expmap at {t} is {off:.2g} off the one at 0")
    order = retraction_order(m, s.w, s.u)
    require(order > 0.8, f"the order of retr is {order:.2f}, not 1")


def law_transport(s: _Sample) -> None:
    """Carried vectors are tangent where they end, alike in all methods, and keep their length where that is claimed."""
    m = s.manifold
    moved, carried = m.retr_transp(s.w, s.u, s.v)
    s.require_equal(moved, m.retr(s.w, s.u), "the frame of retr_transp")
    s.require_equal(carried, m.transp_follow_retr(s.w, s.u, s.v), "transp_follow_retr")
    s.require_tangent(moved, carried, "retr_transp")
    s.require_tangent(moved, m.transp(s.w, moved, s.v), "transp")
    if getattr(m, "is_isometric", False):
        s.require_equal(m.inner(moved, carried), m.inner(s.w, s.v), "the square of a carried vector")
    end, along = m.expmap_transp(s.w, s.u, s.v)
    s.require_equal(end, m.expmap(s.w, s.u), "the frame of expmap_transp")
    s.require_equal(along, m.transp_follow_expmap(s.w, s.u, s.v), "transp_follow_expmap")
    s.require_tangent(end, along, "expmap_transp")
    if m.reversible:
        there, direction = m.retr_transp(s.w, s.u, s.u)
        s.require_equal(m.retr(there, -direction), s.w, "a step and the same step back")


def law_batch(s: _Sample) -> None:
    """A batch equals the loop over its members."""
    if s.w.dim() == 2:
        return
    for name in ("projx", "proju", "egrad2rgrad", "retr", "expmap", "inner"):
        method = getattr(s.manifold, name)
        tensors = (s.w,) if name == "projx" else (s.w, s.u)
        depth = s.w.dim() - 2
        members = zip(*(t.flatten(0, depth - 1) for t in (*tensors, method(*tensors))), strict=True)
        for *inputs, member in members:
            s.require_equal(member, method(*inputs), f"a member of the batch in {name}")


def law_checks(s: _Sample) -> None:
    """Frames and tangent vectors pass their checks, others do not and are told why."""
    m = s.manifold
    verdicts: list[tuple[bool, Any, str]] = [
        (True, m.check_point_on_manifold(s.w, explain=True), "a frame"),
        (False, m.check_point_on_manifold(1.01 * s.w, explain=True), "1.01 times a frame"),
        (False, m.check_point_on_manifold(s.w * torch.nan, explain=True), "NaN"),
        (False, m.check_point_on_manifold(s.w.flatten(), explain=True), "a vector"),
        (True, m.check_vector_on_tangent(s.w, s.u, explain=True), "a tangent vector"),
        (False, m.check_vector_on_tangent(s.w, s.w, explain=True), "a normal vector"),
    ]
    for expected, (verdict, reason), what in verdicts:
        require(bool(verdict) == expected, f"{what} is {'refused: ' + str(reason) if expected else 'let through'}")
        require(expected or bool(reason), f"{what} is refused without a reason")


def law_identity(s: _Sample) -> None:
    """Copies, pickled ones too, are equal to the manifold, and so are their hashes: geoopt compares."""
    for twin in (copy.deepcopy(s.manifold), pickle.loads(pickle.dumps(s.manifold))):
        require(twin == s.manifold and hash(twin) == hash(s.manifold), "a copy is another manifold")


MANIFOLD_LAWS: dict[str, Callable[[_Sample], None]] = named(laws_of(__name__))
"""Name to law. Each takes a sample and raises `LawBroken`."""


def check_manifold(
    manifold: "Manifold",
    laws: Iterable[str] = tuple(MANIFOLD_LAWS),
    shapes: Iterable[tuple[int, ...]] = _SHAPES,
    dtypes: Iterable[torch.dtype] = _DTYPES,
    offset: int | None = None,
) -> None:
    """Checks a Stiefel manifold in geoopt's interface against the laws, and returns if it keeps them all.

    Args:
        manifold: an instance; `is_isometric = True` on it claims that `retr_transp` keeps inner products.
        laws: names in `MANIFOLD_LAWS`, all by default.
        shapes: of frames, (*, n, p).
        dtypes: of frames.
        offset: shifts every seed; what `STIEFELKIT_SEED_OFFSET` says by default.

    Raises:
        LawBroken: lists every failure: the law, the manifold, shape and dtype, the figures, the seed, and a line that
            repeats it.
        UnknownNameError: no law has that name.
    """
    laws, dtypes = check_laws(laws, MANIFOLD_LAWS), list(dtypes)
    cases = ((shape, dtype, law) for shape in shapes for dtype in dtypes for law in laws)
    settle((functools.partial(_run, manifold, *case) for case in cases), offset)


def _run(manifold: "Manifold", shape: tuple[int, ...], dtype: torch.dtype, law: str) -> None:
    on = f"manifold, [{law!r}], [{tuple(shape)}], [{dtype}], {seeds.seed()}"
    line = f"import torch; from stiefelkit.testing import check_manifold; check_manifold({on})"
    run(MANIFOLD_LAWS[law], [_sample(manifold, shape, dtype)], lambda: "", lambda: line)


def _sample(manifold: "Manifold", shape: tuple[int, ...], dtype: torch.dtype) -> _Sample:
    generator, wide = seeds.generator(), working_dtype(dtype)
    w = init.haar(shape, wide, generator)
    drawn = (torch.randn(shape, dtype=wide, generator=generator) for _ in range(3))
    u, v, g = (_direction(w, z)[1] if k < 2 else z / z.norm() for k, z in enumerate(drawn))
    return _Sample(manifold, *(t.to(dtype) for t in (w, u, v, g)))


def _direction(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nearest float64 frame and the tangent part of U there, of length 1 (0 on real 1 x 1 frames)."""
    wide = working_dtype(w.dtype)
    left, _, right = torch.linalg.svd(w.detach().to(wide), full_matrices=False)
    w, u = left @ right, u.detach().to(wide)
    for _ in range(2):  # of a U nearly normal to the manifold rounding leaves a part that is normal
        s = w.mH @ u
        u = u - w @ (s + s.mH) / 2
        length = u.norm().item()
        if length < 1e-12:
            return w, torch.zeros_like(u)
        u = u / length
    return w, u


def _euclidean(a: Tensor, b: Tensor) -> Tensor:
    wide = working_dtype(a.dtype)
    return (a.to(wide).conj() * b.to(wide)).real.sum(dim=(-2, -1))


def _slope(times: Sequence[float], errors: Sequence[float]) -> float:
    """Returns the least-squares slope of log error over log time; infinity where all errors are rounding."""
    if max(errors) < 1e-12:
        return math.inf
    x = torch.tensor(times, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    x = x - x.mean()
    return ((x * y).sum() / (x * x).sum()).item()

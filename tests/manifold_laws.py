"""The laws of a Stiefel manifold in geoopt's interface."""

import copy
import itertools
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.metrics import orthogonality_error, permitted_error, working_dtype
from stiefelkit.testing import seeds

SHAPES = ((1, 1), (6, 6), (7, 5), (9, 2), (5, 1), (2, 6, 3))
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
TIMES = tuple(2.0**-k for k in range(3, 9))


def retraction_order(manifold: Any, w: Tensor, u: Tensor) -> float:
    """Measures the order of a retraction.

    It is the slope of log ||retr(W, t U) - expmap(W, t U)|| over log t, less 1: about 1 for a retraction of first
    order, 2 for one of second order, less than 1 for what is none, infinity where the two are equal. The tangent part
    of U, scaled to length 1, is the direction, at the nearest float64 frame to W.
    """
    w, u = direction(w, u)
    return slope([(manifold.retr(w, t * u) - manifold.expmap(w, t * u)).norm().item() for t in TIMES]) - 1


@dataclass(frozen=True)
class Sample:
    """A frame, two tangent vectors of length 1 and a Euclidean gradient of one shape and dtype."""

    manifold: Any
    w: Tensor
    u: Tensor
    v: Tensor
    g: Tensor

    @property
    def is_wide(self) -> bool:
        return self.w.dtype == working_dtype(self.w.dtype)

    @property
    def tolerance(self) -> float:
        return 50 * torch.finfo(self.w.dtype).eps * self.w.shape[-1] ** 0.5

    def require_equal(self, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        """Requires two tensors to be equal up to rounding."""
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.linalg.vector_norm((a - b).to(working_dtype(a.dtype))).item() <= scale * self.tolerance

    def require_frame(self, w: Tensor) -> None:
        """Requires the rounding limit, and the shape and dtype of the sample."""
        assert (w.shape, w.dtype) == (self.w.shape, self.w.dtype)
        assert orthogonality_error(w).max().item() <= permitted_error(w.shape[-1], w.dtype)

    def require_tangent(self, w: Tensor, u: Tensor) -> None:
        """Requires W^H U to be skew up to rounding."""
        s = w.to(working_dtype(w.dtype)).mH @ u.to(working_dtype(w.dtype))
        permitted = self.tolerance * max(1.0, torch.linalg.vector_norm(u).item())
        assert torch.linalg.matrix_norm(s + s.mH).max().item() <= permitted


def law_projections(s: Sample) -> None:
    """`projx` gives the nearest frame; `proju` is the orthogonal projector on the tangent space."""
    m = s.manifold
    left, _, right = torch.linalg.svd((s.w + s.g / 4).to(working_dtype(s.w.dtype)), full_matrices=False)
    projected = m.projx(s.w + s.g / 4)
    s.require_frame(projected)
    # A small singular value magnifies rounding: X is a frame plus something of half its size.
    s.require_equal(projected, (left @ right).to(s.w.dtype), 20)
    s.require_equal(m.projx(s.w), s.w)
    tangent = m.proju(s.w, s.g)
    s.require_tangent(s.w, tangent)
    s.require_equal(m.proju(s.w, tangent), tangent)
    s.require_equal(m.proju(s.w, s.u), s.u)
    assert (euclidean(tangent, s.u) - euclidean(s.g, s.u)).abs().max() <= s.tolerance


def law_inner(s: Sample) -> None:
    """The inner product is real, symmetric, linear and positive, and `norm` is its square root."""
    m = s.manifold
    value = m.inner(s.w, s.u, s.v)
    assert value.shape == s.w.shape[:-2]
    assert not value.is_complex()
    s.require_equal(value, m.inner(s.w, s.v, s.u))
    s.require_equal(m.inner(s.w, s.u + s.v, s.v), value + m.inner(s.w, s.v))
    squares = m.inner(s.w, s.u)
    assert squares.min() > 0 or s.u.norm() == 0
    s.require_equal(m.norm(s.w, s.u) ** 2, squares)
    component = m.component_inner(s.w, s.u)
    assert component.dim() == s.w.dim()
    s.require_equal(component, m.inner(s.w, s.u, keepdim=True).expand(component.shape))


def law_gradient(s: Sample) -> None:
    """`egrad2rgrad` gives the tangent R with inner(R, V) = Re tr(G^H V) for tangent V."""
    r = s.manifold.egrad2rgrad(s.w, s.g)
    s.require_tangent(s.w, r)
    for v in (s.u, s.v):
        assert (s.manifold.inner(s.w, r, v) - euclidean(s.g, v)).abs().max() <= s.tolerance


def law_hessian(s: Sample) -> None:
    """`ehess2rhess`, where there is one, gives second derivatives along `expmap`, self-adjoint in the metric."""
    m, b = s.manifold, s.g + s.v
    if not hasattr(m, "ehess2rhess"):
        return

    def gradient(w: Tensor) -> Tensor:
        return s.g + euclidean(b, w)[..., None, None].to(b.dtype) * b

    along_u, along_v = (
        m.ehess2rhess(s.w, gradient(s.w), euclidean(b, z)[..., None, None].to(b.dtype) * b, z) for z in (s.u, s.v)
    )
    s.require_tangent(s.w, along_u)
    s.require_equal(m.inner(s.w, along_u, s.v), m.inner(s.w, s.u, along_v), 20)
    if not s.is_wide:
        return
    h = 2.0**-8
    ends = [m.expmap(s.w, k * h * s.u) for k in (-2, -1, 0, 1, 2)]
    f = [euclidean(s.g, w) + euclidean(b, w).square() / 2 for w in ends]
    second = (16 * (f[1] + f[3]) - f[0] - f[4] - 30 * f[2]) / (12 * h * h)
    # Derivatives of order k along a geodesic of speed 1 are at most 3^k; the stencil errs by h^4 / 90 of the sixth.
    assert (m.inner(s.w, s.u, along_u) - second).abs().max() <= h**4 / 90 * 3**6 * (1 + 2**6 * 9)


def law_logarithm(s: Sample) -> None:
    """`logmap`, where there is one, undoes `expmap`, and `dist` is the length of it."""
    end = s.manifold.expmap(s.w, s.u)
    try:
        back = s.manifold.logmap(s.w, end)
    except NotImplementedError:
        return
    s.require_tangent(s.w, back)
    s.require_equal(back, s.u, 20)
    s.require_equal(s.manifold.dist(s.w, end), s.manifold.norm(s.w, s.u), 20)


def law_retraction(s: Sample) -> None:
    """`retr` and `expmap` give frames at any length, W itself at 0, and agree with W + t U to first order in t."""
    for move in (s.manifold.retr, s.manifold.expmap):
        for length in (0.0, 1e-3, 1.0, 100.0):
            s.require_frame(move(s.w, length * s.u))
        s.require_equal(move(s.w, 0 * s.u), s.w)
        if s.is_wide and s.u.norm() > 0:
            assert slope([(move(s.w, t * s.u) - s.w - t * s.u).norm().item() for t in TIMES]) > 1.8


def law_geodesic(s: Sample) -> None:
    """`expmap` has constant speed, and `retr` agrees with it to first order or better."""
    if not s.is_wide or s.u.norm() == 0:
        return
    m, h = s.manifold, 1e-4
    for t in (0.5, 1.5):
        step = (m.expmap(s.w, (t + h) * s.u) - m.expmap(s.w, (t - h) * s.u)) / (2 * h)
        assert (m.norm(m.expmap(s.w, t * s.u), step) - m.norm(s.w, s.u)).abs().max() <= 1e-6
    assert retraction_order(m, s.w, s.u) > 0.8


def law_transport(s: Sample) -> None:
    """Transported vectors are tangent at the end, equal in all methods, and keep their length where that is claimed."""
    m = s.manifold
    moved, carried = m.retr_transp(s.w, s.u, s.v)
    s.require_equal(moved, m.retr(s.w, s.u))
    s.require_equal(carried, m.transp_follow_retr(s.w, s.u, s.v))
    s.require_tangent(moved, carried)
    s.require_tangent(moved, m.transp(s.w, moved, s.v))
    if getattr(m, "is_isometric", False):
        s.require_equal(m.inner(moved, carried), m.inner(s.w, s.v))
    end, along = m.expmap_transp(s.w, s.u, s.v)
    s.require_equal(end, m.expmap(s.w, s.u))
    s.require_equal(along, m.transp_follow_expmap(s.w, s.u, s.v))
    s.require_tangent(end, along)
    if m.reversible:
        there, ahead = m.retr_transp(s.w, s.u, s.u)
        s.require_equal(m.retr(there, -ahead), s.w)


def law_batch(s: Sample) -> None:
    """A batch equals the loop over its members."""
    depth = s.w.dim() - 2
    for name in ("projx", "proju", "egrad2rgrad", "retr", "expmap", "inner") if depth else ():
        method = getattr(s.manifold, name)
        tensors = (s.w,) if name == "projx" else (s.w, s.u)
        members = zip(*(t.flatten(0, depth - 1) for t in (*tensors, method(*tensors))), strict=True)
        for *inputs, member in members:
            s.require_equal(member, method(*inputs))


def law_checks(s: Sample) -> None:
    """Frames and tangent vectors pass their checks; others fail, with a reason."""
    m = s.manifold
    assert m.check_point_on_manifold(s.w)
    assert m.check_vector_on_tangent(s.w, s.u)
    for wrong in (1.01 * s.w, s.w * torch.nan, s.w.flatten()):
        holds, reason = m.check_point_on_manifold(wrong, explain=True)
        assert not holds
        assert reason
    holds, reason = m.check_vector_on_tangent(s.w, s.w, explain=True)
    assert not holds
    assert reason


def law_identity(s: Sample) -> None:
    """Copies, pickled ones too, are equal to the manifold, and so are their hashes: geoopt compares."""
    for twin in (copy.deepcopy(s.manifold), pickle.loads(pickle.dumps(s.manifold))):
        assert twin == s.manifold
        assert hash(twin) == hash(s.manifold)


LAWS = {name.removeprefix("law_"): law for name, law in vars().copy().items() if name.startswith("law_")}


def check_manifold(
    manifold: Any,
    laws: Iterable[str] = tuple(LAWS),
    shapes: Iterable[tuple[int, ...]] = SHAPES,
    dtypes: Iterable[torch.dtype] = DTYPES,
) -> None:
    """Runs laws on a manifold; `is_isometric = True` on it claims that `retr_transp` keeps inner products."""
    for shape, dtype, law in itertools.product(shapes, tuple(dtypes), tuple(laws)):
        LAWS[law](sample(manifold, shape, dtype))


def sample(manifold: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Sample:
    generator, wide = seeds.generator(), working_dtype(dtype)
    w = init.haar(shape, wide, generator)
    drawn = (torch.randn(shape, dtype=wide, generator=generator) for _ in range(3))
    u, v, g = (direction(w, z)[1] if k < 2 else z / z.norm() for k, z in enumerate(drawn))
    return Sample(manifold, *(t.to(dtype) for t in (w, u, v, g)))


def direction(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nearest float64 frame and the tangent part of U there, of length 1 (0 on real 1 x 1 frames)."""
    wide = working_dtype(w.dtype)
    left, _, right = torch.linalg.svd(w.detach().to(wide), full_matrices=False)
    w, u = left @ right, u.detach().to(wide)
    for _ in range(2):  # rounding leaves a normal part of a U that is nearly normal to the manifold
        s = w.mH @ u
        u = u - w @ (s + s.mH) / 2
        length = u.norm().item()
        if length < 1e-12:
            return w, torch.zeros_like(u)
        u = u / length
    return w, u


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    wide = working_dtype(a.dtype)
    return (a.to(wide).conj() * b.to(wide)).real.sum(dim=(-2, -1))


def slope(errors: Sequence[float]) -> float:
    """Returns the least-squares slope of log error over log time; infinity where all errors are rounding."""
    if max(errors) < 1e-12:
        return math.inf
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (TIMES, errors))
    x = x - x.mean()
    return ((x * y).sum() / (x * x).sum()).item()

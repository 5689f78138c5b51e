"""The Stiefel manifold of frames, real and complex."""

from collections.abc import Callable, Sequence
from typing import Any

import geoopt
import torch
from geoopt.utils import size2shape
from torch import Tensor

from stiefelkit import init
from stiefelkit.errors import DtypeError, ImageError, NotAFrameError, OptionError, ShapeError, did_you_mean
from stiefelkit.functional import polar_factor, polish
from stiefelkit.manifolds.checks import DTYPES, REACH, checked, judged, members, wrong_dtype
from stiefelkit.manifolds.geodesics import geodesic
from stiefelkit.manifolds.hessians import riemannian_hessian
from stiefelkit.manifolds.logarithms import logarithm
from stiefelkit.manifolds.retractions import RETRACTIONS, tangent
from stiefelkit.metrics import orthogonality_error, working_dtype

__all__ = ["Stiefel"]

_ALPHA = {"canonical": 1, "euclidean": 2}


class Stiefel(geoopt.Manifold):
    r"""The Stiefel manifold St(n, p): n x p matrices with orthonormal columns, W^H W = I, n >= p, real or complex.

    Tangent vectors at W are the U with W^H U + U^H W = 0. Two inner products of them:

        canonical: Re tr(U^H (I - W W^H / 2) V),    euclidean: Re tr(U^H V).

    All of it works in float64 or complex128 and rounds once. A step first replaces a float32 frame by the nearest exact
    one, so ||W^H W - I||_F stays at the rounding limit however many steps an optimizer makes. Nothing of n x n is
    formed for n > 3p. Not for devices without float64, nor fast where it is slow.

    Methods have geoopt's names and arguments: `x`, `y` are frames, `u`, `v` tangent vectors, of shape (*, n, p),
    float32, float64, complex64 or complex128. Of a direction that is not tangent the tangent part counts.
    Steps are taken from frames only: from what is further off than three times the tolerance of
    `check_point_on_manifold` they raise NotAFrameError on the CPU; on other devices, where no value is read, and under
    torch.func and torch.compile they end in NaN.
    `logmap` and `dist` are not differentiable, all else is any number of times; derivatives by a frame are right for
    its tangent directions.

    Args:
        metric: "canonical" or "euclidean".
        retraction: "cayley" (carries vectors isometrically; reversible), "polar" or "qr" (carry by projection).

    Raises:
        OptionError: no metric or retraction has that name.

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, SIAM J. Matrix Anal. 20, 1998.

    >>> manifold = Stiefel()
    >>> w = manifold.random(5, 2, dtype=torch.float64)
    >>> u = manifold.proju(w, torch.ones(5, 2, dtype=torch.float64))
    >>> manifold.check_point_on_manifold(manifold.retr(w, u))
    True
    """

    name = "Stiefel"
    ndim = 2

    def __init__(self, metric: str = "canonical", retraction: str = "cayley"):
        super().__init__()
        if metric not in _ALPHA:
            raise OptionError(f"Stiefel needs a known metric, got {metric!r}{did_you_mean(metric, _ALPHA)}")
        if retraction not in RETRACTIONS:
            known = did_you_mean(retraction, RETRACTIONS)
            raise OptionError(f"Stiefel needs a known retraction, got {retraction!r}{known}")
        self.metric = metric
        self.retraction = retraction

    @property
    def reversible(self) -> bool:  # type: ignore[override]
        """Whether a step and the same step back, with the carried direction, end at the start."""
        return self.retraction == "cayley"

    @property
    def is_isometric(self) -> bool:
        """Whether `retr_transp` and `transp_follow_retr` keep inner products."""
        return self.retraction == "cayley"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (other.metric, other.retraction) == (self.metric, self.retraction)

    def __hash__(self) -> int:
        return hash((type(self), self.metric, self.retraction))

    def extra_repr(self) -> str:
        """Names metric and retraction."""
        return f"{self.metric}, {self.retraction}"

    def projx(self, x: Tensor) -> Tensor:
        """Returns the frame nearest to X, any finite matrix of full column rank: its orthogonal polar factor."""
        self._assert_check_shape(x.shape, "x")
        return polar_factor(x)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Projects a matrix on the tangent space, orthogonally in the Euclidean metric: U - W (W^H U + U^H W) / 2."""
        w, wide = _widened(x, u)
        return tangent(w, wide).to(u.dtype)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Turns a Euclidean gradient G into the tangent R with inner(R, V) = Re tr(G^H V) for every tangent V.

        Canonical: G - W G^H W; Euclidean: its tangent part.
        """
        w, g = _widened(x, u)
        r = g - w @ (g.mH @ w) if self.metric == "canonical" else tangent(w, g)
        return r.to(u.dtype)

    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """Turns a Euclidean Hessian along U into the Riemannian one, the covariant derivative of the gradient along U.

        Self-adjoint in the metric, and inner(U, Hess U) is the second derivative along the geodesic that leaves in the
        direction U. The formula: `stiefelkit.manifolds.hessians`.

        Args:
            x: frames, shape (*, n, p).
            egrad: Euclidean gradients G at X, df = Re tr(G^H dX), as torch gives them.
            ehess: derivatives of G in the direction U, as `torch.func.jvp(torch.func.grad(f), (x,), (u,))` gives them.
            u: tangent vectors; of another direction the tangent part counts, for which `ehess` must be.

        Returns:
            Tangent vectors of the dtype of `ehess`.

        >>> manifold, s = Stiefel(), torch.diag(torch.tensor([1.0, 2.0, 3.0]))
        >>> x, u = torch.eye(3, 1), torch.tensor([[0.0], [1.0], [0.0]])  # of f(X) = tr(X^T S X) / 2
        >>> manifold.ehess2rhess(x, s @ x, s @ u, u).flatten()
        tensor([0., 1., 0.])
        """
        w, g, h, wide = _widened(x, egrad, ehess, u)
        return riemannian_hessian(w, g, h, tangent(w, wide), alpha=_ALPHA[self.metric]).to(ehess.dtype)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Inner product of tangent vectors, real in complex spaces too, shape (*), or (*, 1, 1) with `keepdim`."""
        return self._inner(x, u, v, keepdim).to(x.dtype.to_real())

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Length of a tangent vector, shape (*), or (*, 1, 1) with `keepdim`."""
        return self._inner(x, u, None, keepdim).sqrt().to(x.dtype.to_real())

    def _inner(self, x: Tensor, u: Tensor, v: Tensor | None, keepdim: bool) -> Tensor:
        w, a, b = _widened(x, u, u if v is None else v)
        found = _real_inner(a, b, keepdim)
        return found if self.metric == "euclidean" else found - _real_inner(w.mH @ a, w.mH @ b, keepdim) / 2

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Moves frames in the direction U by the retraction."""
        return self._move(RETRACTIONS[self.retraction], x, u)[0]

    def retr_transp(self, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Moves frames by the retraction, and V along with them."""
        moved, carried = self._move(RETRACTIONS[self.retraction], x, u, v)
        return moved, carried

    def transp_follow_retr(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Carries V along the retraction: "cayley" by its unitary factor, the others by projection."""
        return self.retr_transp(x, u, v)[1]

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Moves frames along the geodesic of the metric, for unit time."""
        return self._move(self._geodesic, x, u)[0]

    def expmap_transp(self, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Moves frames along the geodesic, and V isometrically along with them (not the parallel transport)."""
        moved, carried = self._move(self._geodesic, x, u, v)
        return moved, carried

    def transp_follow_expmap(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Carries V isometrically along the geodesic."""
        return self.expmap_transp(x, u, v)[1]

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Projects V on the tangent space at Y."""
        return self.proju(y, v)

    def logmap(self, x: Tensor, y: Tensor, *, missing: str = "raise") -> Tensor:
        """Finds a tangent vector at X whose geodesic ends at Y, checked to end there.

        The shortest where n = p or where it is short, see `logarithm`; beyond that the shortest of several.
        Where many are shortest, as between the poles of a sphere, one of them. In the Euclidean metric the one of tall
        frames that shooting finds, which from a distance of pi on need not be the shortest, and fails for some.

        Args:
            x: frames.
            y: frames.
            missing: what is done where there is none: "raise", or "nan" for NaN in these members of the batch.

        Raises:
            ImageError: square real frames have different determinants, what is no frame, or tall frames far apart
                that shooting did not join in the Euclidean metric; names the members.
            OptionError: `missing` is neither "raise" nor "nan".
        """
        if missing not in ("raise", "nan"):
            raise OptionError(f'Stiefel.logmap needs `missing` to be "raise" or "nan", got {missing!r}.')
        w, end = torch.broadcast_tensors(*_widened(x, y))
        u, found = logarithm(polish(w), polish(end), alpha=_ALPHA[self.metric])
        if missing == "raise" and not found.all():
            remedy = _remedy(w[~found], end[~found])
            which = members(~found)
            raise ImageError(f"Stiefel.logmap needs frames that a geodesic joins, got none{which}; {remedy}.")
        return u.to(x.dtype)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False, missing: str = "raise") -> Tensor:
        """Length of the geodesic that `logmap` finds, shape (*), or (*, 1, 1) with `keepdim`."""
        return self.norm(x, self.logmap(x, y, missing=missing), keepdim=keepdim)

    def _geodesic(self, w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        return geodesic(w, u, *vectors, alpha=_ALPHA[self.metric])

    def _move(self, along: Callable[..., tuple[Tensor, ...]], x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        if not x.is_complex() and any(v.is_complex() for v in vectors):
            raise DtypeError(f"Stiefel needs real vectors at a real frame ({x.dtype}), got complex ones.")
        w, *wide = _widened(x, *vectors)
        single = x.dtype != w.dtype
        w, *wide = torch.broadcast_tensors(checked(w, x.dtype), *wide)
        moved, *carried = along(w, *wide)
        moved = moved if single else polish(moved)
        return moved.to(x.dtype), *(z.to(v.dtype) for z, v in zip(carried, vectors[1:], strict=True))

    def dim(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> int:
        """Number of real dimensions of the manifold of one frame: np - p(p + 1)/2, and 2np - p^2 where complex.

        Args:
            size: (*, n, p), as integers or one sequence; how large the batch is does not count.
            dtype: of the frames; torch's default when None.

        >>> Stiefel().dim(5, 2), Stiefel().dim(5, 2, dtype=torch.complex64)
        (7, 16)
        """
        (*_, n, p), dtype = self._size(size, dtype)
        return 2 * n * p - p * p if dtype.is_complex else n * p - p * (p + 1) // 2

    def typical_dist(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> float:
        """A length to measure steps and trust regions by, sqrt(p) for each frame, as Manopt has it.

        The root mean square of the chord ||X - Y||_F of random frames is sqrt(2) times that.

        Args:
            size: (*, n, p), as integers or one sequence; how large the batch is does not count.
            dtype: of the frames; torch's default when None.

        References:
            Boumal, Mishra, Absil, Sepulchre, Manopt, a Matlab toolbox for optimization on manifolds, JMLR 15, 2014.
        """
        return self._size(size, dtype)[0][-1] ** 0.5

    def random(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
        det: int | None = None,
        **kwargs: Any,
    ) -> geoopt.ManifoldTensor:
        """Draws frames from the uniform (Haar) measure, each matrix of a batch independently.

        Args:
            size: (*, n, p), as integers or one sequence.
            dtype: torch's default when None.
            device: of the result.
            generator: source of randomness; torch's default when None.
            det: 1 or -1 for the uniform measure on that component of O(n), real square frames only; either when None.
            kwargs: none are known.

        Raises:
            OptionError: another `det`, or one for frames that have one component; an unknown option.
            ShapeError, DtypeError: no frames have this size or dtype.
        """
        if kwargs:
            raise OptionError(f"Stiefel.random needs dtype, device, generator and det only, got {', '.join(kwargs)}.")
        shape, dtype = self._size(size, dtype)
        if det is not None and (det not in (1, -1) or shape[-2] != shape[-1] or dtype.is_complex):
            raise OptionError(
                "Stiefel.random needs `det` to be 1 or -1, for real square frames, or None, got "
                f"{det!r} for {dtype} of size {tuple(shape)}."
            )
        w = init.haar(shape, working_dtype(dtype), generator)
        if det is not None:
            # Haar measure on either component is the other's with one column reflected.
            w[..., 0] *= det * torch.linalg.det(w).sign().unsqueeze(-1)
        return self._point(w, dtype, device)

    def random_naive(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> geoopt.ManifoldTensor:
        """Draws frames as `random` does: geoopt's name for frames of any measure, here the uniform one."""
        return self.random(*size, dtype=dtype, device=device, generator=generator)

    def origin(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> geoopt.ManifoldTensor:
        """Returns the first p columns of the identity, for any seed."""
        shape, dtype = self._size(size, dtype)
        return self._point(init.identity(shape, working_dtype(dtype)), dtype, device)

    def _size(self, size: Any, dtype: torch.dtype | None) -> tuple[Sequence[int], torch.dtype]:
        shape, dtype = size2shape(*size), dtype or torch.get_default_dtype()
        self._assert_check_shape(shape, "size")
        self._assert_dtype(dtype)
        return shape, dtype

    def _point(self, w: Tensor, dtype: torch.dtype, device: Any) -> geoopt.ManifoldTensor:
        return geoopt.ManifoldTensor(w.to(device=device, dtype=dtype), manifold=self)  # type: ignore[call-arg]

    def check_point(self, x: Tensor, *, explain: bool = False) -> Any:
        """Whether a tensor has a shape and dtype of frames; with `explain`, also the reason why not."""
        ok, reason = self._check_shape(x.shape, "x")
        if ok and x.dtype not in DTYPES:
            ok, reason = False, wrong_dtype(x.dtype)
        return (ok, reason) if explain else ok

    def assert_check_point(self, x: Tensor) -> None:
        """Raises ShapeError or DtypeError unless a tensor has a shape and dtype of frames."""
        self._assert_check_shape(x.shape, "x")
        self._assert_dtype(x.dtype)

    def assert_check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> None:
        """Raises NotAFrameError, ShapeError or DtypeError unless X is a frame."""
        self.assert_check_point(x)
        ok, reason = self._check_point_on_manifold(x, atol=atol, rtol=rtol)
        if not ok:
            raise NotAFrameError(f"Stiefel needs orthonormal columns, got {reason}; projx gives the nearest frame.")

    def _assert_check_shape(self, shape: tuple[int, ...], name: str) -> None:
        ok, reason = self._check_shape(shape, name)
        if not ok:
            raise ShapeError(reason)

    def _assert_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise DtypeError(wrong_dtype(dtype))

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        if len(shape) >= 2 and shape[-2] >= shape[-1] >= 1:
            return True, None
        remedy = "; take the transpose" if len(shape) >= 2 and shape[-2] < shape[-1] else ""
        return False, f"Stiefel needs `{name}` of shape (*, n, p), n >= p >= 1, got {tuple(shape)}{remedy}."

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if x.dtype not in DTYPES:
            return False, wrong_dtype(x.dtype)
        error = orthogonality_error(x)
        return judged("||W^H W - I||_F", error, torch.full_like(error, atol + rtol * x.shape[-1] ** 0.5))

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        w, wide = torch.broadcast_tensors(*_widened(x.detach(), u.detach()))
        s = w.mH @ wide
        permitted = atol + rtol * torch.linalg.matrix_norm(wide)
        return judged("||W^H U + U^H W||_F", torch.linalg.matrix_norm(s + s.mH), permitted)


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = torch.complex128 if any(t.is_complex() for t in tensors) else torch.float64
    return tuple(t.to(dtype) for t in tensors)


def _remedy(w: Tensor, y: Tensor) -> str:
    """Why no geodesic joins frames, or what does."""
    if w.shape[-2] == w.shape[-1] and not w.is_complex() and torch.linalg.det(w.mH @ y).lt(0).any():
        return "their determinants differ"
    if all((orthogonality_error(z) <= REACH).all() for z in (w, y)):
        return 'metric="canonical" joins all'
    return "projx gives the nearest frames"


def _real_inner(a: Tensor, b: Tensor, keepdim: bool) -> Tensor:
    """Re tr(A^H B)."""
    return (a.conj() * b).real.sum(dim=(-2, -1), keepdim=keepdim)

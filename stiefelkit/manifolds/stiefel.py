"""The Stiefel manifold of frames, real and complex."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import geoopt
import torch
from geoopt.utils import size2shape
from torch import Tensor

from stiefelkit import init
from stiefelkit._torch import is_traced, is_transformed
from stiefelkit.errors import (
    DtypeError,
    ImageError,
    NotAFrameError,
    OptionError,
    RankError,
    ShapeError,
    did_you_mean,
    shown,
)
from stiefelkit.functional import (
    RETRACTIONS,
    geodesic,
    geodesic_logarithm,
    inner_product,
    polar_factor,
    polish,
    riemannian_hessian,
    skew_size,
    tangent_part,
)
from stiefelkit.functional._arithmetic.norms import norms_without_sync
from stiefelkit.functional._stiefel.tangents import alpha_of
from stiefelkit.metrics import defect, frame_tolerance, orthogonality_error, rounding_limit, working_dtype
from stiefelkit.numbers import one_of, sizes
from stiefelkit.tensors import check_tensors
from stiefelkit.weights.optimizer_hooks import watch_manifold

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_REACH = 3e-5
"""Frames within this times 1 + sqrt(p) may be moved: three times geoopt's tolerance. A polish leaves 3/4 of the square
of it, below half the rounding limit of float32 up to p = 600, and what `geodesic_logarithm` takes for frames."""
_LONG = 1e3
"""Largest entry of a vector from which on it is looked at whether a step along it ends at a frame."""


class Stiefel(geoopt.Manifold):
    r"""The Stiefel manifold :math:`St(n, p)`: real or complex n x p matrices, :math:`n ≥ p`, with :math:`W^H W = I`.

    Tangent vectors at W are the U with :math:`W^H U + U^H W = 0`. Two inner products of them: canonical,
    :math:`Re tr(U^H (I - W W^H / 2) V)`, and euclidean, :math:`Re tr(U^H V)`.

    All of it works in float64 or complex128 and rounds once. A step first replaces a float32 frame by the nearest exact
    one, so :math:`‖W^H W - I‖_F` stays at the rounding limit however many steps an optimizer makes. Nothing of n x n is
    formed for :math:`n > 3p`. Not for devices without float64, nor fast where it is slow.

    Methods have geoopt's names and arguments: `x`, `y` are frames, `u`, `v` tangent vectors, of shape (*, n, p),
    float32, float64, complex64 or complex128. Of a direction that is not tangent the tangent part counts.
    Steps are taken from frames only: from what is further off than three times the tolerance of
    `check_point_on_manifold` they raise NotAFrameError on the CPU; on other devices, where no value is read, and under
    torch.func and torch.compile they end in NaN. Of a step so long that no frame comes of it the CPU raises RankError.
    A parameter on it, `geoopt.ManifoldParameter(w, Stiefel())`, is refused by optimizers that would take it off, at
    their first step; geoopt's take it, and so do those of `stiefelkit.optim`, in its metric.
    `logmap` and `dist` are not differentiable, all else is any number of times; derivatives by a frame are right for
    its tangent directions.

    Args:
        metric: "canonical" or "euclidean"; groups of optimizers name the manifold with it, "stiefel:euclidean".
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
        alpha_of("Stiefel", metric)
        if not one_of(*RETRACTIONS).holds(retraction):
            hint = did_you_mean(retraction, RETRACTIONS)
            raise OptionError(f"Stiefel needs a known retraction, got {shown(retraction)}{hint}")
        self.metric = metric
        self.retraction = retraction

    @property
    def reversible(self) -> bool:  # type: ignore[override]
        """True if a step and the same step back, with the carried direction, end at the start."""
        return self.retraction == "cayley"

    @property
    def is_isometric(self) -> bool:
        """True if `retr_transp` and `transp_follow_retr` keep inner products."""
        return self.retraction == "cayley"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (other.metric, other.retraction) == (self.metric, self.retraction)

    def __hash__(self) -> int:
        return hash((type(self), self.metric, self.retraction))

    def extra_repr(self) -> str:
        """Returns names metric and retraction."""
        return f"{self.metric}, {self.retraction}"

    def dim(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> int:
        """Returns the real dimension of the manifold of one frame: :math:`np - p(p + 1)/2`; complex: :math:`2np - p^2`.

        Args:
            size: (*, n, p), as integers or one sequence; how large the batch is does not count.
            dtype: of the frames; torch's default when None.

        >>> Stiefel().dim(5, 2), Stiefel().dim(5, 2, dtype=torch.complex64)
        (7, 16)
        """
        (*_, n, p), dtype = self._size(size, dtype)
        return skew_size(n, p, dtype.is_complex)

    def typical_dist(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> float:
        """Returns a length to measure steps and trust regions by, :math:`√p` for each frame, as Manopt has it.

        The root mean square of the chord :math:`‖X - Y‖_F` of random frames is :math:`√2` times that. Size and dtype
        are as in `dim`.

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
        if det is not None and (not one_of(1, -1).holds(det) or shape[-2] != shape[-1] or dtype.is_complex):
            raise OptionError(
                "Stiefel.random needs `det` to be 1 or -1, for real square frames, or None, got "
                f"{shown(det)} for {dtype} of size {tuple(shape)}."
            )
        w = init.haar(shape, working_dtype(dtype), generator)
        if det is not None:
            # Haar measure on either component is the other's with one column reflected.
            w[..., 0] *= det * torch.linalg.det(w).sign().unsqueeze(-1)
        return self._point(w, dtype, device)

    def random_naive(self, *size: int | Sequence[int], **options: Any) -> geoopt.ManifoldTensor:
        """Draws frames as `random` does: geoopt's name for frames of any measure, here the uniform one."""
        return self.random(*size, **options)

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
        shape, dtype = sizes(size2shape(*size)), dtype or torch.get_default_dtype()
        if shape is None:
            raise ShapeError(f"Stiefel needs `size` of shape (*, n, p), integers all, got {shown(size)}.")
        self._assert_check_shape(shape, "size")
        self._assert_dtype(dtype)
        return shape, dtype

    def _point(self, w: Tensor, dtype: torch.dtype, device: Any) -> geoopt.ManifoldTensor:
        return geoopt.ManifoldTensor(w.to(device=device, dtype=dtype), manifold=self)  # type: ignore[call-arg]

    def projx(self, x: Tensor) -> Tensor:
        """Returns the frame nearest to X, any finite matrix of full column rank: its orthogonal polar factor."""
        check_tensors("Stiefel", x)
        self._assert_check_shape(x.shape, "x")
        return polar_factor(x)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Projects a matrix on the tangent space in the Euclidean metric: :math:`U - W (W^H U + U^H W) / 2`."""
        w, wide = _widened(x, u)
        return tangent_part(w, wide).to(u.dtype)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Turns a Euclidean gradient G into the tangent R with :math:`⟨R, V⟩ = Re tr(G^H V)` for every tangent V.

        Canonical: :math:`G - W G^H W`; Euclidean: its tangent part.
        """
        w, g = _widened(x, u)
        r = g - w @ (g.mH @ w) if self.metric == "canonical" else tangent_part(w, g)
        return r.to(u.dtype)

    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """Turns a Euclidean Hessian along U into the Riemannian one, the covariant derivative of the gradient along U.

        Self-adjoint in the metric, and :math:`⟨U, Hess U⟩` is the second derivative along the geodesic that leaves in
        the direction U. The formula: `stiefelkit.functional.riemannian_hessian`.

        Args:
            x: frames, shape (*, n, p).
            egrad: Euclidean gradients G at X, :math:`df = Re tr(G^H dX)`, as torch gives them.
            ehess: derivatives of G in the direction U, as `torch.func.jvp(torch.func.grad(f), (x,), (u,))` gives them.
            u: tangent vectors; of another direction the tangent part counts, for which `ehess` must be.

        Returns:
            Tangent vectors of the dtype of `ehess`.

        >>> manifold, s = Stiefel(), torch.diag(torch.tensor([1.0, 2.0, 3.0]))
        >>> x, u = torch.eye(3)[:, :2].split(1, dim=1)  # of f(X) = tr(X^T S X) / 2
        >>> manifold.ehess2rhess(x, s @ x, s @ u, u).flatten()
        tensor([0., 1., 0.])
        """
        w, g, h, wide = _widened(x, egrad, ehess, u)
        return riemannian_hessian(w, g, h, tangent_part(w, wide), self.metric).to(ehess.dtype)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Returns the real inner product of tangent vectors, shape (*), or (*, 1, 1) with `keepdim`."""
        w, a, b = _widened(x, u, u if v is None else v)
        return inner_product(w, a, b, self.metric, keepdim=keepdim).to(x.dtype.to_real())

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Returns the length of a tangent vector, shape (*), or (*, 1, 1) with `keepdim`."""
        w, a = _widened(x, u)
        unit = _unit_of(a)
        length = inner_product(w, a / unit, a / unit, self.metric, keepdim=True).sqrt() * unit
        return (length if keepdim else length[..., 0, 0]).to(x.dtype.to_real())

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

        The shortest where n = p or where it is short, see `stiefelkit.functional.geodesic_logarithm`; beyond that the
        shortest of several. Where many are shortest, as between the poles of a sphere, one of them. In the Euclidean
        metric the one of tall frames that shooting finds, which from a distance of π on need not be the shortest, and
        fails for some.

        Args:
            x: frames.
            y: frames.
            missing: what is done where there is none: "raise", or "nan" for NaN in these members of the batch.

        Raises:
            ImageError: square real frames have different determinants, what is no frame, or tall frames far apart
                that shooting did not join in the Euclidean metric; names the members.
            OptionError: `missing` is neither "raise" nor "nan".
        """
        if not one_of("raise", "nan").holds(missing):
            raise OptionError(f'Stiefel.logmap needs `missing` to be "raise" or "nan", got {shown(missing)}.')
        w, end = torch.broadcast_tensors(*_widened(x, y))
        u, joined = geodesic_logarithm(polish(w), polish(end), self.metric)
        if missing == "raise" and not joined.all():
            raise ImageError(
                f"Stiefel.logmap needs frames that a geodesic joins, got none{_members(~joined)}; "
                f"{_remedy(w[~joined], end[~joined])}."
            )
        return u.to(x.dtype)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False, missing: str = "raise") -> Tensor:
        """Returns the length of the geodesic that `logmap` finds, shape (*), or (*, 1, 1) with `keepdim`."""
        return self.norm(x, self.logmap(x, y, missing=missing), keepdim=keepdim)

    def check_point(self, x: Tensor, *, explain: bool = False) -> Any:
        """Returns whether a tensor has a shape and dtype of frames; with `explain`, also the reason why not."""
        check_tensors("Stiefel", x)
        ok, reason = self._check_shape(x.shape, "x")
        if ok and x.dtype not in _DTYPES:
            ok, reason = False, _wrong_dtype(x.dtype)
        return (ok, reason) if explain else ok

    def assert_check_point(self, x: Tensor) -> None:
        """Raises ShapeError or DtypeError unless a tensor has a shape and dtype of frames."""
        check_tensors("Stiefel", x)
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
        if dtype not in _DTYPES:
            raise DtypeError(_wrong_dtype(dtype))

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        if len(shape) >= 2 and shape[-2] >= shape[-1] >= 1:
            return True, None
        remedy = "; take the transpose" if len(shape) >= 2 and shape[-2] < shape[-1] else ""
        return False, f"Stiefel needs `{name}` of shape (*, n, p), n >= p >= 1, got {tuple(shape)}{remedy}."

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if x.dtype not in _DTYPES:
            return False, _wrong_dtype(x.dtype)
        error = orthogonality_error(x)
        return _judged("||W^H W - I||_F", error, torch.full_like(error, atol + rtol * x.shape[-1] ** 0.5))

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        w, wide = torch.broadcast_tensors(*_widened(x.detach(), u.detach()))
        s = w.mH @ wide
        permitted = atol + rtol * torch.linalg.matrix_norm(wide)
        return _judged("||W^H U + U^H W||_F", torch.linalg.matrix_norm(s + s.mH), permitted)

    def _geodesic(self, w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        return geodesic(w, u, *vectors, metric=self.metric)

    def _move(self, along: Callable[..., tuple[Tensor, ...]], x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        w, *wide = _widened(x, *vectors)
        if not x.is_complex() and w.is_complex():
            raise DtypeError(f"Stiefel needs real vectors at a real frame ({x.dtype}), got complex ones.")
        single = x.dtype != w.dtype
        w, *wide = torch.broadcast_tensors(_checked(w, x.dtype), *wide)
        moved, *carried = along(w, *wide)
        moved = _landed((moved if single else polish(moved)).to(x.dtype), wide[0])
        return moved, *(z.to(v.dtype) for z, v in zip(carried, vectors[1:], strict=True))


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in float64, or all in complex128; raises ShapeError or DtypeError unless they are matrices."""
    for t in tensors:
        if not isinstance(t, Tensor) or not (t.is_floating_point() or t.is_complex()):
            raise DtypeError(f"Stiefel needs floating or complex tensors, got {shown(t)}.")
        if t.dim() < 2:
            raise ShapeError(f"Stiefel needs tensors of shape (*, n, p), got {tuple(t.shape)}.")
    dtype = torch.complex128 if any(t.is_complex() for t in tensors) else torch.float64
    return tuple(t.to(dtype) for t in tensors)


def _wrong_dtype(dtype: torch.dtype) -> str:
    """Returns why a dtype holds no frames."""
    return f"Stiefel needs float32, float64, complex64 or complex128, got {shown(dtype)}; keep the frame in float32."


def _judged(what: str, errors: Tensor, permitted: Tensor) -> tuple[bool, str | None]:
    """Returns whether every error is permitted, and the worst that is not; NaN never is."""
    over = ~(errors <= permitted)
    if not over.any():
        return True, None
    worst = (errors - permitted).nan_to_num(nan=torch.inf).argmax()
    return False, f"{what} = {errors.flatten()[worst]:.3g}, permitted {permitted.flatten()[worst]:.3g}"


def _checked(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Widens a frame, polished if it was rounded; raises for what is no frame, or returns NaN off the CPU."""
    p = w.shape[-1]
    permitted = max(_REACH * (1 + p**0.5), 4 * rounding_limit(p, dtype))
    # Detached, since no_grad leaves forward derivatives.
    constant = w.detach()
    with torch.no_grad():
        off = defect(constant)
        correction = constant @ off if dtype != w.dtype else None
        if w.device.type != "cpu" or is_traced() or is_transformed():
            norms = torch.linalg.vector_norm(off, dim=(-2, -1), keepdim=True)
            correction = torch.where(norms <= permitted, 0.0 if correction is None else correction, torch.nan)
        # The norm of a whole batch is one operator, and no less than that of each.
        elif not torch.linalg.vector_norm(off).item() <= permitted:
            worst = torch.linalg.vector_norm(off, dim=(-2, -1)).max().item()
            if not worst <= permitted:
                raise NotAFrameError(
                    f"Stiefel needs a frame to move, ||W^H W - I||_F <= {permitted:.2g}, got {worst:.2g}; projx gives "
                    "the nearest."
                )
    # The rounding of a float32 frame would stay in every later one. The gradient passes straight through.
    return w if correction is None else torch.sub(w, correction, alpha=0.5)


def _landed(moved: Tensor, u: Tensor) -> Tensor:
    """Frames after a step along U; raises RankError if that was too long for them to be any, on a CPU."""
    if moved.device.type != "cpu" or is_traced() or is_transformed() or not u.numel():
        return moved
    constant = u.detach()
    if torch.linalg.vector_norm(constant, math.inf).item() > _LONG:
        error = orthogonality_error(moved).max().item()
        if not error <= frame_tolerance(moved.shape[-1], moved.dtype):
            raise RankError(
                f"Stiefel needs a step that its arithmetic can make, got one of length "
                f"{norms_without_sync(constant).max().item():.2g}, which ends at ||W^H W - I||_F = {error:.2g}; "
                "shorten it."
            )
    return moved


def _unit_of(u: Tensor) -> Tensor:
    """Returns a power of 2 of each matrix's size, shape (*, 1, 1): squares in units of it are ordinary numbers."""
    parts = torch.view_as_real(u.detach().resolve_conj()) if u.is_complex() else u.detach().unsqueeze(-1)
    largest = parts.abs().amax((-3, -2, -1)) if u.numel() else parts.new_zeros(parts.shape[:-3])
    ordinary = (largest > 0) & (largest < math.inf)
    return torch.where(ordinary, largest, 1.0).log2().floor().clamp(-1000, 1000).exp2()[..., None, None]


def _members(missing: Tensor) -> str:
    """Returns which members of a batch are missing, for an error."""
    if not missing.dim():
        return ""
    which = [str(tuple(index)) for index in missing.nonzero().tolist()]
    more = f" and {len(which) - 8} more" if len(which) > 8 else ""
    return f' for {", ".join(which[:8])}{more} of the batch {tuple(missing.shape)} (missing="nan" keeps the rest)'


def _remedy(w: Tensor, y: Tensor) -> str:
    """Returns why no geodesic joins frames, or what does."""
    if w.shape[-2] == w.shape[-1] and not w.is_complex() and torch.linalg.det(w.mH @ y).lt(0).any():
        return "their determinants differ"
    if all((orthogonality_error(z) <= _REACH * (1 + z.shape[-1] ** 0.5)).all() for z in (w, y)):
        return 'metric="canonical" joins all'
    return "projx gives the nearest frames"


watch_manifold(Stiefel)

"""geoopt's Stiefel manifold, real and complex, exact to rounding, with two metrics and three retractions."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import geoopt
import torch
from torch import Tensor

from stiefelkit import functional, init
from stiefelkit._torch import is_traced, is_transformed
from stiefelkit.errors import DtypeError, ImageError, NotAFrameError, OptionError, RankError, ShapeError, needs, shown
from stiefelkit.functional import RETRACTIONS, inner_product, polish, tangent_part
from stiefelkit.functional._stiefel.tangents import alpha_of
from stiefelkit.metrics import defect, frame_tolerance, orthogonality_error, rounding_limit, working_dtype
from stiefelkit.numbers import one_of, sizes
from stiefelkit.tensors import check_tensors
from stiefelkit.weights.optimizer_hooks import watch_manifold

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_REACH = 3e-5
"""Frames within this times 1 + sqrt(p) may be moved: three times geoopt's tolerance. A polish leaves 3/4 of the square
of it, below half the rounding limit of float32 up to p = 600, and what `geodesic_logarithm` takes for frames."""
_LONG = 1e3  # largest entry of a vector from which on it is looked at whether a step along it ends at a frame


class Stiefel(geoopt.Stiefel):
    r"""The Stiefel manifold :math:`St(n, p)`: real or complex n x p matrices, :math:`n ≥ p`, with :math:`W^H W = I`.

    Tangent vectors at W are the U with :math:`W^H U + U^H W = 0`. Two inner products of them: canonical,
    :math:`Re tr(U^H (I - W W^H / 2) V)`, and euclidean, :math:`Re tr(U^H V)`. All of it works in float64 or complex128
    and rounds once. A step first replaces a float32 frame by the nearest exact one, so :math:`‖W^H W - I‖_F` stays at
    the rounding limit however many steps an optimizer makes. Not for devices without float64, nor fast where it is
    slow.

    Methods are geoopt's: `x`, `y` are frames, `u`, `v` tangent vectors, of shape (*, n, p), float32, float64, complex64
    or complex128; a direction counts by its tangent part. From what is further off than three times the tolerance of
    `check_point_on_manifold` steps raise NotAFrameError on the CPU, and end in NaN on other devices, under torch.func
    and torch.compile. `logmap` and `dist` are not differentiable, all else is any number of times. Optimizers that
    would take a `geoopt.ManifoldParameter(w, Stiefel())` off it are refused at their first step; geoopt's and those of
    `stiefelkit.optim` take it.

    Args:
        metric: "canonical" or "euclidean"; groups of optimizers name the manifold with it, "stiefel:euclidean".
        retraction: "cayley" (transports vectors isometrically; reversible), "polar" or "qr" (by projection).

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, SIAM J. Matrix Anal. 20, 1998.

    >>> manifold = Stiefel()
    >>> w = manifold.random(5, 2, dtype=torch.float64)
    >>> manifold.check_point_on_manifold(manifold.retr(w, manifold.proju(w, w + 1)))
    True
    """

    name = "Stiefel"

    def __new__(cls, *args: object, **options: object) -> "Stiefel":
        """Makes this class, where geoopt's chooses one by the metric."""
        return object.__new__(cls)

    def __init__(self, metric: str = "canonical", retraction: str = "cayley"):
        super().__init__()
        alpha_of("Stiefel", metric)
        self.metric, self.retraction = metric, one_of(*RETRACTIONS).require("Stiefel", "a retraction", retraction)
        self.reversible = self.is_isometric = retraction == "cayley"
        self._retraction, self._geodesic = RETRACTIONS[retraction], partial(functional.geodesic, metric=metric)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (other.metric, other.retraction) == (self.metric, self.retraction)

    def __hash__(self) -> int:
        return hash((type(self), self.metric, self.retraction))

    def extra_repr(self) -> str:
        """Returns the names of metric and retraction."""
        return f"{self.metric}, {self.retraction}"

    def dim(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> int:
        """Returns the real dimension of the manifold of one frame: :math:`np - p(p + 1)/2`; complex: :math:`2np - p^2`.

        >>> Stiefel().dim(5, 2), Stiefel().dim(5, 2, dtype=torch.complex64)
        (7, 16)
        """
        (*_, n, p), dtype = self._size(size, dtype)
        return functional.skew_size(n, p, dtype.is_complex)

    def typical_dist(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> float:
        """Returns :math:`√p` to measure steps and trust regions by.

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
    ) -> geoopt.ManifoldTensor:
        """Draws frames of shape (*, n, p) from the uniform (Haar) measure, each matrix of a batch independently.

        With `det`, 1 or -1, from the uniform measure on that component of O(n), real square frames only.
        """
        shape, dtype = self._size(size, dtype)
        w = init.haar(shape, working_dtype(dtype), generator)
        if det is not None:
            is_component = one_of(1, -1).holds(det) and shape[-2] == shape[-1] and not dtype.is_complex
            needs(is_component, OptionError, "Stiefel", "det 1 or -1, for real square frames", f"{det} for {shape}")
            # Haar measure on either component is the other's with one column reflected.
            w[..., 0] *= det * torch.linalg.det(w).sign().unsqueeze(-1)
        return geoopt.ManifoldTensor(w.to(device=device, dtype=dtype), manifold=self)  # type: ignore[call-arg]

    random_naive = random

    def origin(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> Tensor:
        """Returns the first p columns of the identity, for any seed."""
        return super().origin(*self._size(size, dtype)[0], dtype=dtype, device=device)

    def _size(
        self, size: tuple[int | Sequence[int], ...], dtype: torch.dtype | None
    ) -> tuple[tuple[int, ...], torch.dtype]:
        shape = sizes(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size) or ()
        dtype = dtype or torch.get_default_dtype()
        needs(dtype in _DTYPES, DtypeError, "Stiefel", _ITS_DTYPES, dtype)
        self._assert_check_shape(shape, "size")
        return shape, dtype

    def projx(self, x: Tensor) -> Tensor:
        """Returns the frame nearest to X, any finite matrix of full column rank: its orthogonal polar factor."""
        check_tensors("Stiefel", x)
        self._assert_check_shape(x.shape, "x")
        return functional.polar_factor(x)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Projects a matrix on the tangent space in the Euclidean metric: :math:`U - W (W^H U + U^H W) / 2`."""
        return tangent_part(*_widened(x, u)).to(u.dtype)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Turns a Euclidean gradient G into the tangent R with :math:`⟨R, V⟩ = Re tr(G^H V)` for every tangent V.

        Canonical: :math:`G - W G^H W`; Euclidean: its tangent part.
        """
        w, g = _widened(x, u)
        return (g - w @ (g.mH @ w) if self.metric == "canonical" else tangent_part(w, g)).to(u.dtype)

    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """Turns a Euclidean Hessian along U into the Riemannian one; see `stiefelkit.functional.riemannian_hessian`.

        `egrad` is torch's gradient, `ehess` its derivative along U, `torch.func.jvp(torch.func.grad(f), (x,), (u,))`.
        """
        w, g, h, wide = _widened(x, egrad, ehess, u)
        return functional.riemannian_hessian(w, g, h, tangent_part(w, wide), self.metric).to(ehess.dtype)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Returns the real inner product of tangent vectors, shape (*), or (*, 1, 1) with `keepdim`."""
        w, a, b = _widened(x, u, u if v is None else v)
        return inner_product(w, a, b, self.metric, keepdim=keepdim).to(x.dtype.to_real())

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Returns the length of a tangent vector, shape (*), or (*, 1, 1) with `keepdim`."""
        w, a = _widened(x, u)
        return inner_product(w, a, a, self.metric, keepdim=keepdim).sqrt().to(x.dtype.to_real())

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Moves frames in the direction U by the retraction; RankError on the CPU if that is too long a step."""
        return self._move(self._retraction, x, u)[0]

    def retr_transp(self, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Moves frames by the retraction, and V along with them."""
        return self._move(self._retraction, x, u, v)

    def transp_follow_retr(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Transports V along the retraction."""
        return self._move(self._retraction, x, u, v)[1]

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Moves frames along the geodesic of the metric, for unit time."""
        return self._move(self._geodesic, x, u)[0]

    def expmap_transp(self, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Moves frames along the geodesic, and V isometrically along with them (not the parallel transport)."""
        return self._move(self._geodesic, x, u, v)

    def transp_follow_expmap(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Transports V along the geodesic, as `expmap_transp` does."""
        return self._move(self._geodesic, x, u, v)[1]

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Projects V on the tangent space at Y."""
        return self.proju(y, v)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Finds a tangent vector at X whose geodesic ends at Y; see `stiefelkit.functional.geodesic_logarithm`.

        Raises ImageError where there is none; that function says for which members of the batch.
        """
        w, end = torch.broadcast_tensors(*_widened(x, y))
        u, joined = functional.geodesic_logarithm(polish(w), polish(end), self.metric)
        if not joined.all():
            got = f"{(~joined).sum()} of {joined.numel()} that none joins; geodesic_logarithm says which"
            needs(False, ImageError, "Stiefel.logmap", "frames, square real ones of equal determinants", got)
        return u.to(x.dtype)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Returns the length of the geodesic that `logmap` finds, shape (*), or (*, 1, 1) with `keepdim`."""
        return self.norm(x, self.logmap(x, y), keepdim=keepdim)

    def assert_check_point(self, x: Tensor) -> None:
        """Raises ShapeError or DtypeError unless a tensor has a shape and dtype of frames."""
        check_tensors("Stiefel", x)
        self._assert_check_shape(x.shape, "x")
        needs(x.dtype in _DTYPES, DtypeError, "Stiefel", _ITS_DTYPES, x.dtype)

    def assert_check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> None:
        """Raises NotAFrameError, ShapeError or DtypeError unless X is a frame."""
        self.assert_check_point(x)
        ok, reason = self._check_point_on_manifold(x, atol=atol, rtol=rtol)
        needs(ok, NotAFrameError, "Stiefel", "orthonormal columns, as projx gives them", f"{reason}")

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        if len(shape) >= 2 and shape[-2] >= shape[-1] >= 1:
            return True, None
        return False, f"Stiefel needs `{name}` of shape (*, n, p), n >= p >= 1, or its transpose, got {shown(shape)}."

    def _assert_check_shape(self, shape: tuple[int, ...], name: str) -> None:
        ok, reason = self._check_shape(shape, name)
        if not ok:
            raise ShapeError(reason)

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if x.dtype not in _DTYPES:
            return False, f"{x.dtype}, not {_ITS_DTYPES}"
        error = orthogonality_error(x)
        return _compared("||W^H W - I||_F", error, torch.full_like(error, atol + rtol * x.shape[-1] ** 0.5))

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        w, wide = torch.broadcast_tensors(*_widened(x.detach(), u.detach()))
        s = w.mH @ wide
        permitted = atol + rtol * torch.linalg.matrix_norm(wide)
        return _compared("||W^H U + U^H W||_F", torch.linalg.matrix_norm(s + s.mH), permitted)

    def _move(self, along: Callable[..., tuple[Tensor, ...]], x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        w, *wide = _widened(x, *vectors)
        needs(x.is_complex() or not w.is_complex(), DtypeError, "Stiefel", "real vectors at a real frame", "complex")
        w, *wide = torch.broadcast_tensors(_polished(w, x.dtype), *wide)
        moved, *transported = along(w, *wide)
        moved = (moved if x.dtype != w.dtype else polish(moved)).to(x.dtype)
        if _reads(moved) and wide[0].numel() and torch.linalg.vector_norm(wide[0].detach(), math.inf).item() > _LONG:
            error = orthogonality_error(moved).max().item()
            is_frame = error <= frame_tolerance(moved.shape[-1], moved.dtype)
            needs(is_frame, RankError, "Stiefel", "a shorter step", f"one to ||W^H W - I||_F = {error:.2g}")
        return moved, *(z.to(v.dtype) for z, v in zip(transported, vectors[1:], strict=True))


_ITS_DTYPES = "float32, float64, complex64 or complex128; keep the frame in float32"


def _reads(w: Tensor) -> bool:
    return w.device.type == "cpu" and not is_traced() and not is_transformed()


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns tensors in float64, or all in complex128; raises ShapeError or DtypeError unless they are matrices."""
    check_tensors("Stiefel", *tensors)
    for t in tensors:
        needs(t.is_floating_point() or t.is_complex(), DtypeError, "Stiefel", "floating or complex tensors", t.dtype)
        needs(t.dim() >= 2, ShapeError, "Stiefel", "tensors of shape (*, n, p)", tuple(t.shape))
    dtype = torch.complex128 if any(t.is_complex() for t in tensors) else torch.float64
    return tuple(t.to(dtype) for t in tensors)


def _compared(what: str, errors: Tensor, permitted: Tensor) -> tuple[bool, str | None]:
    """Returns whether every error is permitted, and the worst that is not; NaN never is."""
    if (errors <= permitted).all():
        return True, None
    worst = (errors - permitted).nan_to_num(nan=torch.inf).argmax()
    return False, f"{what} = {errors.flatten()[worst]:.3g}, permitted {permitted.flatten()[worst]:.3g}"


def _polished(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a widened frame, polished if it was rounded; raises for what is no frame, or returns NaN off the CPU."""
    p = w.shape[-1]
    permitted = max(_REACH * (1 + p**0.5), 4 * rounding_limit(p, dtype))
    # Detached, since no_grad leaves forward derivatives.
    constant = w.detach()
    with torch.no_grad():
        off = defect(constant)
        correction = constant @ off if dtype != w.dtype else None
        if not _reads(w):
            norms = torch.linalg.vector_norm(off, dim=(-2, -1), keepdim=True)
            correction = torch.where(norms <= permitted, 0.0 if correction is None else correction, torch.nan)
        # The norm of a whole batch is one operator, and no less than that of each.
        elif not torch.linalg.vector_norm(off).item() <= permitted:
            worst = torch.linalg.vector_norm(off, dim=(-2, -1)).max().item()
            words = f"||W^H W - I||_F <= {permitted:.2g}; projx gives the nearest"
            needs(worst <= permitted, NotAFrameError, "Stiefel", words, f"{worst:.2g}")
    # The rounding of a float32 frame would stay in every later one. The gradient passes straight through.
    return w if correction is None else torch.sub(w, correction, alpha=0.5)


watch_manifold(Stiefel)

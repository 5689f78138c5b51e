"""The Stiefel manifold of frames, real and complex."""

from collections.abc import Callable

import torch
from torch import Tensor

from stiefelkit.errors import DtypeError, ImageError, OptionError, did_you_mean, shown
from stiefelkit.functional import (
    METRICS,
    RETRACTIONS,
    geodesic,
    geodesic_logarithm,
    inner_product,
    polar_factor,
    polish,
    riemannian_hessian,
    tangent_part,
)
from stiefelkit.manifolds.checks import checked, landed, members, remedy, unit_of, widened
from stiefelkit.manifolds.frames import Frames
from stiefelkit.numbers import one_of
from stiefelkit.tensors import check_tensors
from stiefelkit.weights.optimizer_hooks import watch_manifold


class Stiefel(Frames):
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
    torch.func and torch.compile they end in NaN. Of a step so long that no frame comes of it the CPU raises RankError.
    A parameter on it, `geoopt.ManifoldParameter(w, Stiefel())`, is refused by optimizers that would take it off, at
    their first step; geoopt's take it, and so do those of `stiefelkit.optim`, in its metric.
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

    def __init__(self, metric: str = "canonical", retraction: str = "cayley"):
        super().__init__()
        if not one_of(*METRICS).holds(metric):
            raise OptionError(f"Stiefel needs a known metric, got {shown(metric)}{did_you_mean(metric, METRICS)}")
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

    def projx(self, x: Tensor) -> Tensor:
        """Returns the frame nearest to X, any finite matrix of full column rank: its orthogonal polar factor."""
        check_tensors("Stiefel", x)
        self._assert_check_shape(x.shape, "x")
        return polar_factor(x)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Projects a matrix on the tangent space, orthogonally in the Euclidean metric: U - W (W^H U + U^H W) / 2."""
        w, wide = widened(x, u)
        return tangent_part(w, wide).to(u.dtype)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Turns a Euclidean gradient G into the tangent R with inner(R, V) = Re tr(G^H V) for every tangent V.

        Canonical: G - W G^H W; Euclidean: its tangent part.
        """
        w, g = widened(x, u)
        r = g - w @ (g.mH @ w) if self.metric == "canonical" else tangent_part(w, g)
        return r.to(u.dtype)

    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """Turns a Euclidean Hessian along U into the Riemannian one, the covariant derivative of the gradient along U.

        Self-adjoint in the metric, and inner(U, Hess U) is the second derivative along the geodesic that leaves in the
        direction U. The formula: `stiefelkit.functional.riemannian_hessian`.

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
        w, g, h, wide = widened(x, egrad, ehess, u)
        return riemannian_hessian(w, g, h, tangent_part(w, wide), self.metric).to(ehess.dtype)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Returns the real inner product of tangent vectors, shape (*), or (*, 1, 1) with `keepdim`."""
        w, a, b = widened(x, u, u if v is None else v)
        return inner_product(w, a, b, self.metric, keepdim=keepdim).to(x.dtype.to_real())

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Returns the length of a tangent vector, shape (*), or (*, 1, 1) with `keepdim`."""
        w, a = widened(x, u)
        unit = unit_of(a)
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
        metric the one of tall frames that shooting finds, which from a distance of pi on need not be the shortest, and
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
        w, end = torch.broadcast_tensors(*widened(x, y))
        u, joined = geodesic_logarithm(polish(w), polish(end), self.metric)
        if missing == "raise" and not joined.all():
            raise ImageError(
                f"Stiefel.logmap needs frames that a geodesic joins, got none{members(~joined)}; "
                f"{remedy(w[~joined], end[~joined])}."
            )
        return u.to(x.dtype)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False, missing: str = "raise") -> Tensor:
        """Returns the length of the geodesic that `logmap` finds, shape (*), or (*, 1, 1) with `keepdim`."""
        return self.norm(x, self.logmap(x, y, missing=missing), keepdim=keepdim)

    def _geodesic(self, w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        return geodesic(w, u, *vectors, metric=self.metric)

    def _move(self, along: Callable[..., tuple[Tensor, ...]], x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        w, *wide = widened(x, *vectors)
        if not x.is_complex() and w.is_complex():
            raise DtypeError(f"Stiefel needs real vectors at a real frame ({x.dtype}), got complex ones.")
        single = x.dtype != w.dtype
        w, *wide = torch.broadcast_tensors(checked(w, x.dtype), *wide)
        moved, *carried = along(w, *wide)
        moved = landed((moved if single else polish(moved)).to(x.dtype), wide[0])
        return moved, *(z.to(v.dtype) for z, v in zip(carried, vectors[1:], strict=True))


watch_manifold(Stiefel)

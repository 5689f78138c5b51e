"""Each law of a manifold catches one that breaks it, and names itself."""

import geoopt
import pytest
import torch

from stiefelkit import errors
from stiefelkit.manifolds import Stiefel
from stiefelkit.testing import MANIFOLD_LAWS, LawBroken, check_manifold, retraction_order


class Flipped(Stiefel):
    """Leaves the signs of a QR factor as they come."""

    def retr(self, x, u):
        return -super().retr(x, u)


class Single(Stiefel):
    """Multiplies in the dtype of the frame."""

    def retr(self, x, u):
        q, r = torch.linalg.qr(x + u)
        return q * torch.sgn(r.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)


class Late(Stiefel):
    """Moves half as far as asked."""

    def retr(self, x, u):
        return super().retr(x, u / 2)


class RetractionForGeodesic(Stiefel):
    def expmap(self, x, u):
        return self.retr(x, u)


class OtherProjection(Stiefel):
    """Takes the canonical gradient for a projection, as geoopt does."""

    def proju(self, x, u):
        return u - x @ u.mH @ x


class HalfGradient(Stiefel):
    def egrad2rgrad(self, x, u):
        return super().egrad2rgrad(x, u) / 2


class FlatHessian(Stiefel):
    """Forgets how the manifold bends."""

    def ehess2rhess(self, x, egrad, ehess, u):
        return self.egrad2rgrad(x, ehess)


class OtherHessian(Stiefel):
    """Takes the Hessian of the Euclidean metric."""

    def ehess2rhess(self, x, egrad, ehess, u):
        return Stiefel("euclidean").ehess2rhess(x, egrad, ehess, u)


class Chord(Stiefel):
    """Takes the chord for the geodesic."""

    def logmap(self, x, y, *, missing="raise"):
        return self.proju(x, y - x)


class ComplexInner(Stiefel):
    def inner(self, x, u, v=None, *, keepdim=False):
        return (u.conj() * (u if v is None else v)).sum(dim=(-2, -1), keepdim=keepdim)


class Rescaled(Stiefel):
    """Moves a frame to a multiple of itself."""

    def projx(self, x):
        return super().projx(x) * (1 + 1e-4)


class Parallel(Stiefel):
    """Carries nothing."""

    def retr_transp(self, x, u, v):
        return self.retr(x, u), v


class Boasting(Stiefel):
    """Projects, and says that it keeps lengths."""

    is_isometric = True  # type: ignore[assignment]

    def __init__(self):
        super().__init__(retraction="polar")


class OneWay(Stiefel):
    reversible = True  # type: ignore[assignment]

    def __init__(self):
        super().__init__(retraction="qr")


class Mixed(Stiefel):
    """Adds the batch up."""

    def egrad2rgrad(self, x, u):
        return super().egrad2rgrad(x, u.sum(0, keepdim=True).expand_as(u) if u.dim() > 2 else u)


class Lenient(Stiefel):
    def _check_point_on_manifold(self, x, *, atol=1e-5, rtol=1e-5):
        return True, None


class Unique(Stiefel):
    __hash__ = Stiefel.__hash__

    def __eq__(self, other):
        return self is other


@pytest.mark.parametrize(
    ("saboteur", "law", "figure"),
    [
        (Flipped(), "retraction", "retr at length 0 is"),
        (Single(), "retraction", r"\|\|W\^H W - I\|\|_F"),
        (Late(), "retraction", "slope of 1.0"),
        (RetractionForGeodesic(), "geodesic", "speed of expmap"),
        (OtherProjection(), "projections", "proju of proju"),
        (HalfGradient(), "gradient", r"off Re tr\(G\^H V\)"),
        (FlatHessian(), "hessian", r"inner\(U, Hess U\) is .* off the second derivative"),
        (OtherHessian(), "hessian", "inner"),
        (Chord(), "logarithm", "logmap of expmap"),
        (ComplexInner(), "inner", "complex64"),
        (ComplexInner(), "gradient", r"off Re tr\(G\^H V\)"),
        (Rescaled(), "projections", r"projx: \|\|W\^H W - I\|\|_F"),
        (Parallel(), "transport", r"\|\|W\^H U \+ U\^H W\|\|_F|transp_follow_retr"),
        (Boasting(), "transport", "the square of a carried vector"),
        (OneWay(), "transport", "the same step back"),
        (Mixed(), "batch", "a member of the batch in egrad2rgrad"),
        (Lenient(), "checks", "1.01 times a frame is let through"),
        (Unique(), "identity", "another manifold"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Stiefel) else "",
)
def test_saboteurs_are_caught(saboteur, law, figure):
    with pytest.raises(LawBroken, match=rf"^{law}: .*{figure}"):
        check_manifold(saboteur, [law])


@pytest.mark.parametrize(
    ("manifold", "law"),
    [
        (geoopt.CanonicalStiefel(), "projections"),
        (geoopt.CanonicalStiefel(), "geodesic"),
        (geoopt.CanonicalStiefel(), "transport"),
        (geoopt.CanonicalStiefel(), "identity"),
        (geoopt.EuclideanStiefel(), "retraction"),
        (geoopt.EuclideanStiefel(), "identity"),
    ],
    ids=str,
)
def test_the_manifolds_of_geoopt_are_caught(manifold, law):
    with pytest.raises(LawBroken, match=f"^{law}: Stiefel"):
        check_manifold(manifold, [law], dtypes=[torch.float32, torch.float64])


def test_the_order_of_what_is_no_retraction_is_below_one():
    order = retraction_order(Late(), torch.eye(6, 3), torch.randn(6, 3))
    assert abs(order) < 0.1


def test_the_order_of_a_geodesic_is_infinite():
    assert retraction_order(RetractionForGeodesic(), torch.eye(6, 3), torch.randn(6, 3)) == torch.inf


def test_unknown_laws_and_useless_times_are_refused():
    with pytest.raises(errors.UnknownNameError, match='did you mean "transport"'):
        check_manifold(Stiefel(), ["transprot"])
    with pytest.raises(errors.OptionError, match="two positive times"):
        retraction_order(Stiefel(), torch.eye(3), torch.randn(3, 3), times=(0.1,))


def test_every_law_has_a_saboteur():
    marks = test_saboteurs_are_caught.pytestmark  # type: ignore[attr-defined]
    assert {law for _, law, _ in marks[0].args[1]} == set(MANIFOLD_LAWS)

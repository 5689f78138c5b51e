"""The manifolds keep the laws of manifolds, and each law catches a manifold that breaks it."""

import geoopt
import pytest
import torch
from drawn_frames import ALL
from manifold_laws import DTYPES, LAWS, check_manifold, retraction_order

from stiefelkit import init
from stiefelkit.manifolds import Stiefel


@pytest.mark.parametrize("manifold", ALL, ids=repr)
def test_laws(manifold):
    check_manifold(manifold)


def test_laws_hold_for_draws_that_are_nearly_normal_to_the_manifold(monkeypatch):
    drawn, w = torch.randn, torch.polar(*torch.tensor([[1.0], [0.3]], dtype=torch.float64)).view(1, 1)

    def nearly_normal(*shape, **options):
        z = drawn(*shape, **options)
        return torch.complex(z.real, 1e-6 * z.imag) * w if z.is_complex() else z

    monkeypatch.setattr(torch, "randn", nearly_normal)
    monkeypatch.setattr(init, "haar", lambda *_: w)
    check_manifold(Stiefel(), ["gradient", "transport"], [(1, 1)], [torch.complex128])


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

    def logmap(self, x, y):
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

    def __init__(self):
        super().__init__(retraction="polar")
        self.is_isometric = True


class OneWay(Stiefel):
    def __init__(self):
        super().__init__(retraction="qr")
        self.reversible = True


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


SABOTEURS = {
    "retraction": [Flipped(), Single(), Late(), geoopt.EuclideanStiefel()],
    "geodesic": [RetractionForGeodesic(), geoopt.CanonicalStiefel()],
    "projections": [OtherProjection(), Rescaled(), geoopt.CanonicalStiefel()],
    "gradient": [HalfGradient(), ComplexInner()],
    "hessian": [FlatHessian(), OtherHessian()],
    "logarithm": [Chord()],
    "inner": [ComplexInner()],
    "transport": [Parallel(), Boasting(), OneWay(), geoopt.CanonicalStiefel()],
    "batch": [Mixed()],
    "checks": [Lenient()],
    "identity": [Unique(), geoopt.CanonicalStiefel(), geoopt.EuclideanStiefel()],
}


@pytest.mark.parametrize(
    ("saboteur", "law"),
    [pytest.param(one, law, id=f"{type(one).__name__}-{law}") for law, some in SABOTEURS.items() for one in some],
)
def test_the_law_catches_its_saboteur(saboteur, law):
    dtypes = DTYPES if isinstance(saboteur, Stiefel) else DTYPES[:2]  # geoopt's manifolds are real
    with pytest.raises((AssertionError, NotImplementedError)):
        check_manifold(saboteur, [law], dtypes=dtypes)


def test_every_law_has_a_saboteur():
    assert set(SABOTEURS) == set(LAWS)


def test_the_order_of_what_is_no_retraction_is_below_one():
    order = retraction_order(Late(), torch.eye(6, 3), torch.randn(6, 3))
    assert abs(order) < 0.1


def test_the_order_of_a_geodesic_is_infinite():
    assert retraction_order(RetractionForGeodesic(), torch.eye(6, 3), torch.randn(6, 3)) == torch.inf

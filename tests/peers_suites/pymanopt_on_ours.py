"""pymanopt with our manifold in the place of its own of frames, while pytest runs its tests.

`pytest -p pymanopt_on_ours test_of_pymanopts.py`: the names that a test takes from `pymanopt.manifolds` are ours.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from differences import mark_differences
from numpy.typing import NDArray

import stiefelkit as sk

pymanopt = pytest.importorskip("pymanopt", reason="needs the extra [interop]")


def _by(name: str) -> Any:
    """A method that takes arrays to one of ours, and gives what comes of it."""
    return lambda self, *arrays: self.given(getattr(self.ours, name)(*self.taken(*arrays)))


class Frames(pymanopt.manifolds.manifold.Manifold):
    """Points are arrays of any shape that hold k frames of n x p; what is asked of them goes to our manifold."""

    def __init__(self, name: str, n: int, p: int, k: int, retraction: str, shape: tuple[int, ...], **drawn: Any):
        self.size, self.shape, self.drawn = (k, n, p), shape, drawn
        self.ours = sk.manifolds.Stiefel("euclidean", retraction)
        dimension = k * self.ours.dim(n, p, dtype=drawn.get("dtype", torch.float64))
        super().__init__(name, dimension)

    def taken(self, *arrays: NDArray[Any]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(a)).reshape(self.size) for a in arrays]

    def given(self, found: torch.Tensor) -> NDArray[Any]:
        return found.detach().numpy().reshape(self.shape)

    @property
    def typical_dist(self) -> float:
        return self.ours.typical_dist(self.size) * self.size[0] ** 0.5

    def inner_product(self, point, tangent_vector_a, tangent_vector_b):
        return self.ours.inner(*self.taken(point, tangent_vector_a, tangent_vector_b)).sum().item()

    def norm(self, point, tangent_vector):
        return self.inner_product(point, tangent_vector, tangent_vector) ** 0.5

    projection = to_tangent_space = _by("proju")
    euclidean_to_riemannian_gradient = _by("egrad2rgrad")
    euclidean_to_riemannian_hessian = _by("ehess2rhess")
    retraction, exp, log, transport = _by("retr"), _by("expmap"), _by("logmap"), _by("transp")

    def random_point(self):
        return self.given(self.ours.random(self.size, **{"dtype": torch.float64, **self.drawn}))

    def random_tangent_vector(self, point):
        vector = self.projection(point, torch.randn(self.shape, dtype=torch.from_numpy(point).dtype).numpy())
        return vector / self.norm(point, vector)

    def zero_vector(self, point):
        return np.zeros_like(point)

    def dist(self, point_a, point_b):
        return self.norm(point_a, self.log(point_a, point_b))

    def pair_mean(self, point_a, point_b):
        return self.exp(point_a, self.log(point_a, point_b) / 2)


class Stiefel(Frames):
    def __init__(self, n: int, p: int, *, k: int = 1, retraction: str = "cayley"):
        super().__init__("Stiefel", n, p, k, retraction, (k, n, p)[k == 1 :])


class Sphere(Frames):
    """Arrays of norm 1: frames of one column."""

    def __init__(self, *shape: int):
        super().__init__("Sphere", int(np.prod(shape)), 1, 1, "cayley", shape)


class Group(Frames):
    """Square frames W, whose tangent vectors pymanopt writes as W A, by the skew A."""

    def __init__(self, n: int, *, k: int = 1, retraction: str = "cayley", **drawn: Any):
        super().__init__("Group", n, n, k, retraction, (k, n, n)[k == 1 :], **drawn)

    def random_tangent_vector(self, point):
        return self.skew(point, super().random_tangent_vector(point))

    def retraction(self, point, tangent_vector):
        return super().retraction(point, point @ tangent_vector)

    def exp(self, point, tangent_vector):
        return super().exp(point, point @ tangent_vector)

    def log(self, point_a, point_b):
        return self.skew(point_a, super().log(point_a, point_b))

    def skew(self, point, vector):
        return point.conj().swapaxes(-1, -2) @ vector


class SpecialOrthogonalGroup(Group):
    def __init__(self, n: int, **options: Any):
        super().__init__(n, **options, det=1)


class UnitaryGroup(Group):
    def __init__(self, n: int, **options: Any):
        super().__init__(n, **options, dtype=torch.complex128)


def pytest_configure() -> None:
    """Puts ours in the place of pymanopt's: as a plugin, and not whenever this file is imported."""
    for stand_in in (Stiefel, Sphere, SpecialOrthogonalGroup, UnitaryGroup):
        setattr(pymanopt.manifolds, stand_in.__name__, stand_in)


@pytest.fixture(autouse=True)
def _seeded_as_theirs():
    random.seed(42)
    np.random.seed(42)  # noqa: NPY002  which pymanopt draws from
    torch.manual_seed(42)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expects what differs on purpose to fail, and nothing else."""
    mark_differences("pymanopt", items)

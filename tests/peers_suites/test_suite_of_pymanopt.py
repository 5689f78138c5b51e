"""pymanopt's own tests of its manifolds of frames and of its optimizers, on our manifold."""

import pytest
from their_tests import IS_FULL, run_theirs

for needed in ("pymanopt", "autograd"):
    pytest.importorskip(needed, reason="needs the extra [interop]")
pytestmark = pytest.mark.timeout(1500)


def test_their_tests_of_manifolds():
    files = [f"manifolds/test_{name}.py" for name in ("stiefel", "group", "sphere", "product")]
    run_theirs("pymanopt", files, "StiefelManifold or Group or TestSphereManifold or Product")


@pytest.mark.skipif(not IS_FULL, reason="takes a while: make peers-suites")
def test_their_tests_of_optimizers():
    # A simplex asks for many logarithms at each step.
    run_theirs("pymanopt", ["optimizers"], "not NelderMead")

from stiefelkit_newton import Newton

from stiefelkit.testing import parametrize_with_checks


@parametrize_with_checks([Newton])
def test_laws(check):
    check()

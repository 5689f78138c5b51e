import stiefelkit as sk
from stiefelkit.testing import parametrize_with_checks


@parametrize_with_checks(sk.available().values())
def test_every_parametrization_keeps_the_laws(check):
    check()

"""Every optimizer of deterministic losses keeps the laws, the day that it is registered."""

import stiefelkit as sk
from stiefelkit.testing import parametrize_minimizers_with_checks


@parametrize_minimizers_with_checks(list(sk.optim.minimizers.available().values()))
def test_laws(check):
    check()

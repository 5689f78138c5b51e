"""Every optimizer of frames keeps the laws, the day that it is registered."""

import stiefelkit as sk
from stiefelkit.testing import parametrize_optimizers_with_checks


@parametrize_optimizers_with_checks(
    [cls for cls in sk.optim.available().values() if getattr(cls, "moves_frames", False)]
)
def test_every_optimizer_keeps_the_laws(check):
    check()

import pytest
import torch
from hypothesis import settings

from stiefelkit.testing import seeds

torch.set_num_threads(1)

settings.register_profile("laws", deadline=None, derandomize=seeds.seed() == 0, database=None)
settings.load_profile("laws")


def pytest_configure(config):
    # Without an offset hypothesis draws from the source of each test; with one, from the offset.
    if seeds.seed() and getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(seeds.seed())


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(seeds.seed())

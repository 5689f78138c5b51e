import pytest
import torch

pytest.register_assert_rewrite("tiny_runs")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)

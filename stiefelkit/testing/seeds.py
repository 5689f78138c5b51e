"""Seeds of laws and tests: one number in the environment shifts every one."""

import os
from collections.abc import Sequence

import torch

OFFSET = "STIEFELKIT_SEED_OFFSET"  # environment variable, added to every seed; a law holds under any


def seed(number: int = 0) -> int:
    """Returns the seed of a draw: its own number, shifted by `OFFSET`."""
    return number + int(os.environ.get(OFFSET, "0"))


def generator(number: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a generator seeded with `seed(number)`."""
    return torch.Generator(device).manual_seed(seed(number))


def normal(shape: Sequence[int], number: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Draws a Gaussian tensor with `generator(number)` on the CPU, so that every device has the same numbers."""
    return torch.randn(tuple(shape), generator=generator(number), dtype=dtype).to(device)


def reseed(number: int = 0) -> None:
    """Seeds torch's default generators; `torch.manual_seed` takes 5 ms where accelerators are absent."""
    torch.default_generator.manual_seed(seed(number))
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed(number))

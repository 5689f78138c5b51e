"""Where laws and tests take their randomness from: one number in the environment shifts every seed."""

import os

import torch

__all__ = ["OFFSET", "generator", "seed"]

OFFSET = "STIEFELKIT_SEED_OFFSET"
"""The environment variable that is added to every seed; a law that holds, holds under any."""


def seed(number: int = 0) -> int:
    """The seed of a draw: its own number, shifted by `OFFSET`."""
    return number + int(os.environ.get(OFFSET, "0"))


def generator(number: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded with `seed(number)`."""
    return torch.Generator(device).manual_seed(seed(number))

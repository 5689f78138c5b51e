"""The range checks that every dataclass of options makes, worded once."""

import math

import torch

from stiefelkit.errors import OptionError

__all__ = ["at_least", "at_most", "finite_positive", "non_negative", "usable_device"]


def at_least(who: str, name: str, value: int, least: int) -> None:
    """Raises OptionError unless an integer option is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{who} needs {name} to be an integer >= {least}, got {value!r}.")


def at_most(who: str, name: str, value: int, most: int) -> None:
    """Raises OptionError if an integer option is above `most`."""
    if value > most:
        raise OptionError(f"{who} needs {name} <= {most}, got {value!r}.")


def finite_positive(who: str, name: str, value: float) -> None:
    """Raises OptionError unless a number is finite and greater than zero."""
    if not (math.isfinite(value) and value > 0):
        raise OptionError(f"{who} needs a finite {name} > 0, got {value!r}.")


def non_negative(who: str, name: str, value: float) -> None:
    """Raises OptionError unless a number is finite and at least zero."""
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(f"{who} needs a finite {name} >= 0, got {value!r}.")


def usable_device(who: str, name: str) -> None:
    """Raises OptionError unless a tensor can be made on the device and read back."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"{who} needs a device such as cpu or cuda, got {name!r}.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"{who} needs a CUDA device for {name!r}, but torch sees none; use --device cpu.")
    try:
        torch.zeros(1, device=device).cpu()
    except RuntimeError as error:
        raise OptionError(f"{who} needs a device that holds numbers, got {name!r}; use --device cpu.") from error

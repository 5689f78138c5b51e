"""Short-time spectra: from samples to levels in decibels, and back with the phases of the true signal."""

import functools

import torch
from torch import Tensor

__all__ = ["BINS", "HOP", "RATE", "WINDOW", "levels", "rebuilt"]

RATE, WINDOW, HOP = 8000, 256, 128
BINS = WINDOW // 2 + 1
FLOOR = 1e-5
"""Of a power |X|^2, for samples in [-1, 1]: silence is at -50 dB."""


def levels(samples: Tensor) -> Tensor:
    """Returns 10 log10(|X|^2 + 1e-5) of each whole window, (frames, 129): none begins before or ends after the signal.

    Args:
        samples: (length,), at 8 kHz, in [-1, 1].
    """
    return 10 * torch.log10(_spectra(samples).abs().square() + FLOOR)


def rebuilt(samples: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a signal from its second frame on, and what it becomes with predicted magnitudes and its own phases.

    Frames are added by weighted overlap (Griffin and Lim 1984), which gives the samples themselves back if the levels
    are the true ones.

    Args:
        samples: (length,).
        predicted: levels of all frames but the first, (frames - 1, 129).
    """
    true = _spectra(samples)[1:]
    magnitudes = (10 ** (predicted / 10) - FLOOR).clamp_min(0).sqrt()
    return _signal(true), _signal(torch.polar(magnitudes, true.angle()))


@functools.cache
def _window() -> Tensor:
    return torch.hann_window(WINDOW, periodic=True)


def _spectra(samples: Tensor) -> Tensor:
    return torch.fft.rfft(samples.unfold(0, WINDOW, HOP) * _window())


def _signal(spectra: Tensor) -> Tensor:
    # centred, istft leaves out half a window at each end, where one frame alone, near zero, says what is there
    return torch.istft(spectra.mT, WINDOW, HOP, window=_window(), center=True)

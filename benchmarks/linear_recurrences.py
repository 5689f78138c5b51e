"""Time, memory and error of a linear recurrence in parallel over time, beside nets that step and beside an FFT.

    python -m benchmarks.linear_recurrences

For each number of steps T the layers take turns in one process, on one thread: forward, and backward from a dense
gradient of all outputs, of 128 units on 64 inputs. Process CPU time, medians; memory is the most that torch allocates
at once. "FFT" is the same linear recurrence, without a basis, as a convolution of twice the length. Errors are the
largest of all states against the loop in float64, over the largest state, in units of float32's eps.

"as a model" is a layer on one input, read out to ten numbers at the last step, at T = 784.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.measuring.races.clock import Run, peak_bytes, race
from stiefelkit.measuring.races.recurrences import FftRNN, fft_scan
from stiefelkit.scan import rotation_scan

__all__ = ["errors", "layers", "main", "models"]

INPUTS, UNITS = 64, 128
LENGTHS = {784: 50, 4096: 8, 16384: 2}
"""T to the number of sequences."""


def layers() -> dict[str, nn.Module]:
    """Returns the layers that take turns."""
    return {
        "RotationRNN": sk.nn.RotationRNN(INPUTS, UNITS),
        "RotationRNN, P = I": sk.nn.RotationRNN(INPUTS, UNITS, heads=UNITS // 2, parametrization=None),
        "FFT": FftRNN(INPUTS, UNITS),
        "OrthogonalRNN": sk.nn.OrthogonalRNN(INPUTS, UNITS),
        "torch.nn.LSTM": nn.LSTM(INPUTS, UNITS),
    }


class LastState(nn.Module):
    """A layer, and ten numbers from its last state, in whatever way is fastest for that."""

    def __init__(self, layer: nn.Module, **options: bool):
        super().__init__()
        self.layer, self.options = layer, options
        self.output = nn.Linear(UNITS, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, 10)."""
        return self.output(self.layer(x, **self.options)[1][-1])


def models() -> dict[str, nn.Module]:
    """Returns the models that take turns."""
    return {
        "RotationRNN as a model": LastState(sk.nn.RotationRNN(1, UNITS), last_only=True),
        "OrthogonalRNN as a model": LastState(sk.nn.OrthogonalRNN(1, UNITS)),
    }


def errors(steps: int, decay: float, device: str = "cpu") -> dict[str, float]:
    """Returns the largest error of the scan and of the FFT in float32, in units of eps times the largest state."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(steps, 1, 2, 8, generator=source).flatten(-2)
    angle = 2 * torch.pi * torch.rand(8, generator=source)
    x, angle, g = (t.to(device) for t in (x, angle, torch.full((8,), decay)))
    exact = rotation_scan(x.double(), angle.double(), g.double(), backend="reference")[0]
    assert exact is not None
    found: dict[str, Callable[[], Tensor | None]] = {
        "scan": lambda: rotation_scan(x, angle, g)[0],
        "FFT": lambda: fft_scan(x, angle, g),
    }
    unit = torch.finfo(torch.float32).eps * exact.abs().max()
    return {name: float((run().double() - exact).abs().max() / unit) for name, run in found.items()}  # type: ignore[union-attr]


def main() -> None:
    """Prints the tables."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'layer':20}" + "".join(f"{f'T={steps}, B={batch}':>24}" for steps, batch in LENGTHS.items()))
    cells: dict[str, list[str]] = {}
    for steps, batch in LENGTHS.items():
        x, g = torch.randn(steps, batch, INPUTS), torch.randn(steps, batch, UNITS)
        runs: dict[str, Run] = {}
        for name, layer in layers().items():
            runs[name] = lambda layer=layer, x=x, g=g: layer(x)[0].backward(g)
            runs[name]()
        times = race(runs, repeats=5, seconds=10.0)
        for name, run in runs.items():
            memory = peak_bytes(run, x.device) / 2**20
            cells.setdefault(name, []).append(f"{1e3 * times[name].median:.0f} ms {memory:6.0f} MiB")
    for name, row in cells.items():
        print(f"{name:20}" + "".join(f"{cell:>24}" for cell in row))
    steps, batch = next(iter(LENGTHS.items()))
    x, g = torch.randn(steps, batch, 1), torch.randn(batch, 10)
    runs = {name: lambda model=model: model(x).backward(g) for name, model in models().items()}
    for name, timing in race(runs, seconds=10.0).items():
        print(f"{name:26}{1e3 * timing.median:18.1f} ms {peak_bytes(runs[name], x.device) / 2**20:6.0f} MiB")
    for decay in (0.999, 1.0):
        for steps in LENGTHS:
            found = errors(steps, decay)
            print(f"T={steps}, g={decay}: " + ", ".join(f"{name} {error:.2g} eps" for name, error in found.items()))


if __name__ == "__main__":
    main()

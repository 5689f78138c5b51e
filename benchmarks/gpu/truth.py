"""Outputs and gradients of maps and layers on a device against float64 on the CPU, on random shapes and seeds."""

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.errors import StiefelkitError

TOLERANCE = 5e-3
"""Of the length: gradients of long recurrences with kinks are that badly conditioned in float32."""
FLOOR = 1e-2
"""Errors are divided by this much of the largest gradient at least: some vanish exactly."""
SIZES = (1, 2, 3, 8, 16, 33, 64, 65, 128, 170, 200, 256, 512)
Case = tuple[str, Callable[[], tuple[nn.Module, Tensor]]]
"""Words, and what makes a module and its input in torch's default dtype."""


def _map(name: str, draw: random.Random) -> Case:
    n, p = (n := draw.choice(SIZES)), draw.choice((n, n, *SIZES))
    is_complex = draw.random() < 0.5

    def make() -> tuple[nn.Module, Tensor]:
        dtype = torch.get_default_dtype()
        dtype = dtype.to_complex() if is_complex else dtype
        layer = sk.orthogonal(nn.Linear(p, n, bias=False, dtype=dtype), "weight", name)
        return layer, torch.randn(3, p, dtype=dtype)

    return f"{n} x {p}" + ", complex" * is_complex, make


def _recurrence(cls: Callable[..., nn.Module], draw: random.Random, **options: str) -> Case:
    n, batch = 2 * draw.choice(SIZES[:-1]), draw.choice((1, 3, 17, 128))
    steps = draw.choice((1, 2, 33) if options else (1, 2, 33, 784))
    return f"n = {n}, B = {batch}, T = {steps}, {options}", lambda: (cls(5, n, **options), torch.randn(steps, batch, 5))


def _rnn(draw: random.Random) -> Case:
    options = {"parametrization": draw.choice(("cayley", "householder", "givens", "matrix_exp", "stiefel"))}
    options["activation"] = draw.choice(("modrelu", "relu", "tanh", "abs", "oplu", "identity"))
    options["field"] = "complex" if options["activation"] == "modrelu" and draw.random() < 0.5 else "real"
    return _recurrence(sk.nn.OrthogonalRNN, draw, **options)


def _convolution(cls: Callable[..., nn.Module], draw: random.Random) -> Case:
    a, kernel, side = draw.choice((2, 4, 8)), draw.choice((1, 3)), draw.choice((6, 12))
    return f"{a} channels, {kernel} x {kernel}, {side}", lambda: (cls(a, a, kernel), torch.randn(2, a, side, side))


KINDS: dict[str, Callable[[random.Random], Case]] = {
    **{name: lambda draw, name=name: _map(name, draw) for name in sk.available()},
    "OrthogonalRNN": _rnn,
    **{
        cls.__name__: lambda draw, cls=cls: _recurrence(cls, draw) for cls in (sk.nn.RotationRNN, sk.nn.LRU, sk.nn.GORU)
    },
    **{
        cls.__name__: lambda draw, cls=cls: _convolution(cls, draw)
        for cls in (sk.nn.OrthogonalConv2d, sk.nn.OrthogonalConvTranspose2d, sk.nn.CayleyConv2d)
    },
    "HadamardLinear": lambda draw: ("64", lambda: (sk.nn.HadamardLinear(64, 64), torch.randn(3, 64))),
}
"""Name of a map or layer to what draws a case."""


def _passed(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Returns the output and all gradients of a fixed linear form of it."""
    x = x.requires_grad_()
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    form = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out.device)
    names, leaves = zip(*module.named_parameters(), strict=True)
    g = torch.autograd.grad(out, [x, *leaves], form.to(out.dtype), allow_unused=True)
    return {"out": out.detach(), **{name: t for name, t in zip(("x", *names), g, strict=True) if t is not None}}


def _error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Returns the largest error by the norm, of which kinks that rounding crosses are a small part."""
    lengths = {name: float(t.norm()) for name, t in exact.items()}
    least = FLOOR * max(length for name, length in lengths.items() if name != "out")
    off = {name: float((found[name].to(t) - t).norm()) for name, t in exact.items()}
    return max(
        off[name] / max(length, least) if math.isfinite(off[name]) else math.inf for name, length in lengths.items()
    )


def worst(kind: str, device: str, seed: int) -> Iterator[tuple[str, float]]:
    """Yields case after case: its words and the largest error of an output or gradient; what is refused is left out."""
    draw = random.Random(f"{kind} {seed}")
    for number in itertools.count():
        words, make = KINDS[kind](draw)
        torch.manual_seed(number)
        try:
            module, x = make()
        except StiefelkitError:
            continue
        with _default_dtype(torch.float64):
            wide, _ = make()
        wide.load_state_dict(module.state_dict())
        exact = _passed(wide, x.to(torch.complex128 if x.is_complex() else torch.float64))
        found = _passed(module.to(device), x.to(device))
        yield words, _error(found, exact)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

"""The laws of an activation of recurrences, ours or another's."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from stiefelkit.scan import Activation, find_activation, scan
from stiefelkit.testing import seeds
from stiefelkit.testing.failure import check_laws, laws_of, named, run, settle
from stiefelkit.testing.require import require, require_within

UNITS = 4
CHUNK = (3, 2)
"""Steps and sequences."""
CLOSE = 1e-12


class _Drawn:
    """Pre-activations of a chunk, what the function makes of them, and what the step does."""

    def __init__(self, act: Activation, is_complex: bool, scale: float = 1.0):
        dtype = torch.complex128 if is_complex else torch.float64
        self.act = act
        self.z = (scale * torch.randn(*CHUNK, UNITS, dtype=dtype)).requires_grad_()
        self.bias = (0.5 * torch.randn(UNITS, dtype=torch.float64)).requires_grad_() if act.bias_inside else None
        self.inner = () if self.bias is None else (self.bias,)
        self.h = act.function(self.z, *self.inner)

    @torch.no_grad()
    def stepped(self, is_careful: bool = False) -> tuple[Tensor, Tensor]:
        """Returns states by the step in place, and what it kept."""
        rows = _rows(self.z).clone()
        width, dtype = self.act.saved_like(UNITS, self.z.dtype)
        saved = rows.new_empty(*rows.shape[:-1], width, dtype=dtype)
        step = (self.act.careful if is_careful else self.act.step)(rows[0], self.bias)
        for views in self.act.views(rows, saved):
            step(*views)
        return rows, saved


def law_step(act: Activation, is_complex: bool) -> None:
    """The step in place, the careful one and the function of rows give the values of the function."""
    for scale in (1.0, 1e-3, 1e3):
        drawn = _Drawn(act, is_complex, scale)
        for is_careful in (False, True):
            _near(drawn.stepped(is_careful)[0], _rows(drawn.h), "the step")
        _near(act.of_rows(_rows(drawn.z), *drawn.inner), _rows(drawn.h), "of_rows")


def law_derivative(act: Activation, is_complex: bool) -> None:
    """The factors and the gradient by a bias inside are the derivative of the function."""
    drawn = _Drawn(act, is_complex)
    g = torch.randn_like(drawn.z)
    exact = torch.autograd.grad(drawn.h, (drawn.z, *drawn.inner), g)
    h, saved = drawn.stepped()
    delta, factors = _rows(g), act.factors(h, saved)
    if len(factors) == 2:
        delta = factors[0] * delta + factors[1].repeat(1, 1, 2) * delta.roll(delta.shape[-1] // 2, -1)
    elif factors:
        delta = factors[0] * delta
    _near(delta, _rows(exact[0]), "what the factors make of a gradient")
    if drawn.bias is not None:
        _near(act.inner_gradient(h, saved, delta).sum((0, 1)), exact[1], "the gradient by the bias")


def law_scan(act: Activation, is_complex: bool) -> None:
    """States and gradients in place are those of the loop, which has the gradients of finite differences."""
    dtype = torch.complex128 if is_complex else torch.float64
    inputs = {
        "x": torch.randn(*CHUNK, UNITS, dtype=dtype),
        "w": torch.linalg.qr(torch.randn(UNITS, UNITS, dtype=dtype))[0],
        "h0": torch.randn(2, UNITS, dtype=dtype),
        "activation_bias": 0.5 * torch.randn(UNITS, dtype=torch.float64),
    }
    leaves = [t.contiguous().requires_grad_() for t in inputs.values()]

    def states(*tensors: Tensor, backend: str = "reference") -> Any:
        named = dict(zip(inputs, tensors, strict=True))
        return scan(**named, activation=act.name, backend=backend)[0]  # type: ignore[arg-type]

    try:
        torch.autograd.gradcheck(states, leaves, fast_mode=True)
    except GradcheckError as error:
        require(False, f"the loop fails gradcheck, {str(error).splitlines()[0]}")
    g = torch.randn(3, 2, UNITS, dtype=dtype)
    outs = states(*leaves), states(*leaves, backend="inplace")
    loop, inplace = ((out, *torch.autograd.grad(out, leaves, g)) for out in outs)
    for a, b, what in zip(inplace, loop, ("states", *(f"the gradient by {name}" for name in inputs)), strict=True):
        _near(a, b, what)


def law_zero(act: Activation, is_complex: bool) -> None:
    """Values and gradients at z = 0 are finite, and those of the loop."""
    zero = torch.zeros(1, 1, UNITS, dtype=torch.complex128 if is_complex else torch.float64)
    w, b = torch.eye(UNITS, dtype=zero.dtype), torch.full((UNITS,), 0.25, dtype=torch.float64)
    for bias in (b, -b) if act.bias_inside else (None,):
        results = []
        for backend in ("inplace", "reference"):
            leaf = zero.clone().requires_grad_()
            last = scan(leaf, w, zero[0], activation=act.name, activation_bias=bias, backend=backend)[1]
            results.append((last, torch.autograd.grad(last.real.sum(), leaf)[0]))
        for inplace, loop, what in zip(*results, ("a value", "a gradient"), strict=True):
            require(bool(torch.isfinite(_rows(loop)).all()), f"{what} at z = 0 is not finite")
            _near(inplace, loop, f"{what} at z = 0")


ACTIVATION_LAWS = named(
    laws_of(__name__), lambda act, is_complex: f"{type(act).__name__}({act.name!r})-{_field(is_complex)}"
)
"""The laws of an activation, by name."""


def check_activation(name: str, laws: Iterable[str] = tuple(ACTIVATION_LAWS), offset: int | None = None) -> None:
    """Checks a registered activation against laws of `ACTIVATION_LAWS`, with real states and any complex ones.

    The offset is that of `check_parametrization`.

    Raises:
        LawBroken: lists every failure: the law, the field, the figure and its bound.
        UnknownNameError: no activation or law has such a name.
    """
    fields = (False, True)[: 1 + (find_activation(name, False).of_complex() is not None)]
    laws = check_laws(laws, ACTIVATION_LAWS)
    settle((functools.partial(_run, name, law, is_complex) for law in laws for is_complex in fields), offset)


def _run(name: str, law: str, is_complex: bool) -> None:
    again = f"check_activation({name!r}, [{law!r}], offset={seeds.seed()})"
    line = f"from stiefelkit.testing import check_activation; {again}"
    states = f"states of shape {(*CHUNK, UNITS)}, {_field(is_complex)}"
    run(ACTIVATION_LAWS[law], (find_activation(name, is_complex), is_complex), lambda: states, lambda: line)


def _field(is_complex: bool) -> str:
    return "complex128" if is_complex else "float64"


def _rows(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1) if z.is_complex() else z


def _near(value: Tensor, exact: Tensor, what: str) -> None:
    scale = max(1.0, exact.detach().abs().max().item())
    figure = (value.detach() - exact.detach()).abs().max().item() / scale
    require_within(figure, CLOSE, f"{what} differs by")

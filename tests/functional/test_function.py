"""What all autograd functions of stiefelkit do when they are traced."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from every_map import make, over_all_maps, squares
from torch import Tensor, nn
from torch.utils import _pytree

import stiefelkit as sk
from stiefelkit.functional._arithmetic.function import Function
from stiefelkit.testing import seeds


class Powers(Function):
    """Square and cube."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        square = x * x
        return square.clone().mul_(1.0), square.mul_(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * g[0] + 3 * x * x * g[1]


class Square(Powers):
    """The first of them alone."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone().mul_(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * g


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [Powers, Square])
def test_outputs_that_were_written_in_place_have_gradients_when_they_are_traced(function, backend):
    torch.compiler.reset()
    x = torch.randn(5, generator=seeds.generator()).requires_grad_()

    def value(x: Tensor) -> Tensor:
        found = function.of(x)
        return torch.stack([y.sum() for y in (found if isinstance(found, tuple) else (found,))]).prod()

    (expected,) = torch.autograd.grad(value(x), x)
    (found,) = torch.autograd.grad(torch.compile(value, fullgraph=True, backend=backend)(x), x)
    assert torch.allclose(found, expected)


@over_all_maps
def test_linearize_is_right_at_every_call_or_refused(name, dtype):
    layer = make(name, dtype)
    coordinates = {key: value.detach() for key, value in layer.named_parameters()}

    def of_coordinates(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, values, (torch.ones(1, 4, dtype=dtype),))

    for f, x in ((of_coordinates, coordinates), (layer, torch.ones(1, 4, dtype=dtype))):
        tangent = _pytree.tree_map(torch.ones_like, x)
        if name not in ("stiefel", "fourier"):
            with pytest.raises(NotImplementedError, match="in place, which it repeats"):
                torch.func.linearize(f, x)
            continue
        expected = torch.func.jvp(f, (x,), (tangent,))[1]
        _, push = torch.func.linearize(f, x)
        assert all(torch.allclose(push(tangent), expected, rtol=1e-4, atol=1e-4) for _ in range(3))


def test_functions_are_called_by_of_which_knows_forward_mode_and_export():
    root = Path(sk.__file__).parent
    files = [path for room in ("functional", "scan") for path in (root / room).rglob("*.py")]
    found = [name for path in files for name in re.findall(r"\b_?[A-Z]\w*\.apply\b", path.read_text(encoding="utf-8"))]
    assert found == []


def train_exported(module: nn.Module, x: Tensor, strict: bool) -> list[tuple[Tensor, Tensor]]:
    """Returns the gradients of a module and those of the program that is exported from it."""
    squares(module(x)).backward()
    expected = {key: p.grad for key, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    program: Any = torch.export.export(module, (x,), strict=strict).module()
    squares(program(x)).backward()
    found = {key: p.grad for key, p in program.named_parameters()}
    return [(found[key], g) for key, g in expected.items()]


REFUSED = "train the model, and export it then"


@pytest.mark.parametrize("strict", [False, True])
@over_all_maps
def test_a_program_that_was_exported_has_all_gradients_or_none(name, dtype, strict):
    seeds.reseed()
    layer, x = make(name, dtype), torch.randn(3, 4, dtype=dtype)
    if name not in ("block_diagonal", "cayley", "fourier", "stiefel"):
        with pytest.raises(NotImplementedError, match=REFUSED):
            train_exported(layer, x, strict)
        return
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in train_exported(layer, x, strict))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["scornn", "rotrnn", "goru"])
def test_a_net_that_was_exported_refuses_to_train(name, strict):
    seeds.reseed()
    with pytest.raises(NotImplementedError, match=REFUSED):
        train_exported(sk.models.create(name, 3, 4, 2), torch.randn(2, 12, 3), strict)

"""Which layer was the first to give NaN or infinity."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["all_finite", "first_bad_gradient", "first_bad_output"]


def all_finite(tensors: list[Tensor]) -> bool:
    """Returns whether every entry of every tensor is finite, with one synchronization."""
    return not tensors or bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


def first_bad_output(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Names the first parameter, or else output in the order of execution, that is not finite; None if all is.

    `forward` calls the model; the name is a phrase such as `the output of "rnn"`.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f'the parameter "{name}"'
    phrases: list[str] = []

    def look(module: nn.Module, name: str, inputs: Any, output: Any) -> None:
        if not all_finite(list(_tensors(output))):
            phrases.append(f'the output of "{name or type(module).__name__}"')

    with torch.no_grad(), _after_each(model, look):
        forward()
    return phrases[0] if phrases else None


def first_bad_gradient(model: nn.Module, loss: Callable[[], Tensor]) -> str | None:
    """Names the first gradient that is not finite: those that modules pass back, as they arrive, then of parameters.

    `loss` calls the model; the name is a phrase such as `the gradient that "rnn" passes back`; None if all is finite.
    """
    phrases: list[str] = []

    def watch(value: Any, phrase: str) -> None:
        for tensor in _tensors(value):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: None if gradient.isfinite().all() else phrases.append(phrase))

    def attach(module: nn.Module, name: str, inputs: Any, output: Any) -> None:
        # after the forward, so that of two modules with one input the inner one is named
        watch(inputs, f'the gradient that "{name}" passes back')
        if module is model:
            watch(output, "the gradient of the loss itself")

    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with _after_each(model, attach):
        gradients = torch.autograd.grad(loss(), list(named.values()), allow_unused=True)
    # the last layer is the first that the backward pass meets
    bad = [name for name, g in zip(named, gradients, strict=True) if g is not None and not g.isfinite().all()]
    return next(iter([*phrases, *(f'the gradient of "{name}"' for name in reversed(bad))]), None)


def _after_each(model: nn.Module, look: Callable[[nn.Module, str, Any, Any], None]) -> ExitStack:
    """Returns a context in which `look` is called with each module that has run, its name, inputs and output."""
    held = ExitStack()
    for name, module in model.named_modules():
        hook = module.register_forward_hook(lambda module, x, y, name=name: look(module, name, x, y))
        held.enter_context(hook)
    return held


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

"""Which layer was the first to give NaN or infinity."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["all_finite", "first_bad_gradient", "first_bad_output"]


def all_finite(tensors: list[Tensor]) -> bool:
    """Returns whether every entry of every tensor is finite, with one synchronization."""
    return not tensors or bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


def first_bad_output(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Runs a forward pass and names what first is not finite, in order of execution.

    Args:
        model: its parameters are looked at first, then the output of each module as it is made.
        forward: calls the model.

    Returns:
        A phrase such as `the output of "rnn"`, or None if all is finite.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f'the parameter "{name}"'
    phrases: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not phrases and not all_finite(list(_tensors(output))):
                phrases.append(f'the output of "{name or type(module).__name__}"')

        return look

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return phrases[0] if phrases else None


def first_bad_gradient(model: nn.Module, loss: Callable[[], Tensor]) -> str | None:
    """Runs a forward and a backward pass and names what first gives a gradient that is not finite.

    Args:
        model: the gradients that its modules pass back are looked at as they arrive, then those of its parameters.
        loss: calls the model and returns the loss.

    Returns:
        A phrase such as `the gradient that "rnn" passes back`, or None if all is finite.
    """
    phrases: list[str] = []

    def watch(value: Any, phrase: str) -> None:
        def look(gradient: Tensor) -> None:
            if not phrases and not gradient.isfinite().all():
                phrases.append(phrase)

        for tensor in _tensors(value):
            if tensor.requires_grad:
                tensor.register_hook(look)

    def hook(name: str) -> Callable[..., None]:
        # after the forward, so that of two modules with one input the inner one is named
        def attach(module: nn.Module, inputs: Any, output: Any) -> None:
            watch(inputs, f'the gradient that "{name}" passes back')
            if module is model:
                watch(output, "the gradient of the loss itself")

        return attach

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    try:
        gradients = torch.autograd.grad(loss(), [parameter for _, parameter in named], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    if phrases:
        return phrases[0]
    # the last layer is the first that the backward pass meets
    bad = [name for (name, _), g in zip(named, gradients, strict=True) if g is not None and not g.isfinite().all()]
    return f'the gradient of "{bad[-1]}"' if bad else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

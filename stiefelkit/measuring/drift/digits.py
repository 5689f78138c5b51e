"""Gradients of a net that is trained on handwritten digits."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from stiefelkit.training.tasks import create

__all__ = ["CLASSES", "PIXELS", "of_digits"]

PIXELS, CLASSES = 64, 10
BATCH = 64
"""Images for each gradient."""


def of_digits(before: Tensor, after: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """From the weight to the gradient of the cross-entropy of |x R W^T| V, a batch of images after the other.

    The weight W is the only layer that is trained; R and V around it stay as they are. The modulus makes logits real
    where the weight is complex.

    Args:
        before: R, shape (PIXELS, p).
        after: V, shape (n, CLASSES), real.
        seed: fixes the batches.
    """
    task, steps = create("digits", {}), itertools.count()

    def gradient(w: Tensor) -> Tensor:
        x, y = (tensor.to(w.device) for tensor in task.batch(next(steps), BATCH, seed))
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            hidden = F.linear(x.flatten(1).to(before.dtype) @ before, leaf).abs()
            loss = F.cross_entropy((hidden @ after.to(hidden.dtype)).float(), y)
            return torch.autograd.grad(loss, leaf)[0]

    return gradient

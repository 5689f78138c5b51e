"""RotRNN: residual blocks of linear recurrences that rotate."""

import torch

from stiefelkit.contract.param import Parametrization
from stiefelkit.errors import OptionError
from stiefelkit.models.sequence import SequenceModel, stacked
from stiefelkit.nn import RotationBlock


def rotrnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    width: int | None = None,
    num_layers: int = 2,
    heads: int = 1,
    parametrization: Parametrization | None = "matrix_exp",
    decay: tuple[float, float] = (0.9, 0.999),
    max_angle: float = 2 * torch.pi,
    dropout: float = 0.0,
    normalize: bool = True,
    trainable_h0: bool = False,
    backend: str = "auto",
    **options: object,
) -> SequenceModel:
    """Builds RotRNN: blocks of a norm, :math:`h_t = g W h_{t-1} + s U x_t` with :math:`W = P R(θ) P^T`, and a gate.

    As in the authors' code each head has its own :math:`P = exp(A)`, angles from :math:`U(0, 2 π)` and a decay
    :math:`g = exp(-exp(q))`, and U is scaled by :math:`s = √{1 - g^2} / ‖U‖_F` of the head. The states have no bias.
    Behind GELU stands a gated linear unit. With `parametrization=None` P is the identity: U and the layer behind the
    states contain it, since both are free, so that no function is lost, and a step takes no product n x n.

    Arguments are those of `stiefelkit.nn.RotationBlock`: `hidden_size` is the width of the state of each block,
    `width` that of what blocks read and write, half of it if left out. It reads one way, and drops, with `dropout`,
    within blocks.

    References:
        Biegun, Dolga, Cunningham, Barber, RotRNN: modelling long sequences with rotations, 2024.
    """
    for name in ("bidirectional", "field"):
        if name in options:
            raise OptionError(f"rotrnn has real states of one direction and no option {name}.")
    sizes = input_size, hidden_size, output_size
    options |= dict(heads=heads, parametrization=parametrization, decay=decay, max_angle=max_angle, dropout=dropout)
    options |= dict(normalize=normalize, trainable_h0=trainable_h0, backend=backend, bias=False)
    return stacked("rotrnn", RotationBlock, sizes, width, num_layers, **options)

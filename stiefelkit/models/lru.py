"""LRU: residual blocks of linear recurrent units."""

import torch

from stiefelkit.models.sequence import SequenceModel, stacked
from stiefelkit.nn import LRUBlock


def lru(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    width: int | None = None,
    num_layers: int = 2,
    decay: tuple[float, float] = (0.9, 0.999),
    max_angle: float = 2 * torch.pi,
    dropout: float = 0.0,
    trainable_h0: bool = False,
    backend: str = "auto",
) -> SequenceModel:
    """Builds LRU: blocks of a norm, :math:`z_t = l z_{t-1} + s B x_t`, :math:`y_t = Re(C z_t) + D x_t`, and a gate.

    As in the paper l is complex, :math:`l = exp(-exp(q) + i exp(θ))` with `log_rate` q and `log_angle` θ, uniform in a
    ring at the start, and s begins at :math:`√{1 - |l|^2}`; GELU and a gated linear unit follow, and a residual goes
    around each block. The norm is torch's LayerNorm. Where one answer is wanted the last step gives it, whereas the
    paper averages over steps.

    Arguments are those of `stiefelkit.nn.LRU`: `hidden_size` is the width of the state of each block, two real
    numbers for a complex one, `width` that of what blocks read and write, half of it if left out. It reads one way, and
    drops, with `dropout`, within blocks.

    References:
        Orvieto, Smith, Gu, Fernando, Gulcehre, Pascanu, De, Resurrecting recurrent neural networks for long sequences,
        ICML 2023.
    """
    sizes = input_size, hidden_size, output_size
    options = dict(decay=decay, max_angle=max_angle, dropout=dropout, trainable_h0=trainable_h0, backend=backend)
    return stacked("lru", LRUBlock, sizes, width, num_layers, **options)

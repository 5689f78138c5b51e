"""Reflector: linear recurrences whose transition is a product of reflections that the input gives."""

from typing import Any

from torch import nn

from stiefelkit.errors import OptionError, needs
from stiefelkit.models.sequence import SequenceModel, draw_, read_out, stacked
from stiefelkit.nn import ReflectorBlock, ReflectorRNN


def reflector(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    width: int | None = None,
    num_layers: int = 1,
    heads: int = 1,
    columns: int = 1,
    reflections: int = 2,
    tau: str = "exact",
    decay: tuple[float, float] | None = None,
    conv: int | None = None,
    additive: bool = True,
    dropout: float = 0.0,
    trainable_h0: bool = False,
    backend: str = "auto",
) -> SequenceModel:
    """Builds blocks of a norm, :math:`h_t = g_t H(k_{t,m}) ... H(k_{t,1}) h_{t-1} + U x_t + b`, and a gate.

    With `additive=False` inputs only turn states, from a trained first one, and a linear read-out reads these, without
    blocks; keys are drawn from N(0, 1) and have no bias. So states can follow the products of a group.

    Arguments are those of `stiefelkit.nn.ReflectorRNN`; `width` is that of what blocks read and write, half of
    `hidden_size` if left out.

    References:
        Siems, Carstensen, Zela, Hutter, Pontil, Grazzi, DeltaProduct: improving state-tracking in linear RNNs via
        Householder products, NeurIPS 2025, whose factors are no exact reflections.
    """
    options: dict[str, Any] = dict(
        heads=heads, columns=columns, reflections=reflections, tau=tau, decay=decay, conv=conv
    )
    options |= dict(dropout=dropout, backend=backend, trainable_h0=trainable_h0 or not additive)
    if additive:
        sizes = input_size, hidden_size, output_size
        return stacked("reflector", ReflectorBlock, sizes, width, num_layers, **options)
    needs(width is None, OptionError, "reflector", "no width with additive=False", width)
    options |= dict(additive=False, bias=False, batch_first=True, num_layers=num_layers)
    rnn = ReflectorRNN(input_size, hidden_size, **options)
    draw_(rnn, "weight_ih", nn.init.normal_)
    return SequenceModel(rnn, read_out(rnn, output_size))

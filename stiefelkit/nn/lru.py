"""The linear recurrent unit: planes with a decay, an angle and a scale of inputs each, all trained by logarithms."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stiefelkit.errors import OptionError, needs
from stiefelkit.nn.recurrent import require_options
from stiefelkit.nn.rotation_rnn import RotationBlock, RotationRNN
from stiefelkit.numbers import above, integer
from stiefelkit.tensors import computing_dtype


class LRU(RotationRNN):
    r"""Multi-layer linear RNN :math:`z_t = l z_{t-1} + s B x_t` with a complex l for each plane; l and s are trained.

    A `RotationRNN` with a head for each plane and no basis, whose scale of inputs s is trained instead of worked out.
    :math:`l = exp(-exp(q) + i exp(θ))`, where q is `log_rate`, θ `log_angle`, and s the exp of `log_scale`. At the
    start l is uniform in a ring, :math:`s = √{1 - |l|^2}`, and B normal with variance :math:`1 / 2m` in its real and in
    its imaginary part. States are real, two numbers a plane: :math:`Re z_0, Im z_0, Re z_1, ...`

    Parameters: `log_rate_l0`, `log_angle_l0`, `log_scale_l0` (n / 2 each), `weight_ih_l0` (n, m) with the rows
    :math:`Re B_0, Im B_0, Re B_1, ...`, with `bias` `bias_l0` (n), and `_reverse` for the second direction.
    `weight_hh_l0` reads the rotation without the moduli.

    Args:
        input_size: width m of the input.
        hidden_size: width n of the state, even: n / 2 complex numbers.
        num_layers, batch_first, dropout, bidirectional, device, dtype: as in `OrthogonalRNN`.
        bias: whether b is added to the inputs, zero at the start; the paper has none.
        decay: smallest and largest modulus of l at the start, :math:`r_{min}` and :math:`r_{max}` there.
        max_angle: largest angle of l at the start, in radians.
        trainable_h0, backend: as in `RotationRNN`.
        **options: others of `RotationRNN`, which are refused with the reason.

    References:
        Orvieto, Smith, Gu, Fernando, Gulcehre, Pascanu, De, Resurrecting recurrent neural networks for long sequences,
        ICML 2023.

    >>> out, h_n = LRU(3, 8)(torch.randn(5, 2, 3))
    >>> out.shape, h_n.shape
    (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))
    """

    free_coordinates: ClassVar[tuple[str, ...]] = ("log_rate", "log_angle", "log_scale")
    _refused: ClassVar[dict[str, str]] = {
        **RotationRNN._refused,
        "heads": "each plane has a decay and an angle of its own",
        "parametrization": "its planes have no basis; sk.nn.RotationRNN has one",
        "field": "its states are complex numbers already, each as two real ones",
        "normalize": "it trains the scale of its inputs",
    }

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = False,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        decay: tuple[float, float] = (0.9, 0.999),
        max_angle: float = 2 * math.pi,
        trainable_h0: bool = False,
        backend: str = "auto",
        **options: Any,
    ):
        require_options(type(self), None, options)
        hidden_size = integer(1).require(self._name, "hidden_size", hidden_size)
        needs(hidden_size % 2 == 0, OptionError, self._name, "an even hidden_size, two numbers a plane", hidden_size)
        needs(decay is not None, OptionError, self._name, "decay as numbers 0 < low <= high < 1", decay)
        max_angle = above(0).require(self._name, "max_angle", max_angle)
        stack = num_layers, bias, batch_first, dropout, bidirectional, device, dtype
        planes = {"parametrization": None, "heads": hidden_size // 2, "decay": decay, "max_angle": max_angle}
        super().__init__(input_size, hidden_size, *stack, **planes, trainable_h0=trainable_h0, backend=backend)

    def _counts(self) -> dict[str, int]:
        return dict.fromkeys(self.free_coordinates, self.heads)

    @torch.no_grad()
    def _draw(self, suffix: str) -> None:
        rate, angle, scale = (self._read(name, suffix) for name in self._counts())
        assert self.decay is not None
        low, high = self.decay
        # In (0, 1], in float64: no logarithm of zero.
        u, v = (1 - torch.rand(2, self.heads, dtype=torch.float64, device=rate.device)).unbind(0)
        log_modulus = torch.log(u * (high**2 - low**2) + low**2) / 2
        rate.copy_(torch.log(-log_modulus))
        angle.copy_(torch.log(self.max_angle * v))
        scale.copy_(torch.log(-torch.expm1(2 * log_modulus)) / 2)
        inputs = self._read("weight_ih", suffix)
        inputs.normal_(0, (2 * inputs.shape[1]) ** -0.5)

    def _angle(self, suffix: str) -> Tensor:
        angle = self._read("log_angle", suffix)
        return torch.exp(angle.to(computing_dtype(angle.dtype)))

    def _scale(self, suffix: str, u: Tensor, rate: Tensor) -> Tensor:
        return torch.exp(self._read("log_scale", suffix).to(u.dtype))


class LRUBlock(RotationBlock):
    """A `RotationBlock` around an `LRU`, with Re C and Im C normal of variance 2 / n and D standard normal.

    Args:
        width: features of the input and the output.
        hidden_size: width n of the state, even.
        **options: `dropout`, `device` and `dtype` as in `RotationBlock`, and those of `LRU`.

    References:
        Orvieto, Smith, Gu, Fernando, Gulcehre, Pascanu, De, Resurrecting recurrent neural networks for long sequences,
        ICML 2023.

    >>> LRUBlock(4, 8)(torch.randn(2, 5, 4))[0].shape
    torch.Size([2, 5, 4])
    """

    layer: ClassVar[type[RotationRNN]] = LRU

    def __init__(self, width: int, hidden_size: int, **options: Any):
        super().__init__(width, hidden_size, **options)
        nn.init.normal_(self.output.weight, std=(2 / self.rnn.hidden_size) ** 0.5)
        nn.init.normal_(self.skip)

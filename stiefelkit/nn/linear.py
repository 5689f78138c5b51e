"""A linear layer with an orthogonal or unitary weight."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit._torch import is_cached
from stiefelkit.contract.param import Parametrization
from stiefelkit.functional._arithmetic.product import is_autocast
from stiefelkit.nn.recurrent import require_options
from stiefelkit.numbers import FLAG, integer
from stiefelkit.weights import attach
from stiefelkit.weights.find import coordinate_list_of


class OrthogonalLinear(nn.Linear):
    """`torch.nn.Linear` whose weight has orthonormal columns, or rows where it is wide: :math:`y = x W^T + b`.

    Maps that can apply W to vectors without forming it do so (`OrthogonalParam.linear`), unless torch caches
    parametrized weights or another parametrization was put on top.

    Args:
        in_features: size of the input.
        out_features: size of the output.
        bias: whether there is one.
        parametrization: a registered name or a class.
        init: as in `sk.orthogonal`; the map's default scheme when None.
        device: of all tensors.
        dtype: of weight and bias, real or complex.
        **options: of the map, `precision`, and `gain=`, `generator=`, `blocks=`, `dim=` as in `sk.orthogonal`.

    Raises:
        OptionError: an option is out of range, or the map has none of that name.
        UnknownNameError: no parametrization has this name.
        ShapeError, DtypeError: the map does not do this shape or dtype.

    Shape:
        (*, in_features) to (*, out_features), dtype as `torch.nn.functional.linear` gives it, under autocast too.

    >>> layer = OrthogonalLinear(8, 8, parametrization="householder", reflections=2)
    >>> layer(torch.zeros(3, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parametrization: Parametrization = "cayley",
        init: str | Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        in_features = integer(0).require("OrthogonalLinear", "in_features", in_features)
        out_features = integer(0).require("OrthogonalLinear", "out_features", out_features)
        bias = FLAG.require("OrthogonalLinear", "bias", bias)
        of_map = {key: value for key, value in options.items() if key not in ("blocks", "dim")}
        require_options(type(self), parametrization, of_map)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if init is None:
            nn.init.zeros_(self.weight)  # which has no nearest frame
        attach.orthogonal(self, "weight", parametrization, init=init, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer; see the class."""
        coordinate_list = coordinate_list_of(self, "weight")
        if coordinate_list is None or len(coordinate_list) > 1 or is_cached() or isinstance(x, torch.fx.Proxy):
            return F.linear(x, self.weight, self.bias)
        y = coordinate_list(x)
        if is_autocast(x.device) and y.dtype == torch.float32:
            y = y.to(torch.get_autocast_dtype(x.device.type))
        return y if self.bias is None else y + self.bias.to(y.dtype)

"""Linear layers: one with an orthogonal or unitary weight, one that reads the Hadamard transform of its input."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit._torch import held_parameters, is_cached, is_exported
from stiefelkit.contract.param import Parametrization
from stiefelkit.errors import CheckpointError, OptionError, needs
from stiefelkit.functional import hadamard_transform
from stiefelkit.functional._arithmetic.product import is_autocast
from stiefelkit.nn.recurrent import require_options
from stiefelkit.numbers import integer, optional
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
        of_map = {key: value for key, value in options.items() if key not in ("blocks", "dim")}
        require_options(type(self), parametrization, of_map)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if init is None:
            nn.init.zeros_(self.weight)  # which has no nearest frame
        attach.orthogonal(self, "weight", parametrization, init=init, **options)

    def forward(self, x: Tensor) -> Tensor:
        coordinate_list = coordinate_list_of(self, "weight")
        if coordinate_list is None or len(coordinate_list) > 1 or is_cached() or isinstance(x, torch.fx.Proxy):
            return F.linear(x, self.weight, self.bias)
        y = coordinate_list(x)
        if is_autocast(x.device) and y.dtype == torch.float32:
            y = y.to(torch.get_autocast_dtype(x.device.type))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class HadamardLinear(nn.Module):
    """Computes :math:`W H x / √n + b`, with the Hadamard matrix of `stiefelkit.init.hadamard(n, random=False)`.

    With :math:`W H^T` in the place of W that is the layer as it was, whose input has no outliers where it is rounded.
    The transform is made anew for each input, in time :math:`O(n log n)`. Behind it stands `linear`, a plain layer,
    which what quantizes or adapts linear layers finds under that name.

    The state has the keys of a plain layer and "hadamard", and a weight of the shape (m, 1, n), so that a plain layer,
    which would compute something else from it, does not load it, strictly or not; and a state without is refused.

    Args:
        in_features, out_features, bias, device, dtype: as of `torch.nn.Linear`.
        block, order: as of `stiefelkit.functional.hadamard_transform`; "hadamard" holds them.

    Shape:
        (*, in_features) to (*, out_features).
    """

    hadamard: Tensor

    def __init__(self, *args: Any, block: int | None = None, order: str | None = None, **options: Any):
        super().__init__()
        self.linear = nn.Linear(*args, **options)
        block = optional(integer(2)).require("HadamardLinear", "block", block)
        self.options: dict[str, Any] = {"block": block, "order": order}
        hadamard_transform(torch.empty(0, self.in_features, device="cpu"), **self.options)  # raises
        self.register_buffer("hadamard", self._code.to(self.linear.weight.device))
        self.register_state_dict_post_hook(_name_as_plain)
        self.register_load_state_dict_pre_hook(_refuse_plain)

    @classmethod
    def around(cls, layer: nn.Module, **options: Any) -> "HadamardLinear":
        """Returns a layer with the weight and bias of a linear one, or of transformers' `Conv1D`, as they are."""
        w, b = layer.get_parameter("weight"), held_parameters(layer).get("bias")
        w = w if isinstance(layer, nn.Linear) else nn.Parameter(w.detach().mT.contiguous(), w.requires_grad)
        made = cls(w.shape[1], w.shape[0], bias=b is not None, device="meta", dtype=w.dtype, **options)
        made.linear.weight, made.linear.bias = w, b
        made.hadamard = made._code.to(w.device)
        return made.train(layer.training)

    in_features = property(lambda self: self.linear.in_features, doc="Size of the input.")
    out_features = property(lambda self: self.linear.out_features, doc="Size of the output.")
    weight = property(lambda self: self.linear.weight, doc="W.")
    bias = property(lambda self: self.linear.bias, doc="b, or None.")

    def forward(self, x: Tensor) -> Tensor:
        got = "HadamardLinear; a Linear with the weight hadamard_transform(layer.weight) does the same"
        needs(not is_exported(), OptionError, "torch.onnx.export", "operators that ONNX has", got)
        return self.linear(hadamard_transform(x, **self.options))

    @property
    def _code(self) -> Tensor:
        """One, or the size of blocks, below zero in the order of the kernels."""
        block, order = self.options.values()
        size = block or self.in_features
        is_whole = order is None and size == self.in_features
        kind = torch.uint8 if is_whole else torch.int32
        return torch.tensor(1 if is_whole else size if order is None else -size, dtype=kind, device="cpu")


def _name_as_plain(layer: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    for name in ("weight", "bias"):
        if f"{prefix}linear.{name}" in state:
            t = state.pop(f"{prefix}linear.{name}")
            state[f"{prefix}{name}"] = t.unsqueeze(1) if name == "weight" else t


def _refuse_plain(layer: HadamardLinear, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Raises CheckpointError for the weight of a layer that does not transform its input; names those of `linear`."""
    if f"{prefix}weight" in state and f"{prefix}hadamard" not in state:
        got = f"{prefix}weight without {prefix}hadamard, of a plain layer; load it before rotate_(online=True)"
        raise CheckpointError(f"HadamardLinear needs a state of its own kind, got {got}.")
    if f"{prefix}hadamard" in state and not state[f"{prefix}hadamard"].is_meta:
        wanted, given = int(layer._code), int(state[f"{prefix}hadamard"])
        got = f"{given}; 1 is the whole, others blocks of so many, below zero in the order of fast_hadamard_transform"
        needs(given == wanted, CheckpointError, "HadamardLinear", f"{prefix}hadamard of {wanted}", got)
    for name in ("weight", "bias"):
        if f"{prefix}{name}" in state:
            t = state.pop(f"{prefix}{name}")
            state[f"{prefix}linear.{name}"] = t.squeeze(1) if t.dim() == 3 else t

"""Orthogonal fine-tuning: frozen linear layers that are rotated by a trained frame, which starts as the identity."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit.dtypes import computing_dtype, working_dtype
from stiefelkit.errors import DtypeError, OptionError, UnknownNameError
from stiefelkit.names import Where, choose
from stiefelkit.nn.linear import OrthogonalLinear
from stiefelkit.param import Parametrization
from stiefelkit.parametrizations import find_parametrization
from stiefelkit.parametrizations.block_diagonal import BlockDiagonal
from stiefelkit.parametrizations.householder import Householder

__all__ = ["OrthogonalAdapter", "adapt", "adapters", "fold"]

_BLOCK = 32
"""Rows of a block where nothing else is asked for."""
_SIDES = ("in", "out")


class OrthogonalAdapter(nn.Module):
    """A frozen linear layer and a trained rotation R: y = W R x + b, or y = R W x + b.

    R is the identity at first, so that the layer does what it did. By blocks, thousands of them in a model, it is
    orthogonal fine-tuning (OFT), with exact Cayley transforms; with `parametrization="householder", reflections=8` it
    is Householder reflection adaptation (HRA), with reflectors that are applied in compact WY form. Neither forms R.
    Norms of neurons and angles between them stay as they were. R is worked out in float32 or better, whatever the dtype
    of the layer.

    `merge` has the layer read one matrix, for inference; the frozen weight stays where it is, bit for bit, and so does
    the state dict, so that `unmerge` only forgets the product. Not for layers whose singular values should change.

    Args:
        layer: the linear layer; its parameters require no gradient from then on.
        parametrization: the map of R, a registered name or a class.
        side: "in" rotates what the layer reads, "out" what it gives, before the bias.
        block_size: rows of a block of "block_diagonal", which divides those of R; the largest divisor up to 32 if it
            and `blocks=` are left out.
        init: a scheme of the map; None is the identity: "paired" for an even number of reflectors.
        **options: of the map, as `blocks=`, `inner=`, `reflections=` (8 if left out).

    Shape:
        that of the layer.

    Raises:
        DtypeError: the layer is no `torch.nn.Linear` with a floating weight.
        OptionError: an option is unknown or out of range.

    References:
        Qiu et al., Controlling text-to-image diffusion by orthogonal finetuning, NeurIPS 2023.
        Yuan, Liu, Xu, Bridging the gap between low-rank and orthogonal adaptation via Householder reflection
        adaptation, NeurIPS 2024.

    >>> adapter = OrthogonalAdapter(nn.Linear(8, 3), block_size=4)
    >>> sum(p.numel() for p in adapter.parameters() if p.requires_grad)
    12
    """

    merged: Tensor | None

    def __init__(
        self,
        layer: nn.Linear,
        parametrization: Parametrization = "block_diagonal",
        *,
        side: str = "in",
        block_size: int | None = None,
        init: str | None = None,
        **options: Any,
    ):
        super().__init__()
        if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
            raise DtypeError(f"OrthogonalAdapter needs a torch.nn.Linear of a real dtype, got {type(layer).__name__}.")
        if side not in _SIDES:
            raise OptionError(f"OrthogonalAdapter needs a side in {_SIDES}, got {side!r}.")
        n = layer.in_features if side == "in" else layer.out_features
        cls = find_parametrization(parametrization)
        options = _with_defaults(cls, n, block_size, options)
        if init is None:
            is_even = cls is Householder and options["reflections"] % 2 == 0
            init = "paired" if is_even else "identity"
        self.side, self.layer = side, layer.requires_grad_(False)
        dtype, device = computing_dtype(layer.weight.dtype), layer.weight.device
        self.rotation = OrthogonalLinear(
            n, n, False, parametrization=cls, init=init, dtype=dtype, device=device, **options
        )
        self.register_buffer("merged", None, persistent=False)
        self.register_load_state_dict_post_hook(_merge_anew)

    @property
    def in_features(self) -> int:
        """Size of the input."""
        return self.layer.in_features

    @property
    def out_features(self) -> int:
        """Size of the output."""
        return self.layer.out_features

    @property
    def bias(self) -> Tensor | None:
        """That of the layer."""
        return self.layer.bias

    @property
    def weight(self) -> Tensor:
        """W R or R W, (out_features, in_features): worked out in float64 and rounded once; gradients go to R."""
        if self.merged is not None:
            return self.merged
        w = self.layer.weight
        wide, r = w.to(working_dtype(w.dtype)), self.rotation.weight.to(working_dtype(w.dtype))
        return (wide @ r if self.side == "in" else r @ wide).to(w.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """Has the layer read `weight`, computed once; a layer that is merged stays so."""
        if self.merged is None:
            self.merged = self.weight

    def unmerge(self) -> None:
        """Has the layer read the frozen weight and R again."""
        self.merged = None

    def folded(self) -> nn.Linear:
        """A new plain layer with `weight` and the bias, frozen as the old one."""
        w, b = self.weight.detach().clone(), self.layer.bias
        plain = nn.Linear(*w.shape[::-1], bias=b is not None, device="meta", dtype=w.dtype)
        plain.weight = nn.Parameter(w, False)
        if b is not None:
            plain.bias = nn.Parameter(b.detach().clone(), False)
        return plain.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer; see the class.

        Raises:
            OptionError: it is merged, and in training.
        """
        if self.merged is not None:
            if self.training and torch.is_grad_enabled():
                raise OptionError("OrthogonalAdapter needs adapter.unmerge() before training, got a merged one.")
            return F.linear(x, self.merged, self.layer.bias)
        if self.side == "in":
            return self.layer(self._rotated(x))
        y = self._rotated(F.linear(x, self.layer.weight))
        return y if self.layer.bias is None else y + self.layer.bias.to(y.dtype)

    def _rotated(self, x: Tensor) -> Tensor:
        return self.rotation(x.to(self.rotation.parametrizations["weight"].param.dtype)).to(x.dtype)  # type: ignore[union-attr]

    def extra_repr(self) -> str:
        """The side, and whether it is merged."""
        return f"side={self.side!r}, is_merged={self.merged is not None}"


def adapt(
    model: nn.Module,
    where: Where,
    parametrization: Parametrization = "block_diagonal",
    **options: Any,
) -> nn.Module:
    """Puts an `OrthogonalAdapter` in the place of linear layers, and returns the model; a linear layer itself, adapted.

    Parameters of other modules keep their `requires_grad`: `model.requires_grad_(False)` first trains adapters only.

    Args:
        model: the model.
        where: which weights' layers, as in `sk.orthogonal`: "encoder.*.weight", several patterns, or a function.
        parametrization: as in `OrthogonalAdapter`.
        **options: as in `OrthogonalAdapter`.

    Raises:
        UnknownNameError: no weight is meant.
        DtypeError, OptionError: what `OrthogonalAdapter` raises; nothing is changed then.

    >>> net = adapt(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), "*.weight", block_size=4)
    >>> list(adapters(net))
    ['0', '2']
    """
    hosts = {id(place.host): place for place in choose(model, where)}
    wrong = [place.qualified for place in hosts.values() if not isinstance(place.host, nn.Linear)]
    if wrong:
        raise DtypeError(f"adapt needs weights of linear layers, got {', '.join(wrong)}.")
    trained = {key: [p.requires_grad for p in place.host.parameters()] for key, place in hosts.items()}
    try:
        made = {key: OrthogonalAdapter(place.host, parametrization, **options) for key, place in hosts.items()}  # type: ignore[arg-type]
    except Exception:
        for key, place in hosts.items():
            for p, was in zip(place.host.parameters(), trained[key], strict=True):
                p.requires_grad_(was)
        raise
    return _replaced(model, made)


def adapters(model: nn.Module) -> dict[str, OrthogonalAdapter]:
    """Returns name to adapter of all those in a model, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, OrthogonalAdapter)}


def fold(model: nn.Module) -> nn.Module:
    """Puts a plain layer with the rotated weight in the place of every adapter, and returns the model.

    Raises:
        UnknownNameError: the model has no adapter.
    """
    held = adapters(model).values()
    if not held:
        raise UnknownNameError(f"fold needs a model with an OrthogonalAdapter, got {type(model).__name__} without.")
    return _replaced(model, {id(adapter): adapter.folded() for adapter in held})


def _replaced(model: nn.Module, others: dict[int, Any]) -> Any:
    """Puts others, by the id of what they replace, into all places of a model, or in the place of the model itself."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if id(child) in others and others[id(child)] is not module:
                setattr(module, name, others[id(child)])
    return others.get(id(model), model)


def _with_defaults(cls: type, n: int, block_size: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the map of R, with those that are left out."""
    if block_size is not None and (cls is not BlockDiagonal or "blocks" in options):
        raise OptionError(
            f"OrthogonalAdapter needs block_size= for block_diagonal without blocks=, got it with {cls.__name__}."
        )
    if cls is Householder:
        return {"reflections": min(8, n), **options}
    if cls is not BlockDiagonal or "blocks" in options:
        return options
    if block_size is None:
        block_size = max(b for b in range(1, min(n, _BLOCK) + 1) if n % b == 0)
    if type(block_size) is not int or block_size < 1 or n % block_size:
        raise OptionError(f"OrthogonalAdapter needs a block_size that divides {n}, got {block_size!r}.")
    return {**options, "blocks": n // block_size}


def _merge_anew(adapter: Any, _: Any) -> None:
    """Works the product out again from what was loaded."""
    if adapter.merged is not None:
        adapter.unmerge()
        adapter.merge()

"""Orthogonal fine-tuning: frozen linear layers that are rotated by a trained frame, which starts as the identity."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stiefelkit._torch import call_hooks, held_modules, held_parameters, is_cached
from stiefelkit.contract.param import Parametrization
from stiefelkit.contract.table import find_parametrization
from stiefelkit.errors import DtypeError, NonFiniteError, OptionError, UnknownNameError, shown
from stiefelkit.nn.probing import beyond_affine, in_other_adapters, is_plain, obstacle
from stiefelkit.nn.recurrent import require_options
from stiefelkit.numbers import Check, one_of, plain, whole
from stiefelkit.parametrizations.block_diagonal import BlockDiagonal
from stiefelkit.parametrizations.householder import Householder
from stiefelkit.tensors import computing_dtype, working_dtype
from stiefelkit.weights import attach
from stiefelkit.weights.find import Place, Where, choose, coordinate_list_of

__all__ = ["OrthogonalAdapter", "adapt", "adapters", "fold"]

_BLOCK = 32
"""Rows of a block where nothing else is asked for."""
_SIDES = ("in", "out")


class _Rotation(nn.Module):
    """R, applied without being formed; no `nn.Linear`, so that tools that look for these in a model leave it alone."""

    def __init__(
        self, n: int, parametrization: Parametrization, init: str, like: Tensor, options: dict[str, Any]
    ) -> None:
        super().__init__()
        require_options(OrthogonalAdapter, parametrization, options)
        self.weight = nn.Parameter(torch.zeros(n, n, dtype=computing_dtype(like.dtype), device=like.device))
        attach.orthogonal(self, "weight", parametrization, init=init, **options)

    def forward(self, x: Tensor) -> Tensor:
        held = coordinate_list_of(self, "weight")
        if held is None or len(held) > 1 or is_cached() or isinstance(x, torch.fx.Proxy):
            w = self.weight
            return F.linear(x.to(w.dtype), w).to(x.dtype)
        return held(x.to(held.param.dtype)).to(x.dtype)


class OrthogonalAdapter(nn.Module):
    """A frozen linear layer and a trained rotation R: y = W R x + b, or y = R W x + b.

    R is the identity at first, so that the layer does what it did. By blocks, thousands of them in a model, it is
    orthogonal fine-tuning (OFT), with exact Cayley transforms; with `parametrization="householder", reflections=8` it
    is Householder reflection adaptation (HRA), with reflectors that are applied in compact WY form. Neither forms R.
    Norms of neurons and angles between them stay as they were. R is worked out in float32 or better, whatever the dtype
    of the layer.

    The layer is called as a whole: what it does beyond W x + b (a LoRA inside, hooks, a forward of its own) it does to
    R x; and with side="out", what it gives is rotated but for its bias.

    `merge` reads one matrix, for inference; the frozen weight stays where it is, bit for bit, and so does the state
    dict, so that `unmerge` only forgets the product. That needs a layer which computes W x + b and no more. Not for
    layers whose singular values should change.

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
        if isinstance(layer, nn.Linear) and is_lazy(layer.weight):
            raise DtypeError("OrthogonalAdapter needs a layer with a size, got a lazy one; call the model on a batch.")
        if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
            raise DtypeError(f"OrthogonalAdapter needs a torch.nn.Linear of a real dtype, got {type(layer).__name__}.")
        if not one_of(*_SIDES).holds(side):
            raise OptionError(f"OrthogonalAdapter needs a side in {_SIDES}, got {shown(side)}.")
        n = layer.in_features if side == "in" else layer.out_features
        cls = find_parametrization(parametrization)
        options = _with_defaults(cls, n, block_size, plain(options))
        if init is None:
            is_even = cls is Householder and options["reflections"] % 2 == 0
            init = "paired" if is_even else "identity"
        self.side, self.layer = side, layer.requires_grad_(False)
        self.rotation = _Rotation(n, cls, init, layer.weight, options)
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
        """The layer's bias."""
        return self.layer.bias

    @property
    def weight(self) -> Tensor:
        """W R or R W, (out_features, in_features): worked out in float64 and rounded once; gradients go to R.

        It is made at each read: what is written into it is lost.

        Raises:
            OptionError: the layer computes more than W x + b, which no one matrix tells.
        """
        return self._product("weight")

    def merge(self) -> None:
        """Makes the layer read `weight`, computed once; a merged layer stays merged.

        Raises:
            OptionError: the layer computes more than W x + b.
            NonFiniteError: the product holds NaN or infinity.
        """
        if self.merged is None:
            self.merged = self._finite_product("merge")

    def unmerge(self) -> None:
        """Makes the layer read the frozen weight and R again."""
        self.merged = None

    def folded(self) -> nn.Linear:
        """Returns a new plain layer with `weight` and the bias, frozen as the old one.

        Raises:
            OptionError: the layer computes more than W x + b, or the adapter has hooks.
            NonFiniteError: the product holds NaN or infinity.
        """
        if not _is_itself(self):
            self._refuse("an adapter with hooks or a forward put over its own; remove them first", "folded")
        w, b = self._finite_product("folded"), self.layer.bias
        plain = nn.Linear(*w.shape[::-1], bias=b is not None, device="meta", dtype=w.dtype)
        plain.weight = nn.Parameter(w, False)
        if b is not None:
            with torch.inference_mode(False):
                plain.bias = nn.Parameter(b.detach().clone(), False)
        return plain.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer; see the class.

        Raises:
            OptionError: it is merged, and in training; or merged, and the layer has got more to do since.
        """
        if self.merged is not None:
            if self.training and torch.is_grad_enabled():
                raise OptionError("OrthogonalAdapter needs adapter.unmerge() before training, got a merged one.")
            self._refuse(obstacle(self.layer), "forward while merged")
            return F.linear(x, self.merged, self.layer.bias)
        if self.side == "in":
            return self.layer(self.rotation(x))
        if is_plain(self.layer):
            y, b = F.linear(x, self.layer.weight), self.layer.bias
            y = self.rotation(y)
        else:
            y, b = self.layer(x), self.layer.bias
            y = self.rotation(y if b is None else y - b.to(y.dtype))
        return y if b is None else y + b.to(y.dtype)

    def _product(self, who: str) -> Tensor:
        if self.merged is not None:
            return self.merged
        self._refuse(beyond_affine(self.layer), who)
        w = self.layer.weight
        wide, r = w.to(working_dtype(w.dtype)), self.rotation.weight.to(working_dtype(w.dtype))
        return (wide @ r if self.side == "in" else r @ wide).to(w.dtype)

    def _finite_product(self, who: str) -> Tensor:
        """Returns a copy of the product that is in no graph, and that inference mode does not limit."""
        with torch.inference_mode(False), torch.no_grad():
            w = self._product(who).clone()
            if not w.isfinite().all():
                raise NonFiniteError(
                    f"OrthogonalAdapter.{who} needs a finite weight and rotation, got NaN or infinity in their "
                    "product; load an earlier state first."
                )
        return w

    def _refuse(self, found: str | None, who: str) -> None:
        """Raises OptionError if anything was found beside the layer's weight and bias."""
        if found is None and not _is_itself(self.rotation):
            found = "a rotation with hooks; remove them first"
        if found is not None:
            raise OptionError(f"OrthogonalAdapter.{who} needs a layer of one weight and a bias, W x + b, got {found}.")

    def extra_repr(self) -> str:
        """Returns the side, and whether it is merged."""
        return f"side={self.side!r}, is_merged={self.merged is not None}"


def adapt(
    model: nn.Module,
    where: Where,
    parametrization: Parametrization = "block_diagonal",
    **options: Any,
) -> nn.Module:
    """Puts an `OrthogonalAdapter` in the place of linear layers, and returns the model; a linear layer itself, adapted.

    Parameters of other modules keep their `requires_grad`: `model.requires_grad_(False)` first trains adapters only.
    What is inside adapters is not meant by patterns, so that a second call adapts what the first has left; a layer
    that stands in several places is adapted once, in all of them.

    Args:
        model: the model.
        where: which weights' layers, as in `sk.orthogonal`: "encoder.*.weight", several patterns, or a function.
        parametrization: as in `OrthogonalAdapter`.
        **options: as in `OrthogonalAdapter`.

    Raises:
        UnknownNameError: no weight is meant.
        DtypeError, OptionError: what `OrthogonalAdapter` raises; all layers that are meant have adapters; one is inside
            a layer of PEFT, which would merge into a weight that is computed; or one shares a parameter with a module
            that trains it. Nothing is changed then.

    >>> net = adapt(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), "*.weight", block_size=4)
    >>> list(adapters(net))
    ['0', '2']
    """
    places = choose(model, where)
    ours = {id(inner) for adapter in adapters(model).values() for inner in adapter.modules()}
    hosts = {id(place.host): place for place in places if id(place.host) not in ours}
    if not hosts:
        raise OptionError(f"adapt needs layers without an adapter, got {places[0].qualified}, which is in one.")
    wrong = [place.qualified for place in hosts.values() if not isinstance(place.host, nn.Linear)]
    lazy = [place.qualified for place in hosts.values() if any(map(is_lazy, place.host.parameters()))]
    if lazy:
        raise DtypeError(f"adapt needs layers with a size, got {', '.join(lazy)}; call the model on a batch first.")
    if wrong:
        raise DtypeError(f"adapt needs weights of linear layers, got {', '.join(wrong)}.")
    others = in_other_adapters(model)
    for key, place in hosts.items():
        if key in others:
            raise OptionError(
                f"adapt needs layers of the model itself, got {place.qualified}, inside {others[key]}, which merges "
                "into it; adapt first, so that PEFT finds a plain layer in each adapter, or merge_and_unload first."
            )
    _refuse_trained_elsewhere(model, hosts)
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
        OptionError, NonFiniteError: what `OrthogonalAdapter.folded` raises; nothing is changed then.
    """
    held = adapters(model).values()
    if not held:
        raise UnknownNameError(f"fold needs a model with an OrthogonalAdapter, got {type(model).__name__} without.")
    return _replaced(model, {id(adapter): adapter.folded() for adapter in held})


def _replaced(model: nn.Module, others: dict[int, Any]) -> Any:
    """Puts others, by the id of what they replace, into all places of a model, or in the place of the model itself."""
    for module in list(model.modules()):
        for name, child in list(held_modules(module).items()):  # named_children leaves out second names
            if id(child) in others:
                setattr(module, name, others[id(child)])
    return others.get(id(model), model)


def _refuse_trained_elsewhere(model: nn.Module, hosts: dict[int, Place]) -> None:
    """Raises OptionError if a parameter of the layers is trained by a module that is not among them."""
    names: dict[int, str] = {}
    for place in hosts.values():
        path = place.qualified.rpartition(".")[0]
        names |= {id(p): f"{path}.{name}".lstrip(".") for name, p in place.host.named_parameters() if p.requires_grad}
    for name, p in _held_outside(model, hosts):
        if id(p) in names:
            raise OptionError(
                f"adapt needs parameters that it may freeze, got {names[id(p)]}, which is {name} too and trained "
                "there; model.requires_grad_(False) first, or untie them."
            )


def _held_outside(module: nn.Module, hosts: dict[int, Place], prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters of a model that are not inside of some of its modules, under all of their names."""
    if id(module) in hosts:
        return
    yield from ((prefix + name, p) for name, p in held_parameters(module).items() if p is not None)
    for name, child in held_modules(module).items():
        if child is not None:
            yield from _held_outside(child, hosts, f"{prefix}{name}.")


def _is_itself(module: nn.Module) -> bool:
    """Returns whether a call runs the forward of the class and nothing else."""
    return not any(call_hooks(module)) and "forward" not in vars(module)


def _with_defaults(cls: type, n: int, block_size: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the map of R, with those that are left out."""
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
        if block_size == 1 < n:
            raise OptionError(
                f"OrthogonalAdapter needs block_size= where no number from 2 to {_BLOCK} divides the features, got {n} "
                f'features; block_size={n} rotates all of them, and parametrization="householder" takes any number.'
            )
    divides = Check(f"a {{key}} that divides {n}", lambda size: whole(1).holds(size) and n % size == 0)
    return {**options, "blocks": n // divides.require("OrthogonalAdapter", "block_size", block_size)}


def _merge_anew(adapter: Any, _: Any) -> None:
    """Works the product out again from what was loaded."""
    if adapter.merged is not None:
        adapter.unmerge()
        adapter.merge()

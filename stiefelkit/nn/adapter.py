"""Orthogonal fine-tuning: frozen layers that are rotated by a trained frame, which starts as the identity."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stiefelkit._torch import autograd_time, backward_pass, call_hooks, held_modules, is_cached, is_traced
from stiefelkit.contract.param import Parametrization
from stiefelkit.contract.table import find_parametrization
from stiefelkit.errors import DtypeError, NonFiniteError, OptionError, needs
from stiefelkit.nn.frozen import (
    PASSED_ON,
    Layout,
    along,
    applied,
    attribute,
    beyond_affine,
    has_own_forward,
    inside_peft,
    layout_of,
    obstacle,
    reference_tensor,
    size_of,
)
from stiefelkit.nn.recurrent import require_options
from stiefelkit.numbers import above, as_python_number, at_least, integer, one_of
from stiefelkit.parametrizations.block_diagonal import BlockDiagonal
from stiefelkit.parametrizations.cayley import Cayley
from stiefelkit.parametrizations.householder import Householder
from stiefelkit.tensors import computing_dtype, working_dtype
from stiefelkit.weights import attach
from stiefelkit.weights.find import coordinate_list_of

_REMEMBERED = 64  # switches between a forward and its backward pass of which a checkpoint can be told
_BLOCK = 32  # rows of a block where nothing else is asked for
_OF_THE_LAYER = frozenset(("weight", "bias", "in_features", "out_features"))


class Rotation(nn.Module):
    """R, applied without being formed; no `nn.Linear`, so that tools that look for these in a model leave it alone.

    With `copies` it is the frame `weight`, of some shape, so many times on the diagonal. In training each of `blocks`
    runs of features is left alone with the chance `dropout`.
    """

    copies = blocks = 1
    dropout = 0.0

    def __init__(
        self, shape: tuple[int, ...], inner: Parametrization, init: Any, factory: Any, options: Mapping[str, Any]
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, **factory))
        attach.orthogonal(self, "weight", inner, init=init, **options)

    @property
    def matrix(self) -> Tensor:
        """R, with all of its blocks."""
        w = self.weight
        return w if self.copies == 1 else torch.block_diag(*[w] * self.copies)

    def forward(self, x: Tensor) -> Tensor:
        """Returns R x, for x of shape (*, n)."""
        if self.copies == 1:
            return self.dropped(self._turned(x), x)
        return self.dropped(self._turned(x.unflatten(-1, (self.copies, -1))).flatten(-2), x)

    def dropped(self, turned: Tensor, x: Tensor) -> Tensor:
        """Returns what R makes of x, in training with x itself in the blocks that are left out."""
        if not self.training or self.dropout == 0:
            return turned
        is_kept = torch.rand(self.blocks, device=x.device) >= self.dropout
        return torch.where(is_kept.repeat_interleave(x.shape[-1] // self.blocks), turned, x)

    def _turned(self, x: Tensor) -> Tensor:
        held = coordinate_list_of(self, "weight")
        if held is None or len(held) > 1 or is_cached() or isinstance(x, torch.fx.Proxy):
            w = self.weight
            return F.linear(x.to(w.dtype), w).to(x.dtype)
        return held(x.to(held.param.dtype)).to(x.dtype)


class Replacement(nn.Module, ABC):
    """A module in the place of `layer`, switched and deleted by its name; several may stand around one layer."""

    name = "default"
    is_on = True
    merged: Tensor | None
    _switched_in = -1  # the backward pass
    _switches: Sequence[tuple[int, object]] = ()
    """The numbers of autograd before which it was switched, the last ones, each with the state until then."""

    def __init__(self, layer: nn.Module, name: str):
        super().__init__()
        self._switches = [(autograd_time(), None)]
        needs(isinstance(name, str) and name != "", OptionError, type(self).__name__, "a text as name", name)
        self.layer, self.name = layer, name

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_THE_LAYER:
            held = getattr(self.base, name, None)  # libraries that tie weights assign the one that is there
            is_same = value is held or (type(value) is int and value == held)
            wanted = f"{name} set on its layer, `base` (to resize or tie that, fold or delete_adapter first)"
            needs(is_same, OptionError, type(self).__name__, wanted, "it set on itself")
            return
        if name in ("is_on", "merged") and not is_traced():
            if (this := backward_pass()) == -1:
                self._switches = [*self._switches[1 - _REMEMBERED :], (autograd_time(), self._state)]
            vars(self)["_switched_in"] = this
        super().__setattr__(name, value)

    @property
    def _state(self) -> object:
        return self.is_on, self.merged is None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for copies and pickles, without what was switched in this process."""
        return {**vars(self), "_switches": ()}

    def check_recomputed(self) -> None:
        """Raises OptionError if a checkpoint computes anew what was computed while something else was on."""
        if is_traced() or backward_pass() in (-1, self._switched_in):  # what a checkpoint computes may switch, too
            return
        time = autograd_time()
        then = next((state for when, state in self._switches if when > time), self._state)
        wanted = (
            "a backward pass with the adapters on, and merged, as in the forward pass that a checkpoint computes anew"
        )
        got = "others; call backward() before use_adapters, merge, unmerge or adapt"
        needs(then == self._state, OptionError, type(self).__name__, wanted, got)

    @property
    def base(self) -> Any:
        """The layer inside all replacements."""
        return self.layer.base if isinstance(self.layer, Replacement) else self.layer

    def unmerge(self) -> None:
        """Forgets what was computed for inference."""

    @abstractmethod
    def folded(self) -> nn.Module:
        """Returns a module that computes the same without a replacement."""


def replaced(model: nn.Module, others: Mapping[int, Any]) -> Any:
    """Puts others, by the id of what they replace, into all places of a model, or in the place of the model itself."""
    for module in list(model.modules()):
        for name, child in list(held_modules(module).items()):  # named_children leaves out second names
            if id(child) in others:
                setattr(module, name, others[id(child)])
    return others.get(id(model), model)


class Adapter(Replacement):
    """A frozen layer and a trained change of its weight; a subclass says which, by `changed` and `unmerged`.

    `merge` makes the layer read one matrix, for inference; the frozen weight stays where it is, bit for bit, and so
    does the state dict, so that `unmerge` only forgets the matrix. Merging needs a layer that computes W x + b and no
    more; training does not. Adapters around one layer act one after another, the outer one first; one that is off does
    nothing. A subclass freezes the layer when all else is made.
    """

    _layout = Layout()

    def __init__(self, layer: nn.Module, name: str):
        kind = type(self).__name__
        is_lazy_layer = any(map(is_lazy, layer.parameters()))
        needs(not is_lazy_layer, DtypeError, kind, "a layer with a size", "a lazy one; call the model on a batch")
        super().__init__(layer, name)
        found = layout_of(self.base)
        if found is None:
            raise DtypeError(f"{kind} needs a layer with in_features and out_features, got {type(layer).__name__}.")
        self._layout = found
        like = reference_tensor(self.base, kind)
        self.factory: dict[str, Any] = {"dtype": computing_dtype(like.dtype), "device": like.device}
        self.register_buffer("merged", None, persistent=False)
        self.register_load_state_dict_post_hook(_merge_anew)

    def __getattr__(self, name: str) -> Any:
        if name in PASSED_ON:
            return getattr(self.layer, name)
        return super().__getattr__(name)

    @abstractmethod
    def changed(self, w: Tensor) -> Tensor:
        """Returns the weight, of the shape of the layer's and in float64, as the adapter changes it."""

    @abstractmethod
    def unmerged(self, x: Tensor, *args: object, **options: object) -> Tensor:
        """Returns what the layer gives with the change, by calling it."""

    in_features = property(lambda self: self.features("in"), doc="Size of the input.")
    out_features = property(lambda self: self.features("out"), doc="Size of the output.")
    bias = property(lambda self: attribute(self.layer, "bias"), doc="The layer's bias.")

    def features(self, side: str) -> int:
        """Returns how many features a layer reads, "in", or gives, "out"."""
        key = self._layout.inputs if side == "in" else self._layout.outputs
        wanted = f'side="out" for {type(self.base).__name__}, which reads indices'
        needs(key is not None, OptionError, type(self).__name__, wanted, f"side={side!r}")
        return size_of(inside_peft(self.base), key) or 0

    @property
    def weight(self) -> Tensor:
        """The changed weight, worked out in float64 at each read and rounded once, with gradients."""
        return self.changed_wide().to(self.base.weight.dtype) if self.merged is None else self.merged

    def merge(self) -> None:
        """Makes the layer read `weight`, computed once; refused where the layer computes more than W x + b."""
        if self.merged is None:
            self.merged = self._finite_weight()

    def unmerge(self) -> None:
        """Forgets `merged`: the layer reads the frozen weight and the change again."""
        self.merged = None

    def folded(self) -> nn.Module:
        """Returns a new plain layer with `weight` and the bias, frozen as the old one; raises what `merge` does."""
        self._refuse(None if is_itself(self) else "an adapter with hooks or another forward; remove them first")
        w, base = nn.Parameter(self._finite_weight(), False), self.base
        if self._layout != Layout():
            return copy.deepcopy(base, {id(base.weight): w}).train(self.training)
        dense = nn.Linear(*w.shape[::-1], bias=base.bias is not None, device="meta", dtype=w.dtype)
        dense.weight = w
        if base.bias is not None:
            with torch.inference_mode(False):
                dense.bias = nn.Parameter(base.bias.detach().clone(), False)
        return dense.train(self.training)

    def forward(self, x: Tensor, *args: object, **options: object) -> Tensor:
        """Applies the layer; see the class. A merged one in training is refused."""
        self.check_recomputed()
        if not self.is_on:
            return self.layer(x, *args, **options)
        if self.merged is None:
            return self.unmerged(x, *args, **options)
        is_training = self.training and torch.is_grad_enabled()
        needs(not is_training, OptionError, type(self).__name__, "adapter.unmerge() before training", "a merged one")
        self._refuse(obstacle(self.base))
        return applied(self.base, self.merged, x)

    def changed_wide(self) -> Tensor:
        """Returns the weight of the layer with all changes, in float64."""
        if isinstance(self.layer, Adapter):
            self._refuse(None if is_itself(self.layer) else "an adapter with hooks; remove them first")
            w = self.layer.changed_wide()
        else:
            self._refuse(beyond_affine(self.layer))
            w = self.base.weight.to(working_dtype(self.base.weight.dtype))
        if not self.is_on:
            return w
        parts = [child for name, child in self.named_children() if name != "layer"]
        self._refuse(None if all(map(is_itself, parts)) else "a rotation with hooks; remove them first")
        return self.changed(w)

    def _finite_weight(self) -> Tensor:
        """Returns a copy of the weight that is in no graph, and that inference mode does not limit."""
        with torch.inference_mode(False), torch.no_grad():
            w = self.weight.clone(memory_format=torch.contiguous_format)  # as safetensors wants
        got = "NaN or infinity in their product; load an earlier state first"
        needs(bool(w.isfinite().all()), NonFiniteError, type(self).__name__, "a finite weight and adapter", got)
        return w

    def _refuse(self, found: str | None) -> None:
        needs(found is None, OptionError, type(self).__name__, "a layer of one weight and a bias, W x + b", found)

    def extra_repr(self) -> str:
        return f"name={self.name!r}, is_merged={self.merged is not None}, is_on={self.is_on}"


class OrthogonalAdapter(Adapter):
    """A frozen layer and a trained rotation R: :math:`y = W R x + b`, or :math:`y = R W x + b`.

    R is the identity at first, so that the layer does what it did. By blocks, thousands of them in a model, it is
    orthogonal fine-tuning (OFT), with exact Cayley transforms; with `parametrization="householder", reflections=8` it
    is Householder reflection adaptation (HRA), with reflectors that are applied in compact WY form. Neither forms R.
    Norms of neurons and angles between them stay as they were, singular values too. R is worked out in float32 or
    better, whatever the dtype of the layer.

    The layer is called as a whole: what it does beyond W x + b (a LoRA inside, quantized numbers, hooks, a forward of
    its own) it does to R x; and with side="out", what it gives is rotated but for its bias. Of a convolution the
    channels are rotated, those of each place alike, or, with side="patches", what stands under the kernel, by a kernel
    that is rotated at each call. Of an embedding the rows are rotated, side="out".

    Args:
        layer: a linear layer, the `Conv1D` of transformers, a convolution, an embedding, or any other with
            `in_features` and `out_features`; its parameters require no gradient from then on.
        parametrization: the map of R, a registered name or a class.
        side: "in" rotates what the layer reads, "out" what it gives, before the bias; "patches", see above.
        block_size: rows of a block of "block_diagonal", which divides those of R; the largest divisor up to 32 if it
            and `blocks=` are left out.
        init: a scheme of the map; None is the identity: "paired" for an even number of reflectors.
        name: by which adapters of a model are switched, saved and deleted.
        shared: whether all blocks are one and the same.
        bound: the largest :math:`‖R - I‖_F`, of Cayley transforms; k blocks have :math:`bound / √k` each. None for no
            bound.
        dropout: the chance of each block, or of R if it has none, to be the identity in a pass in training.
        **options: of the map, as `blocks=`, `inner=`, `reflections=` (8 if left out).

    References:
        Qiu et al., Controlling text-to-image diffusion by orthogonal finetuning, NeurIPS 2023.
        Yuan, Liu, Xu, Bridging the gap between low-rank and orthogonal adaptation via Householder reflection
        adaptation, NeurIPS 2024.

    >>> adapter = OrthogonalAdapter(nn.Linear(8, 3), block_size=4)
    >>> sum(p.numel() for p in adapter.parameters() if p.requires_grad)
    12
    """

    peft_distance = 0.0
    """:math:`‖R - R'‖_F` for the R' that PEFT computes by a series from what was loaded; see `load_peft`."""

    def __init__(
        self,
        layer: nn.Module,
        parametrization: Parametrization = "block_diagonal",
        *,
        side: str = "in",
        block_size: int | None = None,
        init: str | None = None,
        name: str = "default",
        shared: bool = False,
        bound: float | None = None,
        dropout: float = 0.0,
        **options: object,
    ):
        super().__init__(layer, name)
        cls, n = find_parametrization(parametrization), self._turned_features(side)
        options = _with_defaults(cls, n, block_size, as_python_number(options))
        require_options(OrthogonalAdapter, cls, options)
        init = identity_scheme(cls, options) if init is None else init
        self._turn_by(_rotation(n, cls, init, self.factory, options, shared, bound), dropout)

    def _turned_features(self, side: str) -> int:
        self.side, kind = one_of("in", "out", "patches").require("OrthogonalAdapter", "side", side), type(self.base)
        is_tensor = self.bias is None or isinstance(self.bias, Tensor)
        needs(is_tensor, OptionError, "OrthogonalAdapter", "a layer whose bias is a tensor", kind.__name__)
        if side != "patches":
            return self.features(side)
        is_conv = issubclass(kind, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        self._refuse(beyond_affine(self.base) if is_conv else f"{kind.__name__}, no convolution")
        return self.base.weight[0].numel()

    def _turn_by(self, rotation: Rotation, dropout: float) -> None:
        rotation.dropout = at_least(0, 1).require("OrthogonalAdapter", "dropout", dropout)
        self.rotation = rotation
        self.layer.requires_grad_(False)

    def changed(self, w: Tensor) -> Tensor:
        r, (inputs, outputs) = self.rotation.matrix.to(w.dtype), self._layout.axes
        if self.side == "in":
            return along(lambda rows: rows @ r, w, inputs - w.dim())
        if self.side == "patches":
            return (w.flatten(1) @ r).view_as(w)
        first = w.movedim(outputs, 0)
        return (r @ first.flatten(1)).view(first.shape).movedim(0, outputs)

    def unmerged(self, x: Tensor, *args: object, **options: object) -> Tensor:
        dim = self._layout.dim
        if self.side == "in":
            return self.layer(along(self.rotation, x, dim), *args, **options)
        if self.side == "patches":
            self._refuse(obstacle(self.base))
            w = attribute(self.layer, "weight")
            rows, r = w.flatten(1), self.rotation.matrix
            turned = self.rotation.dropped((rows.to(r.dtype) @ r).to(w.dtype), rows)
            return applied(self.base, turned.view_as(w), x)
        if not has_own_forward(self.layer) and is_itself(self.layer) and self._layout == Layout():
            y = along(self.rotation, F.linear(x, attribute(self.layer, "weight")), dim)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        y = self.layer(x, *args, **options)
        if self.bias is None:
            return along(self.rotation, y, dim)
        b = self.bias.to(y.dtype).view(-1, *[1] * (-1 - dim))
        return along(self.rotation, y - b, dim) + b

    def extra_repr(self) -> str:
        return f"side={self.side!r}, {super().extra_repr()}"


def identity_scheme(cls: type, options: Mapping[str, Any]) -> str:
    """Returns the scheme by which a map starts as the identity, of reflectors one from which all axes are learned."""
    return "paired" if cls is Householder and options.get("reflections", 1) % 2 == 0 else "identity"


def is_itself(module: nn.Module) -> bool:
    """Returns whether a call runs the forward of the class and nothing else."""
    return not any(call_hooks(module)) and "forward" not in vars(module)


def _rotation(
    n: int, cls: type, init: str, factory: Any, options: dict[str, Any], shared: bool, bound: float | None
) -> Rotation:
    who, has_blocks = "OrthogonalAdapter", cls is BlockDiagonal
    needs(has_blocks or not shared, OptionError, who, "block_diagonal for shared=True", cls.__name__)
    blocks, of_inner = options.get("blocks", 1) if has_blocks else 1, options.get("inner_options") or {}
    inner = find_parametrization(options.get("inner", "cayley")) if has_blocks else cls
    if bound is not None:
        needs(inner is Cayley, OptionError, who, "Cayley transforms for bound=", inner.__name__)
        of_inner = of_inner | {"bound": above(0).require(who, "bound", bound) / math.sqrt(blocks)}
        options = options | ({"inner_options": of_inner} if has_blocks else of_inner)
    if shared:
        needs(blocks > 0 and n % blocks == 0, OptionError, who, f"blocks that divide {n}", blocks)
        own = {key: value for key, value in options.items() if key not in ("blocks", "inner", "inner_options")}
        rotation = Rotation((n // blocks,) * 2, inner, init, factory, own | of_inner)
        rotation.copies = blocks
    else:
        rotation = Rotation((n, n), cls, init, factory, options)
    rotation.blocks = blocks
    return rotation


def _with_defaults(cls: type, n: int, block_size: int | None, options: dict[str, Any]) -> dict[str, Any]:
    who, has_size = "OrthogonalAdapter", cls is BlockDiagonal and "blocks" not in options
    wanted = "block_size= for block_diagonal without blocks="
    needs(has_size or block_size is None, OptionError, who, wanted, f"it with {cls.__name__}")
    if not has_size:
        return {"reflections": min(8, n), **options} if cls is Householder else options
    size = max(b for b in range(1, min(n, _BLOCK) + 1) if n % b == 0) if block_size is None else block_size
    size = integer(1).require(who, "block_size", size)
    got = f'{n} features; block_size={n} turns all of them, and parametrization="householder" takes any number'
    is_divided = block_size is not None or size > 1 or n == 1
    needs(is_divided, OptionError, who, f"block_size= where no number from 2 to {_BLOCK} divides the features", got)
    needs(n % size == 0, OptionError, who, f"a block_size that divides {n}", size)
    return {**options, "blocks": n // size}


def _merge_anew(adapter: Adapter, _: object) -> None:
    if adapter.merged is not None:
        adapter.unmerge()
        adapter.merge()

"""Layouts of the layers that adapters take: how many features they have, and where these stand in what they hold."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit.errors import DtypeError


class Layout(NamedTuple):
    """The features of a kind of layers.

    Args:
        inputs, outputs: attributes that hold how many inputs and outputs there are; `inputs` is None for indices.
        axes: dimensions of inputs and of outputs in the weight.
        dim: the dimension of features in what the layer reads and gives, counted from the last.
    """

    inputs: str | None = "in_features"
    outputs: str = "out_features"
    axes: tuple[int, int] = (1, 0)
    dim: int = -1


_TABLE = Layout(None, "embedding_dim", (0, 1))
_CHANNELS = {d: Layout("in_channels", "out_channels", dim=-1 - d) for d in (1, 2, 3)}
LAYOUTS: Mapping[str, Layout] = {
    "Linear": Layout(),
    "Conv1D": Layout("nx", "nf", (0, 1)),  # of transformers
    "Embedding": _TABLE,
    "EmbeddingBag": _TABLE,
    **{f"Conv{d}d": layout for d, layout in _CHANNELS.items()},
    **{f"ConvTranspose{d}d": layout for d, layout in _CHANNELS.items()},
}
"""Layouts by the name of a layer's class, or of one that it derives from; any other layer may have `Linear`'s."""
_OF_CONVOLUTIONS = "in_channels out_channels kernel_size stride padding dilation groups padding_mode"
PASSED_ON = frozenset(f"nx nf num_embeddings embedding_dim padding_idx {_OF_CONVOLUTIONS}".split())
"""Attributes that an adapter has because its layer has them; in_features, out_features and bias are its own."""
OF_PEFT = ("get_base_layer", "base_layer", "unload_and_optionally_merge_module")
"""Attributes by which PEFT knows its own layers: what they wrap they merge into, and put back."""


def inside_peft(layer: nn.Module) -> Any:
    """Returns the layer inside a layer of PEFT, any other as it is."""
    find = getattr(type(layer), "get_base_layer", None)
    return find(layer) if callable(find) else layer


def layout_of(layer: nn.Module) -> Layout | None:
    """Returns the layout of a layer, of PEFT's layers that of the one inside; None if its features are not known."""
    base = inside_peft(layer)
    named = [LAYOUTS[cls.__name__] for cls in type(base).__mro__ if cls.__name__ in LAYOUTS]
    for layout in [*named, Layout()]:
        if all(type(getattr(base, key, None)) is int for key in (layout.inputs, layout.outputs) if key is not None):
            return layout
    return None


def reference_tensor(layer: nn.Module, who: str) -> Tensor:
    """Returns a tensor of the dtype and on the device that an adapter of a layer computes by.

    Raises:
        DtypeError: the layer holds complex numbers.
    """
    w = getattr(layer, "weight", None)
    held = [t for t in [w, *layer.parameters(), *layer.buffers()] if isinstance(t, Tensor)]
    if any(t.is_complex() for t in held):
        raise DtypeError(f"{who} needs a layer of a real dtype, got {type(layer).__name__} with complex numbers.")
    floating = [t for t in held if t.is_floating_point()]
    return floating[0] if floating else torch.empty(0, device=held[0].device if held else None)


def along(function: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """Returns what a function of vectors in the last dimension gives for vectors in another one."""
    return function(x) if dim == -1 else function(x.movedim(dim, -1)).movedim(-1, dim)


def applied(layer: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """Returns what a layer that computes W x + b gives with another weight."""
    layout: Any = layout_of(layer)
    if layout.inputs is not None and layout.dim == -1:
        return F.linear(x, weight if layout.axes == (1, 0) else weight.mT, layer.bias)  # type: ignore[arg-type]
    return torch.func.functional_call(layer, {"weight": weight}, (x,))

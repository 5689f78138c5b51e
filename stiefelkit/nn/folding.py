"""Changes of the weights and biases of layers, each worked out in float64 and rounded once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from stiefelkit._torch import held_modules, held_parameters
from stiefelkit.errors import DtypeError, OptionError, ShapeError, UnfilledError, needs
from stiefelkit.nn.adapter import Replacement
from stiefelkit.nn.frozen import inside_peft
from stiefelkit.tensors import working_dtype


@dataclass(frozen=True, eq=False)
class Factor:
    """A linear map of the outputs or the inputs of a layer, as it acts on the rows of a matrix."""

    word: str  # on the left of W
    size: int  # the number of rows that it takes
    apply: Callable[[Tensor], Tensor]  # maps matrices (size, columns) in float64


@dataclass
class Site:
    """A layer and the factors on its outputs and its inputs, the first to act first; `shift` is added to inputs."""

    layer: nn.Module
    outputs: list[Factor] = field(default_factory=list)
    inputs: list[Factor] = field(default_factory=list)
    norm: nn.Module | None = None
    shift: Tensor | None = None

    def turned(self, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns a weight of real numbers, outputs by inputs, and a bias with the factors."""
        for factor in self.inputs:
            w = factor.apply(w.mT).mT
        for factor in self.outputs:
            w, b = factor.apply(w), None if b is None else factor.apply(b[:, None])[:, 0]
        return w, b


class Affine(NamedTuple):
    """The scale and the bias of a norm: the parameters, the factor, and the value of the scale's parameter for none."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    values: Tensor | None
    neutral: float


class Change(NamedTuple):
    """A tensor of a layer, the factors along its dimensions, and what is added to it first."""

    site: Site
    name: str
    tensor: nn.Parameter | None
    factors: tuple[tuple[Factor, ...], tuple[Factor, ...]]
    shift: Tensor | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for layers that want the same of a tensor."""
        return *(tuple(map(id, along)) for along in self.factors), id(self.shift)

    def value(self) -> Tensor:
        """Returns the new values in float64, of a tensor that was not written to yet."""
        left, right = self.factors
        if self.name == "bias":
            w, b = weight_and_bias_of(self.site.layer)
            wide = w.to(working_dtype(w.dtype))
            b = wide.new_zeros(len(wide)) if b is None else b.to(wide.dtype)
            b = b if self.shift is None else b + wide @ self.shift.to(wide)
            for factor in left:
                b = factor.apply(b[:, None])[:, 0]
            return b
        assert self.tensor is not None
        m = self.tensor.to(working_dtype(self.tensor.dtype))
        for factor in right:
            m = factor.apply(m.mH).mH
        for factor in left:
            m = factor.apply(m)
        return m


def matrix_of(layer: nn.Module) -> tuple[nn.Parameter, int]:
    """Returns the weight of a layer, and the dimension of its outputs."""
    has_outputs_last = isinstance(layer, nn.Embedding) or is_turned(layer)
    w = held_parameters(layer).get("weight") if isinstance(layer, nn.Linear) or has_outputs_last else None
    if w is None:
        is_adapted = isinstance(layer, Replacement) or inside_peft(layer) is not layer
        remedy = "; fold(model) or merge_and_unload() first" if is_adapted else ""
        wanted = "layers of torch.nn.Linear, or Embedding among writers, with plain weights"
        raise DtypeError(f"Folding needs {wanted}, got {kind_of(layer)}{remedy}.")
    needs(not w.is_meta, UnfilledError, "Folding", "weights that hold values", f"{kind_of(layer)} on the meta device")
    return w, int(has_outputs_last)


def weight_and_bias_of(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Returns the weight of a linear layer, outputs by inputs, and its bias."""
    w, dim = matrix_of(layer)
    return (w if dim == 0 else w.mT), held_parameters(layer).get("bias")


def is_turned(layer: nn.Module) -> bool:
    """Returns whether a layer is transformers' `Conv1D`, a linear layer whose weight is inputs by outputs."""
    return any(cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.") for cls in type(layer).__mro__)


def changes_of(sites: Sequence[Site], may_untie: bool) -> list[Change]:
    """Returns the change of every tensor, each once; weights that are to be untied come first."""
    changes: list[Change] = []
    untied: list[Change] = []
    known: dict[Any, Change] = {}
    for site in sites:
        for change in _of_site(site):
            tensor = change.tensor
            key = (tensor.device, tensor.data_ptr(), tensor.shape) if tensor is not None else id(site)
            other = known.setdefault(key, change)
            if other is change:
                changes.append(change)
            elif other.key != change.key and may_untie:
                untied.append(change)
            elif other.key != change.key:
                got = f"two, of {kind_of(other.site.layer)} and {kind_of(site.layer)}; untie them first"
                raise OptionError(f"Folding needs one change of a weight that layers share, got {got}.")
    return untied + changes


def _of_site(site: Site) -> list[Change]:
    layer, outputs, inputs = site.layer, tuple(site.outputs), tuple(site.inputs)
    w, dim = matrix_of(layer)
    has_inputs = not (inputs and isinstance(layer, nn.Embedding))
    needs(has_inputs, DtypeError, "Folding", "readers of torch.nn.Linear with plain weights", kind_of(layer))
    for along, factors in ((dim, outputs), (1 - dim, inputs)):
        for factor in factors:
            wanted = f"weights with {factor.size} features along dimension {along}"
            needs(w.shape[along] == factor.size, ShapeError, "Folding", wanted, tuple(w.shape))
    changes = [Change(site, "weight", w, (outputs, inputs) if dim == 0 else (inputs, outputs))]
    bias = held_parameters(layer).get("bias")
    shift = site.shift if site.shift is not None and bool(site.shift.any()) else None
    if shift is not None or (bias is not None and outputs):
        changes.append(Change(site, "bias", bias, (outputs, ()), shift))
    return changes


def write(
    changes: Sequence[Change], affine: Mapping[nn.Module, Affine], model: nn.Module | None
) -> dict[int, nn.Module]:
    """Writes all changes: biases, which are made of weights, then weights that are untied, then the others.

    Returns the root mean squares that are to replace layer norms of a model, by the ids of these.
    """
    written: set[int] = set()
    for change in sorted(changes, key=lambda change: change.name):
        if not any(change.factors) and change.shift is None:
            continue
        layer, old, value = change.site.layer, change.tensor, change.value()
        if old is None or id(old) in _of_others(changes, change):
            like = layer.get_parameter("weight") if old is None else old
            layer.register_parameter(change.name, nn.Parameter(value.to(like.dtype), like.requires_grad))
            config = config_of(model)
            if old is not None and hasattr(config, "tie_word_embeddings"):
                config.tie_word_embeddings = False
        elif id(old) not in written:
            old.copy_(value)
            written.add(id(old))
    for own in affine.values():
        if own.weight is not None:
            own.weight.fill_(own.neutral)
        if own.bias is not None:
            own.bias.zero_()
    layer_norms = [norm for norm in affine if isinstance(norm, nn.LayerNorm) and model is not None]
    return {id(norm): _root_mean_square(norm) for norm in layer_norms}


def _of_others(changes: Sequence[Change], change: Change) -> set[int]:
    """Returns the tensors that a later change writes otherwise."""
    later = changes[[c is change for c in changes].index(True) + 1 :]
    return {id(c.tensor) for c in later if c.tensor is not None and c.key != change.key}


def _root_mean_square(norm: nn.LayerNorm) -> nn.RMSNorm:
    """Returns the norm of centred inputs, with a scale of one under the same name."""
    has_scale, w = norm.elementwise_affine, norm.weight
    other = nn.RMSNorm([*norm.normalized_shape], eps=norm.eps, elementwise_affine=has_scale)
    other = other.to(w.device, w.dtype) if has_scale else other
    if has_scale:
        other.weight.requires_grad_(w.requires_grad)
    return other.train(norm.training)


def is_norm(module: nn.Module, n: int) -> bool:
    """Returns whether a module without others inside acts on n features one by one, by what it holds."""
    if held_modules(module) or isinstance(module, nn.Linear | nn.Embedding):
        return False
    weight = held_parameters(module).get("weight")
    return (weight is not None and weight.shape == (n,)) or getattr(module, "normalized_shape", None) == (n,)


def config_of(model: nn.Module | None) -> Any:
    """Returns the configuration of a model of transformers, None where there is none."""
    return getattr(model, "config", None)


def kind_of(module: nn.Module) -> str:
    """Returns the name of a module's class."""
    return type(module).__name__

"""Changes of the weights and biases of layers, each worked out in float64 and rounded once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit._torch import held_modules, held_parameters
from stiefelkit.errors import DtypeError, NonFiniteError, OptionError, ShapeError, UnfilledError, needs
from stiefelkit.nn.adapter import Replacement
from stiefelkit.nn.frozen import agree, attribute, inside_peft, probes, twin
from stiefelkit.nn.linear import HadamardLinear
from stiefelkit.tensors import is_sharded, working_dtype


@dataclass(frozen=True, eq=False)
class Factor:
    """A linear map of the outputs or the inputs of a layer, as it acts on the rows of a matrix."""

    size: int  # the number of rows that it takes
    apply: Callable[[Tensor], Tensor]  # maps matrices (size, columns) in float64


class Matrix(nn.Module):
    """A linear map that a module holds as a parameter, or a stack of them, as packed experts do, with their biases.

    Outputs are the dimension before the last, or the last where the module says `is_transposed`.
    """

    owner: nn.Module

    def __init__(self, owner: nn.Module, name: str):
        super().__init__()
        self.__dict__["owner"], self.name = owner, name  # not a child
        self.bias_name = "bias" if name == "weight" else f"{name}_bias"
        self.weight, self.bias = owner.get_parameter(name), held_parameters(owner).get(self.bias_name)
        self.dim = -1 if name != "weight" and attribute(owner, "is_transposed") else -2


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
            w, b = factor.apply(w), None if b is None else factor.apply(b[..., None])[..., 0]
        return w, b

    def values(self, name: str, of_linear: bool = False) -> Tensor:
        """Returns the new weight, as the layer stores it, or a linear one, or the new bias, in float64."""
        w, b = weight_and_bias_of(self.layer)
        w = w.to(working_dtype(w.dtype))
        if name == "weight":
            w = self.turned(w, None)[0]
            return w if of_linear or matrix_of(self.layer)[1] == -2 else w.mT
        b = w.new_zeros(w.shape[:-1]) if b is None else b.to(w.dtype)
        b = b if self.shift is None else b + w @ self.shift.to(w)
        for factor in self.outputs:
            b = factor.apply(b[..., None])[..., 0]
        return b


class Affine(NamedTuple):
    """The scale and the bias of a norm: the parameters, the factor, and the value of the scale's parameter for none."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    values: Tensor | None
    neutral: float
    new_bias: Tensor | None = None  # zero if left out
    is_replaced: bool = False  # by a root mean square


class Change(NamedTuple):
    """A parameter of a layer that is written, or one that the layer gets in its place, or anew."""

    site: Site
    name: str
    tensor: nn.Parameter | None
    key: tuple[object, ...]  # equal for layers that want the same of a tensor
    is_new: bool = False


def inner_of(layer: nn.Module) -> nn.Module:
    """Returns the plain layer behind a Hadamard transform, the module that holds a matrix, any other as it is."""
    if isinstance(layer, Matrix):
        return layer.owner
    return layer.linear if isinstance(layer, HadamardLinear) else layer


def _holder(layer: nn.Module) -> nn.Module:
    return layer if isinstance(layer, Matrix) else inner_of(layer)


def matrix_of(layer: nn.Module) -> tuple[nn.Parameter, int]:
    """Returns the weight of a layer, and the dimension of its outputs, from the last."""
    layer = _holder(layer)
    classes = [f"{cls.__module__}.{cls.__name__}" for cls in type(layer).__mro__]
    is_conv1d = any(name.startswith("transformers.") and name.endswith(".Conv1D") for name in classes)
    dim = layer.dim if isinstance(layer, Matrix) else -1 if isinstance(layer, nn.Embedding) or is_conv1d else -2
    w = held_parameters(layer).get("weight") if isinstance(layer, nn.Linear | Matrix) or dim == -1 else None
    if w is None:
        is_adapted = isinstance(layer, Replacement) or inside_peft(layer) is not layer
        remedy = "; fold(model) or merge_and_unload() first" if is_adapted else ""
        wanted = "layers of torch.nn.Linear, or Embedding among writers, with plain weights"
        raise DtypeError(f"Folding needs {wanted}, got {kind_of(layer)}{remedy}.")
    require_filled(layer)
    return w, dim


def require_filled(layer: nn.Module) -> None:
    """Raises UnfilledError for a layer whose parameters hold no values, DtypeError where each process holds a part."""
    held = [p for p in held_parameters(layer).values() if p is not None]
    got = f"{kind_of(layer)} whose are sharded; rotate before fully_shard"
    needs(not is_sharded(*held), DtypeError, "Folding", "parameters that one process holds", got)
    is_filled = not any(p.is_meta for p in held)
    got = f"{kind_of(layer)} on the meta device; load it, or take accelerate's hooks off, first"
    needs(is_filled, UnfilledError, "Folding", "parameters that hold values", got)


def weight_and_bias_of(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Returns the weight of a linear layer, outputs by inputs, and its bias."""
    w, dim = matrix_of(layer)
    return (w if dim == -2 else w.mT), held_parameters(_holder(layer)).get("bias")


def changes_of(sites: Sequence[Site]) -> list[Change]:
    """Returns what is to be written, each tensor once: biases, which are made of weights, then new weights, then all.

    A weight that layers share, and want different changes of, is new for all but the first.
    """
    changes: list[Change] = []
    known: dict[Any, Change] = {}
    for change in (change for site in sites for change in _of_site(site)):
        tensor = change.tensor
        place = (tensor.device, tensor.data_ptr(), tensor.shape) if tensor is not None else id(change.site.layer)
        other = known.setdefault(place, change)
        is_same = other.key == change.key
        if other is change or not is_same:
            changes.append(change._replace(is_new=tensor is None or not is_same))
    return sorted(changes, key=lambda change: (change.name, not change.is_new))


def _of_site(site: Site) -> Iterator[Change]:
    layer, outputs, inputs = site.layer, site.outputs, site.inputs
    w, dim = matrix_of(layer)
    has_inputs = not (inputs and isinstance(layer, nn.Embedding))
    needs(has_inputs, DtypeError, "Folding", "readers of torch.nn.Linear with plain weights", kind_of(layer))
    for along, factors in ((dim, outputs), (-3 - dim, inputs)):
        for factor in factors:
            wanted = f"weights with {factor.size} features along dimension {w.dim() + along}"
            needs(w.shape[along] == factor.size, ShapeError, "Folding", wanted, tuple(w.shape))
    keys = tuple(map(id, outputs)), tuple(map(id, inputs))
    yield Change(site, "weight", w, keys if dim == -2 else keys[::-1])
    bias = held_parameters(_holder(layer)).get("bias")
    is_shifted = site.shift is not None and bool(site.shift.any())
    got = f"{kind_of(inner_of(layer))} without one behind a norm with a bias"
    needs(bias is not None or not (is_shifted and isinstance(layer, Matrix)), OptionError, "Folding", "a bias", got)
    if is_shifted or (bias is not None and outputs):
        yield Change(site, "bias", bias, (keys[0], id(site.shift) if is_shifted else None))


def require_finite(changes: Sequence[Change]) -> None:
    """Raises NonFiniteError if a new value is infinite in float16; other dtypes reach as far as weights do."""
    for site, name, old, *_ in changes:
        dtype = (weight_and_bias_of(site.layer)[0] if old is None else old).dtype
        if dtype == torch.float16:
            got = f"{kind_of(site.layer)}, whose new {name} is beyond {dtype}; cast it to float32 or bfloat16 first"
            is_finite = bool(site.values(name).to(dtype).isfinite().all())
            needs(is_finite, NonFiniteError, "Folding", "new values that the dtype of a layer holds", got)


def write(
    changes: Sequence[Change], affine: Mapping[nn.Module, Affine], model: nn.Module | None
) -> dict[int, nn.Module]:
    """Writes all changes; returns the root mean squares that are to replace layer norms of a model, by their ids."""
    for site, name, old, _, is_new in changes:
        value = site.values(name)
        if old is not None and not is_new:
            old.copy_(value)
            continue
        layer = _holder(site.layer)
        like = layer.get_parameter("weight") if old is None else old
        layer.register_parameter(name, nn.Parameter(value.to(like.dtype), like.requires_grad))
        config = attribute(model, "config")
        if old is not None and attribute(config, "tie_word_embeddings"):
            config.tie_word_embeddings = False
    for own in affine.values():
        for _, tensor, value in new_affine(own):
            tensor.copy_(value)
    return {id(norm): root_mean_square(norm) for norm, own in affine.items() if own.is_replaced}


def new_affine(own: Affine) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yields name, parameter and new value of the scale and the bias of a norm."""
    if own.weight is not None:
        yield "weight", own.weight, torch.full_like(own.weight, own.neutral, dtype=torch.float64)
    if own.bias is not None:
        yield "bias", own.bias, own.bias.new_zeros(own.bias.shape) if own.new_bias is None else own.new_bias


@torch.no_grad()
def layer_norm_eps(norm: nn.Module) -> float | None:
    """Returns the epsilon of a layer norm of any class, by what it does without scale and bias, None of another."""
    if isinstance(norm, nn.LayerNorm):
        return norm.eps
    held = {name: p for name, p in held_parameters(norm).items() if p is not None}
    n = (attribute(norm, "normalized_shape") or (held["weight"].shape if "weight" in held else (0,)))[0]
    eps = attribute(norm, "eps", "variance_epsilon", default=1e-5)
    if not held.keys() <= {"weight", "bias"} or not is_norm(norm, n):
        return None
    x = probes(n, next((p.device for p in held.values()), torch.device("cpu")))
    x = torch.cat([x, x * eps**0.5])
    neutral = {name: torch.full_like(p, name == "weight") for name, p in held.items()}
    is_same = agree(twin(norm, **neutral)(x), F.layer_norm(x, (n,), eps=eps), n)
    return eps if is_same else None


def root_mean_square(norm: nn.Module) -> nn.RMSNorm:
    """Returns the norm of centred inputs, with a scale of one under the same name."""
    weight = held_parameters(norm).get("weight")
    n = len(weight) if weight is not None else attribute(norm, "normalized_shape")[0]
    other = nn.RMSNorm(n, eps=layer_norm_eps(norm), elementwise_affine=weight is not None)
    if weight is not None:
        other.to(weight.device, weight.dtype).weight.requires_grad_(weight.requires_grad)
    return other.train(norm.training)


def is_norm(module: nn.Module, n: int) -> bool:
    """Returns whether a module without others inside acts on n features one by one, by what it holds."""
    if held_modules(module) or isinstance(module, nn.Linear | nn.Embedding):
        return False
    weight = held_parameters(module).get("weight")
    return (weight is not None and weight.shape == (n,)) or attribute(module, "normalized_shape") == (n,)


def kind_of(module: nn.Module) -> str:
    """Returns the name of a module's class."""
    return type(module).__name__

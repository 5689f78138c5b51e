"""Rotations of a decoder that are learned through its fake-quantized layers, before they are folded."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stiefelkit import init as first_frames
from stiefelkit.errors import OptionError, ShapeError, needs
from stiefelkit.functional import hadamard_transform
from stiefelkit.nn.adapter import Rotation
from stiefelkit.nn.decoders import RotationSites, check_sites, rotation_sites
from stiefelkit.nn.folding import Matrix, Site, inner_of, kind_of, matrix_of, weight_and_bias_of
from stiefelkit.nn.frozen import attribute
from stiefelkit.nn.linear import HadamardLinear
from stiefelkit.nn.rotation import absorb_norms_, check_downs, online_options, rotate_, turned_sites
from stiefelkit.numbers import integer, optional


def fake_quantize(x: Tensor, bits: int) -> Tensor:
    """Rounds to signed integers of a few bits times a scale for each row; gradients pass straight through.

    The scale is the largest modulus of a row, over its last dimension, divided by :math:`2^{bits - 1} - 1`.

    Args:
        x: floating, of shape (*, n).
        bits: from 2 to 16.

    >>> fake_quantize(torch.tensor([1.0, 0.4, -0.05]), 3)
    tensor([1.0000, 0.3333, 0.0000])
    """
    bits = integer(2, 16).require("fake_quantize", "bits", bits)
    exact, most = x.detach(), 2 ** (bits - 1) - 1
    scale = exact.abs().amax(-1, keepdim=True) / most
    rounded = (exact / torch.where(scale == 0, 1.0, scale)).round() * scale
    return rounded + (x - exact)  # the bracket is zero: x + (rounded - exact) can miss the grid by one ulp


_Attribute: TypeAlias = tuple[nn.Module, Callable[..., Any], str]
_OF_THE_MODEL = frozenset(
    "config device dtype generation_config main_input_name name_or_path can_generate gradient_checkpointing_enable "
    "gradient_checkpointing_disable is_gradient_checkpointing supports_gradient_checkpointing get_input_embeddings "
    "get_output_embeddings activation_checkpointing_enable activation_checkpointing_disable accepts_loss_kwargs "
    "enable_input_require_grads disable_input_require_grads".split()
)
"""Attributes that trainers ask of a model, and that neither run nor save it."""


class _with_signature_of_the_model:
    """Makes a method that has the signature of the model's forward, by which trainers choose columns of data."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        functools.update_wrapper(self, function)  # type: ignore[arg-type]

    def __get__(self, module: "Rotated | None", _: type) -> Any:
        if module is None:
            return self.function
        bound: Any = partial(self.function, module)
        bound.__signature__ = inspect.signature(module.model.forward)
        return bound


class Rotated(nn.Module):
    """A decoder whose layers are rotated and rounded to a few bits as it runs, to learn the rotations.

    The residual rotation R, and one rotation for each head of keys and values, are frames that an optimizer of frames
    trains (`sk.optim.SGDG`, `CayleyAdam`); the model's own parameters are frozen. At each call, each layer between
    embedding and head computes with its rotated weight, rounded by rows, from its input, rounded by tokens; what writes
    to the stream outside of the base, as what projects images, is rotated and not rounded. Weights are computed anew in
    the backward pass, so that no second copy of the model is held. `fold` makes what was learned part of the model.

    Norms are absorbed into what reads them, in the model itself, when this is made: see `rotate_`.

    Args:
        sites: the layers, of `rotation_sites(model)`.
        weight_bits: bits of weights; None leaves them as they are.
        activation_bits: bits of what layers read.
        heads: whether heads are rotated, too.
        online: whether what `sites.downs` read is multiplied by a Hadamard matrix, or options of it, as in `rotate_`.
        start: the first residual rotation: "hadamard" with random signs, a scheme of `stiefelkit.init` or a matrix.
            Heads start at the identity.
        generator: source of randomness.
        check: whether outputs are compared first, as in `absorb_norms_`.

    The frames are the `weight` of the module `rotation`, and of one for each block in `head_rotations`, (groups, d, d).
    """

    def __init__(
        self,
        sites: RotationSites,
        *,
        weight_bits: int | None = 4,
        activation_bits: int | None = 4,
        heads: bool = True,
        online: bool | Mapping[str, Any] = False,
        start: str | Tensor = "hadamard",
        generator: torch.Generator | None = None,
        check: bool = True,
    ):
        super().__init__()
        bits = optional(integer(2, 16))
        self.weight_bits = bits.require("Rotated", "weight_bits", weight_bits)
        self.activation_bits = bits.require("Rotated", "activation_bits", activation_bits)
        check_sites(sites, "Rotated")
        if (options := online_options(online)) is not None:
            check_downs(sites.downs, options)
        n = sites.size
        if isinstance(start, Tensor):
            r = start
        elif start == "hadamard":
            r = first_frames.hadamard(n, generator=generator)
        else:
            r = first_frames.draw(start, (n, n), generator=generator)
        needs(tuple(r.shape) == (n, n), ShapeError, "Rotated", f"start= of shape {(n, n)}", tuple(r.shape))
        packed = [kind_of(w.owner) for w in sites.writers if isinstance(w, Matrix) and self.activation_bits is not None]
        needs(not packed, OptionError, "Rotated", "activation_bits=None where experts are packed", str(packed[:1]))
        absorb_norms_(sites, check=check)
        self.model, self.sites, self.online = sites.model.requires_grad_(False), sites, online
        factory: Any = {"device": sites.writers[0].get_parameter("weight").device, "dtype": torch.float32}
        self.rotation = Rotation((n, n), "stiefel", r.to(**factory), factory, {})
        sizes = [(one.groups, one.size, one.size) for one in sites.heads if heads]
        self.head_rotations = nn.ModuleList(Rotation(size, "stiefel", "identity", factory, {}) for size in sizes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name) if name in _OF_THE_MODEL else super().__getattr__(name)

    @_with_signature_of_the_model
    def forward(self, *args: object, labels: object = None, **kwargs: object) -> Any:
        """Calls the model, rotated and rounded, with the arguments and the signature that it has."""
        with self._rotated():
            return self.model(*args, **kwargs, **({} if labels is None else {"labels": labels}))

    def generate(self, *args: object, **kwargs: object) -> Any:
        """Generates with the model, rotated and rounded."""
        with torch.no_grad(), self._rotated():
            return attribute(self.model, "generate")(*args, **kwargs)

    @torch.no_grad()
    def fold(self, *, check: bool = True) -> nn.Module:
        """Folds the rotations into the model, in float64, and returns it, unrounded; they are the identity then.

        Args:
            check: as in `rotate_`.
        """
        r, *heads = (frame.weight.detach() for frame in self._frames())
        rotate_(r, sites=self.sites, heads=heads or None, online=self.online, check=check)
        for frame in self._frames():
            frame.weight = torch.eye(frame.weight.shape[-1], device=frame.weight.device).expand(frame.weight.shape)
        self.online = False
        return self.model

    def _frames(self) -> list[Any]:
        return [self.rotation, *self.head_rotations]

    @contextmanager
    def _rotated(self) -> Iterator[None]:
        """Gives each layer a forward of its own for one call, and where the model's checkpoints compute anew."""
        r, *heads = (frame.weight for frame in self._frames())
        of_each: dict[nn.Module, list[Site]] = {}
        for site in turned_sites(self.sites, r, heads, online_options(self.online)).values():
            of_each.setdefault(site.layer.owner if isinstance(site.layer, Matrix) else site.layer, []).append(site)
        forwards: list[_Attribute] = [(m, self._forward_of(m, own, r), "forward") for m, own in of_each.items()]
        for layer in of_each:
            got = f"{kind_of(layer)} with another; accelerate's remove_hook_from_submodules takes its hooks off"
            is_own = attribute(layer.forward, "__func__") is type(layer).forward
            needs(is_own, OptionError, "Rotated", "layers with the forward of their class", got)
        for module in self.sites.model.modules():  # of transformers, and of torch.distributed
            for name in {"_gradient_checkpointing_func", "checkpoint_fn"} & vars(module).keys():
                forwards.append((module, partial(_checkpoint_again, vars(module)[name], forwards), name))
        with _attributes(forwards):
            yield

    def _forward_of(self, layer: nn.Module, sites: Sequence[Site], r: Tensor) -> Callable[..., Any]:
        """Returns what a layer computes; the head, embeddings and what stands beside them are not rounded."""
        own = type(layer).forward.__get__(layer)
        if isinstance(layer, nn.Embedding) or layer in self.sites.beside:
            return lambda *args: F.linear(y := own(*args), r.to(y))
        if layer in [*self.sites.norms.values()][-1]:
            return lambda x: own(x @ r.to(x))
        options = online_options(self.online) if layer in self.sites.downs else None
        options = layer.options if isinstance(layer, HadamardLinear) else options
        is_rounded = self.activation_bits is not None and not isinstance(sites[0].layer, Matrix)
        other = copy.copy(inner_of(layer))
        vars(other).pop("forward", None)

        def run(x: Tensor, *args: object) -> Any:
            x = x if options is None else hadamard_transform(x, **options)
            values = {key: t for site in sites for key, t in self._turned(site, x.dtype).items()}
            x = fake_quantize(x, self.activation_bits or 0) if is_rounded else x
            return torch.func.functional_call(other, values, (x, *args))

        return _checkpointed(layer, run)

    def _turned(self, site: Site, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the rotated weight of a layer, rounded unless it is a router's, and its bias, as they are stored."""
        w, b = weight_and_bias_of(site.layer)
        w, b = site.turned(w.float(), None if b is None else b.float())  # products in float32
        w, held = w.to(dtype), site.layer if isinstance(site.layer, Matrix) else None
        if self.weight_bits is not None and (held is None or w.dim() > 2):
            w = fake_quantize(w, self.weight_bits)
        name, bias_name = ("weight", "bias") if held is None else (held.name, held.bias_name)
        values = {name: w if matrix_of(site.layer)[1] == -2 else w.mT}
        return values if b is None else {**values, bias_name: b.to(dtype)}


@contextmanager
def _attributes(given: Sequence[_Attribute]) -> Iterator[None]:
    before = [(module, name, vars(module).get(name)) for module, _, name in given]
    try:
        for module, value, name in given:
            vars(module)[name] = value
        yield
    finally:
        for module, name, value in before:
            vars(module).pop(name) if value is None else vars(module).update({name: value})


def _checkpoint_again(
    original: Callable[..., Any], given: Sequence[_Attribute], run: Callable[..., Any], *args: object, **options: object
) -> Any:
    """Checkpoints a function that has the same attributes of modules when it is called again."""

    def again(*args: object, **options: object) -> Any:
        with _attributes([one for one in given if one[2] == "forward"]):
            return run(*args, **options)

    return original(again, *args, **options)


def _checkpointed(layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that computes what it does anew in the backward pass."""
    has_gradients = torch.is_grad_enabled()

    def forward(*args: object) -> Any:
        if has_gradients and not torch.is_grad_enabled():
            got = "a reentrant checkpoint; use_reentrant=False, or none of the model's own: layers have theirs"
            raise OptionError(f"Rotated needs {kind_of(layer)} to run with gradients, got {got}.")
        return checkpoint(run, *args, use_reentrant=False) if torch.is_grad_enabled() else run(*args)

    return forward


def rotated(model: nn.Module, sites: RotationSites | None = None, **options: Any) -> Rotated:
    """Returns `Rotated` of a model: its rotations are learned as it runs, with its layers rounded.

    Args:
        model: a decoder that `rotation_sites` knows, or whose layers are given.
        sites: its layers, if they are given.
        **options: of `Rotated`.
    """
    sites = rotation_sites(model) if sites is None else sites
    check_sites(sites, "rotated")
    needs(sites.model is model, OptionError, "rotated", "the sites of its model", "those of another")
    return Rotated(sites, **options)

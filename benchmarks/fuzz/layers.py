"""Layers by their specification, what each is called with, and the same layers in plain torch, as twins."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import stiefelkit as sk

Layer = dict[str, Any]


class Bare(nn.Module):
    """A batch of matrices that are read as they are."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


class Loop(nn.Module):
    """The recurrence h = act(U x + W h + b) as a loop over plain parameters."""

    def __init__(self, m: int, n: int, layer: Layer, dtype: torch.dtype):
        super().__init__()
        self.inside, self.layer = layer["activation"] == "modrelu", layer
        self.suffix = "_l0" if layer["kind"] == "own_rnn" else ""
        rows, bias = (1 + layer["complex"]) * n, n if self.inside else (1 + layer["complex"]) * n
        for name, shape, kind in (("weight_ih", (rows, m), dtype), ("weight_hh", (n, n), field_of(layer, dtype))):
            self.register_parameter(name + self.suffix, nn.Parameter(torch.zeros(shape, dtype=kind)))
        held = nn.Parameter(torch.zeros(bias, dtype=dtype)) if layer["bias"] else None
        self.register_parameter("bias" + self.suffix, held)

    def forward(self, x: Tensor, h: Any = 0.0) -> Tensor:
        w = getattr(self, "weight_hh" + self.suffix)
        u = getattr(self, "weight_ih" + self.suffix).to(w.real.dtype)  # casts leave complex tensors alone
        b = getattr(self, "bias" + self.suffix)
        b = b if b is None else b.to(w.real.dtype)
        if self.layer["complex"]:
            u = torch.complex(*u.chunk(2))
            b = b if self.inside or b is None else torch.complex(*b.chunk(2))
        h, states = (torch.zeros(x.shape[-2], w.shape[0], dtype=w.dtype) + h).to(w.dtype), []
        for step in x.to(w.dtype).reshape(-1, *x.shape[-2:]):
            h = step @ u.mT + h @ w.mT + (0 if self.inside or b is None else b)
            if self.layer["activation"] == "tanh":
                h = h.tanh()
            elif self.inside:
                h = torch.sgn(h if w.is_complex() else h.detach()) * torch.relu(h.abs() + (0 if b is None else b))
            states.append(h)
        return torch.stack(states).reshape(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Kind:
    """One kind of layer: what makes it of sizes a and b, in a dtype, and the name of the weight that is orthogonal.

    It is called with inputs of `shapes`, by a and b, which begin with -1 if those are integers below a.
    """

    make: Callable[[int, int, Layer, torch.dtype], nn.Module]
    weight: str = "weight"
    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]] = lambda a, b: ((5, a),)
    blocks: int | None = None
    is_complex: bool = False


def _of(cls: Any) -> Any:
    return lambda a, b, layer, real: cls(a, b, layer["bias"], dtype=real)


def _conv(cls: Any, *space: int) -> Kind:
    def make(a: int, b: int, layer: Layer, real: torch.dtype) -> nn.Module:
        groups = layer["groups"]
        return cls(a * groups, b * groups, 2, bias=layer["bias"], groups=groups, dtype=real)

    return Kind(make, shapes=lambda a, b: ((5, a, *space),))


def _steps(a: int, b: int) -> tuple[tuple[int, ...], ...]:
    return ((4, 5, a),)


def _from_a_state(a: int, b: int) -> tuple[tuple[int, ...], ...]:
    return ((5, a), (5, b))


_linear = Kind(lambda a, b, o, real: nn.Linear(a, b, o["bias"], dtype=field_of(o, real)), is_complex=True)
KINDS = {
    "linear": _linear,
    "own_linear": _linear,
    "embedding": Kind(lambda a, b, o, real: nn.Embedding(a, b, dtype=real), shapes=lambda a, b: ((-1, 5),)),
    "bag": Kind(lambda a, b, o, real: nn.EmbeddingBag(a, b, dtype=real), shapes=lambda a, b: ((-1, 5, 3),)),
    "conv1d": _conv(nn.Conv1d, 4),
    "conv2d": _conv(nn.Conv2d, 4, 4),
    "transposed1d": _conv(nn.ConvTranspose1d, 4),
    "transposed2d": _conv(nn.ConvTranspose2d, 4, 4),
    "attention": Kind(
        lambda a, b, o, real: nn.MultiheadAttention(a, 1, bias=o["bias"], dtype=real), "in_proj_weight", _steps, 3
    ),
    "bilinear": Kind(
        lambda a, b, o, real: nn.Bilinear(a, 2, b, o["bias"], dtype=real), shapes=lambda a, b: ((5, a), (5, 2))
    ),
    "bare": Kind(lambda a, b, o, real: Bare(torch.randn(2, b, a, dtype=field_of(o, real))), is_complex=True),
    "rnn_cell": Kind(_of(nn.RNNCell), "weight_hh", _from_a_state),
    "lstm_cell": Kind(_of(nn.LSTMCell), "weight_hh", _from_a_state, blocks=4),
    "gru_cell": Kind(_of(nn.GRUCell), "weight_hh", _from_a_state, blocks=3),
    "own_rnn": Kind(Loop, "weight_hh_l0", _steps, is_complex=True),
    "own_cell": Kind(Loop, "weight_hh", _from_a_state, is_complex=True),
    "rnn": Kind(lambda a, b, o, real: nn.RNN(a, b, dtype=real), "weight_hh_l0", _steps),
}


def is_own(layer: Layer) -> bool:
    """Whether a layer is a recurrence of ours, which takes real inputs and casts its complex weight along."""
    return layer["kind"] in ("own_rnn", "own_cell")


def field_of(layer: Layer, real: torch.dtype) -> torch.dtype:
    """The dtype of the weight that becomes orthogonal: complex64 at least, if complex."""
    if not layer["complex"]:
        return real
    return torch.complex128 if real == torch.float64 else torch.complex64


def plain(layer: Layer, real: torch.dtype) -> nn.Module:
    """Makes a layer of torch, or a twin of one of ours, without orthogonal weights."""
    a, b = layer["sizes"]
    return KINDS[layer["kind"]].make(a, b, layer, real)


def made(layer: Layer, real: torch.dtype, seed: int | None = None) -> nn.Module:
    """Makes a layer with its orthogonal weight.

    Args:
        layer: its specification.
        real: the dtype of its real tensors.
        seed: another one than its own.

    Raises:
        StiefelkitError: the map does not do this; the layer is to be plain then.
    """
    torch.manual_seed(layer["seed"] if seed is None else seed)
    (a, b), kind, options = layer["sizes"], layer["kind"], layer["options"]
    own: dict[str, Any] = {"bias": layer["bias"], "parametrization": layer["map"], "dtype": real, **options}
    if kind == "own_linear":
        return sk.nn.OrthogonalLinear(a, b, **{**own, "dtype": field_of(layer, real)})
    if is_own(layer):
        cls = sk.nn.OrthogonalRNN if kind == "own_rnn" else sk.nn.OrthogonalRNNCell
        return cls(a, b, field="complex" if layer["complex"] else "real", activation=layer["activation"], **own)
    module, name = plain(layer, real), KINDS[kind].weight
    holder, path = (nn.ModuleList([module]), f"0.{name}") if layer["through_model"] else (module, name)
    sk.orthogonal(holder, path, layer["map"], **options)
    return module


class Net(nn.Module):
    """Layers side by side, each with inputs of its own."""

    def __init__(self, layers: list[nn.Module], kinds: list[str]):
        super().__init__()
        self.layers, self.kinds = nn.ModuleList(layers), kinds

    def forward(self, inputs: list[tuple[Tensor, ...]]) -> list[Tensor]:
        outputs = []
        for kind, layer, x in zip(self.kinds, self.layers, inputs, strict=True):
            args: Any = {"attention": (*x, *x, *x), "lstm_cell": (x[0], (x[-1], x[-1]))}.get(kind, x)
            y = layer(*args)
            outputs.append(y[0] if isinstance(y, tuple) else y)
        return outputs

    def weights(self) -> dict[str, Tensor]:
        """The weights that were to be orthogonal, by name; parameters where they are plain."""
        held = zip(self.kinds, self.layers, strict=True)
        return {f"layers.{i}.{KINDS[kind].weight}": getattr(x, KINDS[kind].weight) for i, (kind, x) in enumerate(held)}


def inputs_of(layer: Layer, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draws inputs in float64, complex128 or integers.

    Numbers are quarters and 1/8, in the steps of a sequence 1/16, 1/32, 1/64: every dtype holds them, and no sum of
    some of them and their negatives is zero, where activations have a kink.
    """
    drawn: list[Tensor] = []
    for lead, *rest in KINDS[layer["kind"]].shapes(*layer["sizes"]):
        dtype = torch.complex128 if layer["complex"] and (drawn or not is_own(layer)) else torch.float64
        if lead < 0:
            drawn.append(torch.randint(layer["sizes"][0], rest, generator=generator))
            continue
        rest = [rest[0] * layer.get("groups", 1), *rest[1:]]
        t = torch.randn(lead, *rest, dtype=dtype, generator=generator)
        parts = torch.view_as_real(t) if t.is_complex() else t
        shift = 0.125 * 0.5 ** torch.arange(lead, dtype=torch.float64) if lead == 4 else torch.tensor([0.125])
        parts.copy_((parts * 4).round() / 4 + shift.view(-1, *[1] * (parts.dim() - 1)))
        drawn.append(t)
    return tuple(drawn)


def cast(t: Tensor, real: torch.dtype) -> Tensor:
    """The same numbers in the dtype of a model; integers as they are."""
    if t.is_complex():
        return t.to(torch.complex128 if real == torch.float64 else torch.complex64)
    return t.to(real) if t.is_floating_point() else t

"""Layers by their specification, how each is called, and the same layers in plain torch, as twins."""

from typing import Any

import torch
from torch import Tensor, nn

import stiefelkit as sk

BATCH, STEPS = 5, 4


class Bare(nn.Module):
    """A batch of matrices that are read as they are."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


class Loop(nn.Module):
    """The recurrence h = act(U x + W h + b) as a loop over plain parameters."""

    def __init__(self, m: int, n: int, bias: bool, activation: str, is_complex: bool, suffix: str, dtype: torch.dtype):
        super().__init__()
        self.activation, self.is_complex, self.suffix = activation, is_complex, suffix
        self.register_parameter(f"weight_ih{suffix}", _empty((1 + is_complex) * n, m, dtype=dtype))
        field = field_of({"complex": is_complex}, dtype)
        self.register_parameter(f"weight_hh{suffix}", _empty(n, n, dtype=field))
        inside = activation == "modrelu"
        size = n if inside else (1 + is_complex) * n
        self.register_parameter(f"bias{suffix}", _empty(size, dtype=dtype) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        u, w, b = (getattr(self, f"{name}{self.suffix}") for name in ("weight_ih", "weight_hh", "bias"))
        inside = self.activation == "modrelu"
        if self.is_complex:
            u = torch.complex(*u.to(w.real.dtype).chunk(2))
            b = b if inside or b is None else torch.complex(*b.to(w.real.dtype).chunk(2))
        h, states = torch.zeros(x.shape[1], w.shape[0], dtype=w.dtype), []
        for step in x.to(w.dtype):
            z = step @ u.mT + h @ w.mT + (0 if inside or b is None else b)
            if self.activation == "tanh":
                z = z.tanh()
            elif inside:
                sign = torch.sgn(z) if self.is_complex else torch.sgn(z.detach())
                z = sign * torch.relu(z.abs() + (0 if b is None else b))
            h = z
            states.append(h)
        return torch.stack(states)


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def is_own(layer: dict[str, Any]) -> bool:
    """Whether a layer is a recurrence of ours, which takes real inputs and casts its complex weight along."""
    return layer["kind"] in ("own_rnn", "own_cell")


def weight_name(kind: str) -> str:
    """The name of the weight that becomes orthogonal."""
    names = {"attention": "in_proj_weight", "own_rnn": "weight_hh_l0", "rnn": "weight_hh_l0"}
    return "weight_hh" if kind.endswith("_cell") else names.get(kind, "weight")


def field_of(layer: dict[str, Any], real: torch.dtype) -> torch.dtype:
    """The dtype of the weight that becomes orthogonal: complex64 at least, if complex."""
    if not layer["complex"]:
        return real
    return torch.complex128 if real == torch.float64 else torch.complex64


def plain(layer: dict[str, Any], real: torch.dtype) -> nn.Module:
    """Makes a layer of torch, or a twin of one of ours, without orthogonal weights.

    Args:
        layer: its specification.
        real: the dtype of its real tensors.
    """
    (a, b), kind, bias = layer["sizes"], layer["kind"], layer["bias"]
    field = field_of(layer, real)
    if kind in ("linear", "own_linear"):
        return nn.Linear(a, b, bias, dtype=field)
    if kind in ("embedding", "bag"):
        return (nn.Embedding if kind == "embedding" else nn.EmbeddingBag)(a, b, dtype=real)
    if kind in ("conv1d", "conv2d", "transposed1d", "transposed2d"):
        names = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "transposed1d": nn.ConvTranspose1d}
        groups = layer["groups"]
        return names.get(kind, nn.ConvTranspose2d)(a * groups, b * groups, 2, bias=bias, groups=groups, dtype=real)
    if kind == "attention":
        return nn.MultiheadAttention(a, 1, bias=bias, dtype=real)
    if kind == "bilinear":
        return nn.Bilinear(a, 2, b, bias, dtype=field)
    if kind == "bare":
        return Bare(torch.randn(2, b, a, dtype=field))
    if kind == "rnn":
        return nn.RNN(a, b, dtype=real)
    if kind in ("own_rnn", "own_cell"):
        suffix = "_l0" if kind == "own_rnn" else ""
        return Loop(a, b, bias, layer["activation"], layer["complex"], suffix, real)
    return {"rnn_cell": nn.RNNCell, "lstm_cell": nn.LSTMCell, "gru_cell": nn.GRUCell}[kind](a, b, bias, dtype=real)


def made(layer: dict[str, Any], real: torch.dtype, seed: int | None = None) -> nn.Module:
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
    if kind in ("own_rnn", "own_cell"):
        cls = sk.nn.OrthogonalRNN if kind == "own_rnn" else sk.nn.OrthogonalRNNCell
        return cls(a, b, field="complex" if layer["complex"] else "real", activation=layer["activation"], **own)
    module = plain(layer, real)
    name = weight_name(kind)
    if layer["through_model"]:
        holder = nn.ModuleList([module])
        sk.orthogonal(holder, f"0.{name}", layer["map"], **options)
    else:
        sk.orthogonal(module, name, layer["map"], **options)
    return module


class Net(nn.Module):
    """Layers side by side, each with an input of its own."""

    def __init__(self, layers: list[nn.Module], kinds: list[str]):
        super().__init__()
        self.layers, self.kinds = nn.ModuleList(layers), kinds

    def forward(self, inputs: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [called(*args) for args in zip(self.kinds, self.layers, inputs, strict=True)]


def called(kind: str, layer: Any, x: tuple[Tensor, ...]) -> Tensor:
    """The output of one layer."""
    if kind == "attention":
        return layer(*x, *x, *x)[0]
    if isinstance(layer, Loop) and kind == "own_cell":
        return layer(x[0].unsqueeze(0))[0]
    out = layer(*x)
    return out[0] if isinstance(out, tuple) else out


def inputs_of(layer: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draws an input in float64, complex128 or integers."""
    a, kind = layer["sizes"][0], layer["kind"]
    field = torch.complex128 if layer["complex"] else torch.float64

    def normal(*shape: int, dtype: torch.dtype = field) -> Tensor:
        return _short(torch.randn(shape, dtype=dtype, generator=generator))

    if kind in ("embedding", "bag"):
        shape = (BATCH,) if kind == "embedding" else (BATCH, 3)
        return (torch.randint(a, shape, generator=generator),)
    if kind in ("conv1d", "conv2d", "transposed1d", "transposed2d"):
        return (normal(BATCH, a * layer["groups"], *(4,) * int(kind[-2])),)
    if kind in ("attention", "own_rnn", "rnn"):
        return (normal(STEPS, BATCH, a, dtype=torch.float64),)
    if kind == "own_cell":
        return (normal(BATCH, a, dtype=torch.float64),)
    if kind == "bilinear":
        return normal(BATCH, a), normal(BATCH, 2)
    return (normal(BATCH, a),)


def _short(t: Tensor) -> Tensor:
    """Rounds to odd eighths, which every dtype holds, and which are not zero, where activations have a kink."""
    if t.is_complex():
        return torch.complex(_short(t.real), _short(t.imag))
    return (t * 4).round() / 4 + 0.125


def cast(t: Tensor, real: torch.dtype) -> Tensor:
    """The same numbers in the dtype of a model; integers as they are."""
    if t.is_complex():
        return t.to(torch.complex128 if real == torch.float64 else torch.complex64)
    return t.to(real) if t.is_floating_point() else t

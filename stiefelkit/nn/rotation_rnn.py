"""Recurrent layers with a linear transition, orthogonal or with decays, which run in parallel over time."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stiefelkit._torch import is_traced
from stiefelkit.contract.param import Parametrization
from stiefelkit.errors import DtypeError, NonFiniteError, NotAFrameError, OptionError, ShapeError, needs, shown
from stiefelkit.functional import product
from stiefelkit.functional._arithmetic.devices import float64_is_weak
from stiefelkit.metrics import frame_tolerance, orthogonality_error
from stiefelkit.nn.recurrent import Field, GRULayers, States, Steps, require_options, without_autocast
from stiefelkit.numbers import FLAG, above, as_python_number, at_least, integer
from stiefelkit.scan import ROTATION_BACKENDS, transition
from stiefelkit.scan.engines.planes import planes_of
from stiefelkit.scan.rotation import driven_last_state, find_rotation_backend, scan_planes
from stiefelkit.scan.transition import Transition, by_heads, plain_weights
from stiefelkit.tensors import computing_dtype, coordinate_dtype, working_dtype
from stiefelkit.weights.change import assign_
from stiefelkit.weights.find import coordinate_list_of, orthogonal_weights


class Stream(NamedTuple):
    """State of `step`: the last states of all layers, in double precision, and what else each keeps for the next."""

    states: list[Tensor]
    kept: list[Any]


class LinearRecurrence(GRULayers):
    """Layers with a linear transition, which run in parallel over time, and a step at a time."""

    _activation: ClassVar[str | None] = "identity"
    _refused: ClassVar[dict[str, str]] = dict.fromkeys(
        ("activation", "nonlinearity"),
        "its transition is linear; apply one to its output, as sk.nn.RotationBlock and ReflectorBlock do",
    )
    _state: tuple[int, ...]
    """Shape of a state of a stream, without the batch."""

    def step(self, x: Tensor, state: Stream | Tensor | None = None) -> tuple[Tensor, Stream]:
        """Runs one step of all layers, as the next one of sequences that come one step at a time.

        A `RotationRNN` works its weights out when a stream begins and keeps them in its state, so that later steps only
        turn planes, and take no notice of weights that change meanwhile. States of a stream are float64, so that
        roundings do not add up over steps; it is differentiable.

        Args:
            x: inputs of the step (B, m).
            state: what the last step returned; first states (layers, B, n), as `hx`; or None for the layer's own.

        Returns:
            The states of the top layer (B, n), in the layer's dtype, and the state for the next step.
        """
        who, got = f"{self._name}.step", "a bidirectional one" if self.bidirectional else "dropout in training"
        is_one = not (self.bidirectional or (self.dropout and self.training))
        needs(is_one, OptionError, who, "a layer of one direction", got)
        is_state = state is None or isinstance(state, Stream | Tensor)
        needs(is_state, OptionError, who, "the state of its last step, first states or None", state)
        is_rows = isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == self.input_size
        got = tuple(x.shape) if isinstance(x, Tensor) else x
        needs(is_rows, ShapeError, who, f"an input of shape (B, {self.input_size})", got)
        if x.dtype != (dtype := self._dtypes()[int(self.is_complex)]):
            self._check_input(x)
        if not isinstance(state, Stream):
            if state is not None:
                self._check_input(state, "an hx")
            self._check_state(state, len(x))
            firsts = [None] * self.num_layers if state is None else state
            begun = [self._begun(suffix, h, x) for suffix, h in zip(self._suffixes, firsts, strict=True)]
            state = Stream([h for h, _ in begun], [kept for _, kept in begun])
        is_own = [tuple(h.shape) for h in state.states] == [(len(x), *self._state)] * self.num_layers
        needs(is_own, ShapeError, who, "a state of its own layers and batch", "another one")
        after = Stream([], [])
        for suffix, h, kept in zip(self._suffixes, *state, strict=True):
            x, h, kept = self._stepped(suffix, x, h, kept)
            x = x.to(dtype)
            after.states.append(h)
            after.kept.append(kept)
        return x, after

    @abstractmethod
    def _begun(self, suffix: str, h0: Tensor | None, x: Tensor) -> tuple[Tensor, Any]:
        """Returns the first state of a layer, for the first input of a stream, and what else is kept."""

    @abstractmethod
    def _stepped(self, suffix: str, x: Tensor, h: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        """Returns what a layer gives for an input, its next state, and what else is kept."""


def decay_range(who: str, decay: object, has_ends: bool = False) -> tuple[float, float]:
    """Returns a range of decays between 0 and 1 as Python's numbers; raises OptionError for what is none."""
    given = [as_python_number(g) for g in decay] if isinstance(decay, list | tuple | Tensor) else []
    low, high = given if len(given) == 2 and all(isinstance(g, int | float) for g in given) else (1.0, 0.0)
    words = f"decay as numbers {'0 <= low <= high <= 1, of which high is not 0' if has_ends else '0 < low <= high < 1'}"
    is_range = 0 <= low <= high <= 1 and high > 0 and (has_ends or 0 < low <= high < 1)
    needs(is_range, OptionError, who, words, shown(decay))
    return float(low), float(high)


class RotationRNN(LinearRecurrence):
    r"""Multi-layer linear RNN :math:`h_t = g W h_{t-1} + s U x_t + b` with an orthogonal W, in parallel over time.

    :math:`W = P R(θ) P^T` is kept as its real Schur form: rotations of planes in a basis P, an orthogonal matrix of
    any parametrization. With field="complex" :math:`W = P diag(e^{i θ}) P^H` is unitary. In the basis P time is a
    scan of complex numbers (`stiefelkit.scan.rotation_scan`), so that a layer takes one product with P for all steps
    instead of one with W for each. There is no activation between steps: put one between layers, as `RotationBlock`
    does. With `last_only` the top layer works out no other state: one product over time gives the last. A basis without
    a map, as `stiefelkit.bake` leaves it, is not trained, for it is inverted by its adjoint.

    States are divided among heads, each with its own basis and decay :math:`g = exp(-exp(q))`, q `log_rate`. With
    `normalize` inputs are scaled by :math:`s = √{1 - g^2} / ‖U‖_F` of each head, which keeps the expected size of
    states constant for inputs of independent entries of variance 1.

    Parameters: `weight_ih_l0` (U), `basis_l0` (P, of shape (heads, n / heads, n / heads)), `angle_l0` (θ, n / 2; n if
    complex), `log_rate_l0` (heads), `bias_l0`, and `_reverse` for the second direction. `weight_hh_l0` reads W. Shapes
    and other arguments are those of `OrthogonalRNN`.

    Args:
        input_size: width m of the input.
        hidden_size: width n of the state, an even multiple of `heads` if real.
        num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as in `OrthogonalRNN`.
        parametrization: of P, a registered name or a class; None for :math:`P = I`, where layers before and after mix
            planes.
        field: "real" or "complex".
        heads: how many parts of the state have a basis and a decay of their own.
        decay: the range that each head's g is drawn from, log-uniformly in :math:`-log g`; None for :math:`g = 1`, W
            alone.
        max_angle: angles are drawn from U(0, max_angle), in radians.
        normalize: whether inputs are scaled by s; not without decay.
        trainable_h0, backend: as in `OrthogonalRNN`, the backend one of `stiefelkit.scan.rotation_scan`.
        **options: options of the parametrization, and `init=`.

    References:
        Biegun, Dolga, Cunningham, Barber, RotRNN: modelling long sequences with rotations, 2024.

    >>> rnn = RotationRNN(3, 8, heads=2)
    >>> out, h_n = rnn(torch.randn(5, 2, 3))
    >>> out.shape, h_n.shape
    (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))
    """

    frame: ClassVar[str] = "basis"
    coordinate_parameters: ClassVar[tuple[str, ...]] = ("angle", "log_rate", "basis")
    has_logarithms: ClassVar[bool] = False
    """True if angles are kept as logarithms and scales of inputs are trained."""
    _turns: ClassVar[str] = "angle"
    _refused: ClassVar[dict[str, str]] = {
        **LinearRecurrence._refused,
        "factored": "its W is in factors always",
        "gain": "its basis is inverted by its adjoint",
    }
    backends: ClassVar[tuple[str, ...]] = ROTATION_BACKENDS

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *args: Any,
        parametrization: Parametrization | None = "cayley",
        field: Field = "real",
        heads: int = 1,
        decay: tuple[float, float] | None = (0.9, 0.999),
        max_angle: float = 2 * math.pi,
        normalize: bool = True,
        **options: Any,
    ):
        require_options(type(self), parametrization, options)
        name = self._name
        n = integer(1).require(name, "hidden_size", hidden_size)
        heads = integer(1).require(name, "heads", heads)
        step = heads * (2 if field == "real" else 1)
        needs(n % step == 0, OptionError, name, f"a hidden_size that is a multiple of {step}", f"{n}, heads={heads}")
        self.heads, self._state = heads, (n * heads // step,)
        has_none = decay is None and not self.has_logarithms
        self.decay = None if has_none else decay_range(name, decay, self.has_logarithms)
        self.max_angle = at_least(0).require(name, "max_angle", max_angle)
        self.normalize = FLAG.require(name, "normalize", normalize)
        super().__init__(input_size, n, *args, parametrization=parametrization, field=field, **options)

    def __getattr__(self, name: str) -> Any:
        """Reads W, of shape (n, n), for `weight_hh` with the suffix of a layer and direction."""
        suffix = name.removeprefix("weight_hh")
        if suffix != name and suffix in self._suffixes:
            return self._transition(suffix)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        """Refuses W, which would be kept beside the parameters that it is read from."""
        if name.startswith("weight_hh"):
            parts = ", ".join([*([] if self.parametrization is None else ["basis"]), *self._counts()])
            raise OptionError(f"{type(self).__name__} needs {name} set by its parts ({parts}), got {shown(value)}.")
        super().__setattr__(name, value)

    @property
    def _frame_shape(self) -> tuple[int, ...]:
        size = self.hidden_size // self.heads
        return self.heads, size, size

    @property
    def _frame_dtype(self) -> torch.dtype:
        return coordinate_dtype(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotationRNN":
        """Leaves the basis in float32 or better, for states go into it and out of it at every step of a stream."""
        super()._apply(fn, recurse)
        for weight in orthogonal_weights(self) if recurse else ():
            if weight.name.startswith(self.frame) and weight.coordinate_list.param.dtype.itemsize == 2:
                weight.coordinate_list.float()
        return self

    def _add_frame(self, suffix: str, device: torch.device | str | None, options: dict[str, Any]) -> None:
        if self.parametrization is not None:
            super()._add_frame(suffix, device, options)
            self._check_basis(f"{self.frame}{suffix}")
        elif options:
            raise OptionError(f"{self._name} without a parametrization has no basis to draw, got {', '.join(options)}.")
        for name, count in self._counts().items():
            empty = torch.empty(count, device=device, dtype=coordinate_dtype(self.dtype))
            self.register_parameter(f"{name}{suffix}", nn.Parameter(empty))
        self._draw(suffix)

    def _basis(self, suffix: str) -> Tensor:
        """Returns P, whose inverse is its adjoint: a frame of a map, or a plain one, which gets no gradient."""
        name = f"{self.frame}{suffix}"
        if name in self._parameters:
            return self.get_parameter(name).detach()
        self._check_basis(name)
        return self._read(self.frame, suffix)

    def _check_basis(self, name: str) -> None:
        held = coordinate_list_of(self, name)
        is_frame = held is None or held.param.traits.exact or held.param.precision != "exact"
        got = "" if held is None else held.param.title
        needs(is_frame, OptionError, self._name, "a basis whose weights are frames", got)

    def _counts(self) -> dict[str, int]:
        """Returns the names of the parameters of the planes, and their sizes."""
        return {"angle": self._state[0]} | ({} if self.decay is None else {"log_rate": self.heads})

    @torch.no_grad()
    def _draw(self, suffix: str) -> None:
        self._read("angle", suffix).uniform_(0, self.max_angle)
        if self.decay is not None:
            slow, fast = (math.log(-math.log(g)) for g in reversed(self.decay))
            self._read("log_rate", suffix).uniform_(slow, fast)

    @torch.no_grad()
    def _reset(self, suffix: str) -> None:
        super()._reset(suffix)
        self._draw(suffix)

    def _transition(self, suffix: str) -> Tensor:
        _, angle, _ = plain_weights(self._parts(suffix))
        if self.is_complex:
            w = torch.diag(torch.polar(torch.ones_like(angle), angle))
        else:
            c, s = angle.cos(), angle.sin()
            w = torch.block_diag(*torch.stack([c, -s, s, c], -1).view(-1, 2, 2))
        if self.parametrization is not None:
            p = torch.block_diag(*self._basis(suffix)).to(w.dtype)
            w = p @ w @ p.mH
        return w.to(self._dtypes()[int(self.is_complex)])

    def _parts(self, suffix: str) -> Transition:
        """Returns what a layer and direction computes with, each weight read once; complex U and b are joined."""
        u = self._join(self._read("weight_ih", suffix))
        return Transition(
            u.to(computing_dtype(u.dtype)),
            self._read(self._turns, suffix),
            self._join(self._read("bias", suffix)) if self.has_bias else None,
            None if self.parametrization is None else self._basis(suffix).to(computing_dtype(u.dtype)),
            None if self.decay is None else self._read("log_rate", suffix),
            self._read("log_scale", suffix) if self.has_logarithms else None,
            self.heads,
            self.normalize,
            self.has_logarithms,
        )

    def _factors(self, weights: Transition) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns U with its bias as a last row, angles and decays, in the basis; and ways into it and out of it."""
        rows, angle, g = plain_weights(weights)
        if (basis := weights.basis) is None:
            return rows, angle, g, None, None
        return by_heads(rows, basis.conj()), angle, g, basis.conj(), basis.mT

    def _run(self, suffix: str, x: Tensor, h0: Tensor | None, batch: int, **steps: Unpack[Steps]) -> States:
        with without_autocast(x.device):
            weights = self._parts(suffix)
            x = x.to(weights.u.dtype)
            settings: Any = weights[6:]

            def plain(x: Tensor, *tensors: Any) -> States:
                return self._by_operators(suffix, x, Transition(*tensors, *settings), h0, batch, **steps)

            is_whole = h0 is None and not self.trainable_h0 and not steps["last_only"] and steps["batch_sizes"] is None
            if is_whole and find_rotation_backend(self.backend, x) == "triton" and transition.takes(x, weights):
                out, last = transition.run(x, weights, steps["reverse"], plain)
            else:
                out, last = plain(x, *weights[:6])
            return None if out is None else out.to(self._dtypes()[int(self.is_complex)]), last

    def _by_operators(
        self, suffix: str, x: Tensor, weights: Transition, h0: Tensor | None, batch: int, **steps: Unpack[Steps]
    ) -> States:
        rows, angle, g, inward, outward = self._factors(weights)
        if self.has_bias:
            # An input that is 1 meets the bias: no other pass over the states, nor over their gradient.
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        first = by_heads(self._first(suffix, h0, batch, rows), inward)
        # A comparison of sizes would make them constants in traced code.
        is_free = self.backend == "auto" and steps["batch_sizes"] is None and not is_traced()
        is_free = is_free and not float64_is_weak(x.device)
        if is_free and steps["last_only"] and len(x) >= x.shape[-1]:
            return None, by_heads(driven_last_state(x, rows, angle, g, first, steps["reverse"]), outward)
        out, last = scan_planes(product(x, rows), angle, g, first, rows.real.dtype, backend=self.backend, **steps)
        return None if out is None else by_heads(out, outward), by_heads(last, outward)

    def _begun(self, suffix: str, h0: Tensor | None, x: Tensor) -> tuple[Tensor, Any]:
        rows, angle, g, inward, outward = self._factors(self._parts(suffix))
        first = self._first(suffix, h0, len(x), rows)
        factor, m = g * torch.polar(torch.ones_like(angle), angle), len(rows) - self.has_bias
        weights = rows[:m], rows[m:] if self.has_bias else None, factor, outward
        return planes_of(by_heads(first, inward)).to(factor.dtype), weights

    def _stepped(self, suffix: str, x: Tensor, h: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        rows, bias, factor, outward = kept
        if rows.shape != (x.shape[1], self.hidden_size) or rows.is_complex() != self.is_complex:
            raise ShapeError(f"{self._name}.step needs a state of its own layers, got one of another layer.")
        driven = product(x.to(rows.dtype), rows)
        driven = planes_of(driven if bias is None else driven + bias)
        planes = torch.addcmul(driven.to(factor.dtype), factor, h)
        y = planes.to(driven.dtype)
        return by_heads(y if self.is_complex else torch.view_as_real(y).flatten(-2), outward), planes, kept

    @classmethod
    def from_orthogonal(
        cls, w: Tensor, u: Tensor, bias: Tensor | None = None, *, decay: float | None = None, **options: Any
    ) -> Self:
        """Returns the layer of one recurrence :math:`h_t = g W h_{t-1} + U x_t + b` that was trained elsewhere.

        W is taken apart into its real Schur form, or, if it is complex, into its eigenvalues and their vectors.

        Args:
            w: W, orthogonal with det W = 1, for planes turn and none is reflected (n, n), or unitary.
            u: U (n, m), of the dtype of W.
            bias: b (n,), none if left out.
            decay: g below 1, or None for 1.
            **options: others of the layer, as `parametrization=`, which has to reach the basis.

        >>> w = torch.linalg.matrix_exp(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        >>> torch.allclose(RotationRNN.from_orthogonal(w, torch.eye(2)).weight_hh_l0, w)
        True
        """
        from scipy.linalg import schur

        values, who = {"weight_ih": u} | ({} if bias is None else {"bias": bias}), f"{cls.__name__}.from_orthogonal"
        cls._check_values(who, w=w, **values)
        n = w.shape[-1] if w.dim() else 0
        is_square = w.shape == (n, n) and u.dim() == 2
        needs(is_square, ShapeError, who, "a square W and a matrix U", f"{tuple(w.shape)} and {tuple(u.shape)}")
        error, permitted = orthogonality_error(w).item(), frame_tolerance(n, w.dtype)
        wanted = f"an orthogonal W, within {permitted:.2g}"
        needs(error <= permitted, NotAFrameError, who, wanted, f"one {error:.2g} off")
        kind = "complex" if w.is_complex() else "real"
        t, p = map(torch.from_numpy, schur(w.detach().cpu().to(working_dtype(w.dtype)).numpy(), output=kind))
        if w.is_complex():
            angle = t.diagonal().angle()
        else:
            starts = [i for i in range(n - 1) if t[i + 1, i] != 0]
            single = [i for i in range(n) if i not in starts and i - 1 not in starts]
            single.sort(key=lambda i: t[i, i].item())
            is_even = n % 2 == 0 and sum(t[i, i].item() < 0 for i in single) % 2 == 0
            got = "another W; w.to(torch.complex64) makes it unitary"
            needs(is_even, OptionError, who, "an even n and det W = 1", got)
            p = p[:, [*(j for i in starts for j in (i, i + 1)), *single]]
            turns = [math.atan2(t[i + 1, i], t[i, i]) for i in starts]
            angle = t.new_tensor(turns + [0.0 if t[i, i] > 0 else math.pi for i in single[::2]])
            if torch.linalg.det(p) < 0:  # a plane from behind turns the other way: maps of rotations alone reach it so
                p[:, :2], angle[0] = p[:, [1, 0]].clone(), -angle[0]
        for value in values.values():
            needs(value.dtype == w.dtype, DtypeError, who, f"U and b of {w.dtype}, as W is", value.dtype)
        given = {"decay": None if decay is None else (decay, decay), "normalize": False, "bias": bias is not None}
        given |= {"field": kind, "device": w.device, "dtype": w.real.dtype}
        rnn = cls(u.shape[1], n, **given, **options)
        assign_(rnn, "basis_l0", p[None].to(w))
        rnn._take_(who, angle=angle, **values)
        return rnn

    @staticmethod
    def _check_values(who: str, **values: Tensor) -> None:
        for name, value in values.items():
            is_fit = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
            needs(is_fit and not value.is_meta, DtypeError, who, f"floating-point numbers in a tensor {name}", value)

    @torch.no_grad()
    def _take_(self, who: str, **values: Tensor) -> None:
        """Copies values into parameters of the only layer, whose shapes they have to have, complex ones by parts."""
        is_one = self.num_layers == 1 and not self.bidirectional
        needs(is_one, OptionError, who, "one layer of one direction", f"{self.num_layers} layers")
        for name, value in values.items():
            own, t = self._read(name, "_l0"), torch.cat([value.real, value.imag]) if value.is_complex() else value
            needs(t.shape == own.shape, ShapeError, who, f"{name} of shape {tuple(own.shape)}", tuple(t.shape))
            own.copy_(t)
            needs(bool(own.isfinite().all()), NonFiniteError, who, f"finite {name} in {own.dtype}", "others")


class RotationBlock(nn.Module):
    r"""A residual block around a `RotationRNN`: x + GLU(GELU(C h + D x')), with x' = norm(x) and h the states of x'.

    Blocks of this kind between a linear layer in front and one behind make a sequence model whose time is linear in the
    number of steps, and parallel over them.

    Args:
        width: features of the input and the output.
        hidden_size: width of the state.
        dropout: probability with which outputs of GELU and of the gate are zeroed in training.
        device, dtype: of the parameters.
        **options: those of `layer`, as `heads=`, `parametrization=`, `field=`, `decay=`.

    Shape:
        (B, T, width), or a PackedSequence, to the same, and the last states (1, B, hidden_size).

    >>> block = RotationBlock(4, 8, heads=2)
    >>> block(torch.randn(2, 5, 4))[0].shape
    torch.Size([2, 5, 4])
    """

    layer: ClassVar[type[GRULayers]] = RotationRNN
    """The class of the recurrence."""

    def __init__(
        self,
        width: int,
        hidden_size: int,
        *,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        self.norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.rnn = self.layer(width, hidden_size, batch_first=True, device=device, dtype=dtype, **options)
        states = self.rnn.hidden_size * (1 + self.rnn.is_complex) * (1 + self.rnn.bidirectional)
        self.output = nn.Linear(states, width, bias=False, device=device, dtype=dtype)
        self.skip = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.gate = nn.Linear(width, 2 * width, device=device, dtype=dtype)
        self.dropout = at_least(0, most=1).require(type(self).__name__, "dropout", dropout)

    def forward(self, x: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        """Returns the outputs, and the last states, which a further call takes as `hx` to go on from there."""
        packed = x if isinstance(x, PackedSequence) else None
        rows: Tensor = x.data if isinstance(x, PackedSequence) else x
        inner = self.norm(rows)
        states, last = self.rnn(inner if packed is None else packed._replace(data=inner), hx)
        states = states if packed is None else states.data
        if states.is_complex():
            states = torch.view_as_real(states).flatten(-2)
        y = F.gelu(self.output(states.to(inner.dtype)) + self.skip * inner)
        y = F.glu(self.gate(F.dropout(y, self.dropout, self.training)))
        y = rows + F.dropout(y, self.dropout, self.training)
        return (y if packed is None else packed._replace(data=y)), last


class LRU(RotationRNN):
    r"""Multi-layer linear RNN :math:`z_t = l z_{t-1} + s B x_t` with a complex l for each plane; l and s are trained.

    A `RotationRNN` with a head for each plane and no basis, whose scale of inputs s is trained instead of worked out.
    :math:`l = exp(-exp(q) + i exp(θ))`, where q is `log_rate`, θ `log_angle`, and s the exp of `log_scale`. At the
    start l is uniform in a ring, :math:`s = √{1 - |l|^2}`, and B normal with variance :math:`1 / 2m` in its real and in
    its imaginary part. States are real, two numbers a plane: :math:`Re z_0, Im z_0, Re z_1, ...`

    Parameters: `log_rate_l0`, `log_angle_l0`, `log_scale_l0` (n / 2 each), `weight_ih_l0` (n, m) with the rows
    :math:`Re B_0, Im B_0, Re B_1, ...`, with `bias` `bias_l0` (n), and `_reverse` for the second direction.
    `weight_hh_l0` reads the rotation without the moduli.

    Args:
        input_size: width m of the input.
        hidden_size: width n of the state, even: n / 2 complex numbers.
        num_layers, batch_first, dropout, bidirectional, device, dtype: as in `OrthogonalRNN`.
        bias: whether b is added to the inputs, zero at the start; the paper has none.
        decay: smallest and largest modulus of l at the start, :math:`r_{min}` and :math:`r_{max}` there.
        max_angle: largest angle of l at the start, in radians.
        trainable_h0, backend: as in `RotationRNN`.
        **options: others of `RotationRNN`, which are refused with the reason.

    References:
        Orvieto, Smith, Gu, Fernando, Gulcehre, Pascanu, De, Resurrecting recurrent neural networks for long sequences,
        ICML 2023.

    >>> out, h_n = LRU(3, 8)(torch.randn(5, 2, 3))
    >>> out.shape, h_n.shape
    (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))
    """

    coordinate_parameters: ClassVar[tuple[str, ...]] = ("log_rate", "log_angle", "log_scale")
    has_logarithms: ClassVar[bool] = True
    _turns: ClassVar[str] = "log_angle"
    _refused: ClassVar[dict[str, str]] = {
        **RotationRNN._refused,
        "heads": "each plane has a decay and an angle of its own",
        "parametrization": "its planes have no basis; sk.nn.RotationRNN has one",
        "field": "its states are complex numbers already, each as two real ones",
        "normalize": "it trains the scale of its inputs",
    }

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = False,
        *args: Any,
        decay: tuple[float, float] = (0.9, 0.999),
        max_angle: float = 2 * math.pi,
        **options: Any,
    ):
        require_options(type(self), None, options)
        hidden_size = integer(1).require(self._name, "hidden_size", hidden_size)
        needs(hidden_size % 2 == 0, OptionError, self._name, "an even hidden_size, two numbers a plane", hidden_size)
        max_angle = above(0).require(self._name, "max_angle", max_angle)
        planes = {"parametrization": None, "heads": hidden_size // 2, "decay": decay, "max_angle": max_angle}
        super().__init__(input_size, hidden_size, num_layers, bias, *args, **planes, **options)

    @classmethod
    def from_parameters(cls, nu_log: Tensor, theta_log: Tensor, gamma_log: Tensor, b: Tensor, **options: Any) -> Self:
        """Returns the layer of one recurrence that was trained elsewhere, with the names of the paper's parameters.

        Args:
            nu_log: ν of :math:`l = exp(-exp(ν) + i exp(θ))`, one for each plane.
            theta_log: θ.
            gamma_log: logarithms of the scales of inputs.
            b: the complex B, (planes, m).
            **options: others of the layer, as `batch_first=`.

        >>> nu, theta, gamma = torch.full((3, 4), -1.0)
        >>> LRU.from_parameters(nu, theta, gamma, torch.randn(4, 2, dtype=torch.complex64)).hidden_size
        8
        """
        who = f"{cls.__name__}.from_parameters"
        cls._check_values(who, nu_log=nu_log, theta_log=theta_log, gamma_log=gamma_log, b=b)
        needs(b.is_complex() and b.dim() == 2, DtypeError, who, "a complex B", b.dtype)
        rnn = cls(b.shape[1], 2 * nu_log.numel(), device=b.device, dtype=b.real.dtype, **options)
        rows = torch.stack([b.real, b.imag], 1).flatten(0, 1)
        rnn._take_(who, log_rate=nu_log, log_angle=theta_log, log_scale=gamma_log, weight_ih=rows)
        return rnn

    def _counts(self) -> dict[str, int]:
        return dict.fromkeys(self.coordinate_parameters, self.heads)

    @torch.no_grad()
    def _draw(self, suffix: str) -> None:
        rate, angle, scale = (self._read(name, suffix) for name in self._counts())
        assert self.decay is not None
        low, high = self.decay
        # In (0, 1], in float64: no logarithm of zero.
        u, v = (1 - torch.rand(2, self.heads, dtype=torch.float64, device=rate.device)).unbind(0)
        log_modulus = (torch.log(u * (high**2 - low**2) + low**2) / 2).clamp_max(-(2.0**-53))
        rate.copy_(torch.log(-log_modulus))
        angle.copy_(torch.log(self.max_angle * v))
        scale.copy_(torch.log(-torch.expm1(2 * log_modulus)) / 2)
        inputs = self._read("weight_ih", suffix)
        inputs.normal_(0, (2 * inputs.shape[1]) ** -0.5)


class LRUBlock(RotationBlock):
    """A `RotationBlock` around an `LRU`, with Re C and Im C normal of variance 2 / n and D standard normal.

    Options are `dropout`, `device` and `dtype`, as in `RotationBlock`, and those of `LRU`.

    >>> LRUBlock(4, 8)(torch.randn(2, 5, 4))[0].shape
    torch.Size([2, 5, 4])
    """

    layer: ClassVar[type[GRULayers]] = LRU

    def __init__(self, width: int, hidden_size: int, **options: Any):
        super().__init__(width, hidden_size, **options)
        nn.init.normal_(self.output.weight, std=(2 / self.rnn.hidden_size) ** 0.5)
        nn.init.normal_(self.skip)

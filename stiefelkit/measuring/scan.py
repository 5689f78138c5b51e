"""The race of the scan, backend by backend, beside other recurrences, and the sequences that they get."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.contract.param import load_chart_
from stiefelkit.contract.table import find_parametrization
from stiefelkit.errors import OptionError
from stiefelkit.machine import threads
from stiefelkit.measuring.clock import Run, peak_bytes
from stiefelkit.measuring.contest import NO_TIME, Contest, ProgressCallback, Race, Row, Schedule, quiet, seeded
from stiefelkit.measuring.plans import FACTORS, ScanCase, ScanRace, torch_dtype
from stiefelkit.nn.rotation_rnn import LRU, RotationRNN
from stiefelkit.scan import BACKENDS, Factored, find_activation, scan, scan_backend

LOOP = "eager_loop"  # the peer that peak memory is compared with


@dataclass
class Sequences:
    """One case with its tensors, the same for all of equal width.

    Drawn: x normal; W a Haar frame, or what the case's map draws, then also in factors, `factored`; U Glorot-uniform;
    modReLU's bias U(-0.01, 0) for real states, as trained nets have it, and U(-0.01, 0.01), which is slower, for
    complex ones; other biases U(-0.01, 0.01); gradients normal with E |g|^2 = 1/n. h_0 is zero. x and h_0 want no
    gradient. The dtype is float32 or float64; complex states are of the complex dtype that goes with it.
    """

    case: ScanCase
    activation: str = "modrelu"
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    def __post_init__(self) -> None:
        case = self.case
        n, parts = case.n, 1 + case.is_complex
        self.state_dtype = self.dtype.to_complex() if case.is_complex else self.dtype
        self._source = torch.Generator().manual_seed(self.seed)
        self._gradients: dict[tuple[int, torch.dtype], Tensor] = {}

        def uniform(*shape: int, low: float, high: float) -> Tensor:
            return torch.rand(*shape, dtype=torch.float64, generator=self._source) * (high - low) + low

        def of_states(drawn: Tensor) -> Tensor:
            return (torch.complex(*drawn.chunk(2)) if case.is_complex else drawn).to(self.device, self.state_dtype)

        self.factored: Factored | None = None
        if case.map:
            frame = self._drawn_in_factors()
        else:
            frame = init.haar((n, n), torch.complex128 if case.is_complex else torch.float64, self._source)
        self.w = frame.to(self.device, self.state_dtype)
        bound = (6 / (parts * n + case.m)) ** 0.5
        self.u = of_states(uniform(parts * n, case.m, low=-bound, high=bound))
        self.bias_inside = find_activation(self.activation, case.is_complex).bias_inside
        if self.bias_inside:
            self.bias = uniform(n, low=-0.01, high=0.01 if case.is_complex else 0.0).to(self.device, self.dtype)
        else:
            self.bias = of_states(uniform(parts * n, low=-0.01, high=0.01))
        self.x = self._normal(case.T, case.B, case.m, dtype=self.dtype)
        self.h0 = torch.zeros(case.B, n, dtype=self.state_dtype, device=self.device)

    def gradient(self, width: int, dtype: torch.dtype) -> Tensor:
        """Returns dL/dh at every step for states of some width, (T, B, width); the same tensor each time."""
        key = (width, dtype)
        if key not in self._gradients:
            self._gradients[key] = self._normal(self.case.T, self.case.B, width, dtype=dtype) * width**-0.5
        return self._gradients[key]

    def _drawn_in_factors(self) -> Tensor:
        case = self.case
        param = find_parametrization(case.map)((case.n, case.n), dtype=self.state_dtype, **case.map_options)
        coordinates, chart = param.initial(param.schemes[0], self._source)
        load_chart_(param, chart)
        coordinates = [c.to(self.dtype) for c in coordinates]
        structure = param.structure
        assert structure is not None
        factors: Tensor = param.factors(*coordinates)  # type: ignore[operator]
        self.factored = Factored(structure, factors.to(self.device, self.state_dtype))
        return param(*coordinates)

    def _normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=self._source).to(self.device)


@dataclass(frozen=True)
class SequenceEntry:
    """An implementation that is ready to run."""

    width: int
    dtype: torch.dtype
    parameters: Sequence[Tensor]
    sequence: Callable[[], Tensor]
    last_state: Callable[[], Tensor]


Enter = Callable[[Sequences], SequenceEntry]
"""Gets ready; raises a `StiefelkitError` that says what it needs, if it cannot do the case."""


def backward(entry: SequenceEntry, drawn: Sequences, loss: str) -> Run:
    """Returns forward and backward: a dense dL/dh at every step ("sequence"), or dL/dh_T alone ("last_state")."""
    g = drawn.gradient(entry.width, entry.dtype)
    if loss == "sequence":
        return lambda: torch.autograd.grad(entry.sequence(), entry.parameters, g)
    last = g[-1].clone()
    return lambda: torch.autograd.grad(entry.last_state(), entry.parameters, last)


def limit(drawn: Sequences) -> Run:
    """Returns what no scan can do without: T products (B, n) x (n, n) forward, T backward, one (n, TB) x (TB, n)."""
    case = drawn.case
    n, steps = case.n * (1 + case.is_complex), 2 * case.T
    source = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=drawn.dtype, generator=source).to(drawn.device)

    h, w, z = normal(case.B, n), normal(n, n) * n**-0.5, normal(case.B, n)
    states, deltas, dw = normal(case.T * case.B, n), normal(case.T * case.B, n), normal(n, n)

    def run() -> None:
        z.zero_()
        for _ in range(steps):
            z.addmm_(h, w)
        torch.mm(deltas.mT, states, out=dw)

    return torch.no_grad()(run)


def ours(backends: Iterable[str]) -> dict[str, Enter]:
    """Returns backend to `scan` with it."""
    return {backend: partial(_scan, backend) for backend in backends}


def picked_backend(drawn: Sequences) -> str:
    """Returns the backend that "auto" picks for the case."""
    return scan_backend(drawn.w, activation=drawn.activation)


def fast_backends(drawn: Sequences) -> list[str]:
    """Returns the backends that can do the case, but for the reference, which is slow by intention."""
    able = []
    for backend in BACKENDS:
        with contextlib.suppress(OptionError):
            chosen = scan_backend(drawn.w, activation=drawn.activation, backend=backend)
            able += [backend] if backend == chosen != "reference" else []
    return able + [FACTORS] * (drawn.factored is not None)


def _leaves(drawn: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    w, u, b = (tensor.clone().requires_grad_() for tensor in (drawn.w, drawn.u, drawn.bias))
    return w, u, b


def _scan(backend: str, drawn: Sequences) -> SequenceEntry:
    w, u, b = _leaves(drawn)
    matrix: Tensor | Factored = w
    if backend == FACTORS:
        if drawn.factored is None:
            raise OptionError(f"a case with a map, as E, F and G are, got {drawn.case.name}.")
        backend, w = "inplace", drawn.factored.factors.clone().requires_grad_()
        matrix = Factored(drawn.factored.structure, w)

    bias: dict[str, Any] = {"activation_bias" if drawn.bias_inside else "bias": b}

    def run(last_only: bool) -> Tensor:
        options: dict[str, Any] = {"activation": drawn.activation, "last_only": last_only, "backend": backend}
        return cast(Tensor, scan(drawn.x, matrix, drawn.h0, u=u, **bias, **options)[last_only])

    return SequenceEntry(drawn.case.n, w.dtype, [w, u, b], lambda: run(False), lambda: run(True))


def _plain_modrelu(z: Tensor, b: Tensor | None) -> Tensor:
    """Computes modReLU as it is commonly written; ours spares autograd the derivative of the sign."""
    assert b is not None
    return torch.sgn(z) * torch.relu(z.abs() + b)


def _eager_loop(drawn: Sequences) -> SequenceEntry:
    """Enters the cell as a user writes it, step by step, with autograd."""
    w, u, b = _leaves(drawn)
    activation = _plain_modrelu if drawn.activation == "modrelu" else find_activation(drawn.activation, w.is_complex())
    before, within = (None, b) if drawn.bias_inside else (b, None)

    def states() -> list[Tensor]:
        h, past = drawn.h0, []
        for x in drawn.x.to(w.dtype):
            h = activation(F.linear(x, u, before) + F.linear(h, w), within)
            past.append(h)
        return past

    return SequenceEntry(drawn.case.n, w.dtype, [w, u, b], lambda: torch.stack(states()), lambda: states()[-1])


def _module(
    make: Callable[..., nn.Module], drawn: Sequences, units: int | None = None, **options: Any
) -> SequenceEntry:
    """Enters a layer with its own initial weights, of as many units as a state has real numbers."""
    width = units or drawn.case.n * (1 + drawn.case.is_complex)
    layer = make(drawn.case.m, width, device=drawn.device, dtype=drawn.dtype, **options)

    of_last = {"last_only": True} if isinstance(layer, RotationRNN) else {}

    def last_state() -> Tensor:
        _, last = layer(drawn.x, **of_last)
        return (last[0] if isinstance(last, tuple) else last)[-1]

    return SequenceEntry(width, drawn.dtype, list(layer.parameters()), lambda: layer(drawn.x)[0], last_state)


def _torch_lstm_matched(drawn: Sequences) -> SequenceEntry:
    if drawn.case.matched is None:
        raise OptionError(f"the papers match no LSTM with case {drawn.case.name}.")
    return _module(nn.LSTM, drawn, drawn.case.matched)


recurrence_peers: dict[str, Enter] = {
    LOOP: _eager_loop,
    "rotation_rnn": partial(_module, RotationRNN),
    "lru": partial(_module, LRU),
    "torch_rnn": lambda case: _module(nn.RNN, case, nonlinearity="relu" if case.activation == "relu" else "tanh"),
    "torch_gru": partial(_module, nn.GRU),
    "torch_lstm": partial(_module, nn.LSTM),
    "torch_lstm_matched": _torch_lstm_matched,
}
"""Name to what gets ready, of those of others."""
LOSSES = ("sequence", "last_state")


def drawn(plan: ScanRace, case: ScanCase) -> Sequences:
    """Returns the tensors of a case."""
    return Sequences(case, plan.activation, torch_dtype(plan.dtype), torch.device(plan.device), plan.seed)


def races(plan: ScanRace, watch: ProgressCallback = quiet, schedule: Schedule | None = None) -> Iterator[Race]:
    """Races case by case, and yields each race when it is over: ours before peers, and the fastest first."""
    schedule = schedule or Schedule.of(plan)
    with threads(plan.threads):
        for case, part in schedule.shared(plan.cases):
            if schedule.is_over:
                yield Race(str(case), "forward_backward", [], {"all": NO_TIME})
            else:
                yield _race(plan, drawn(plan, case), Contest(str(case), recurrence_peers, watch, {}, part))


def _entrants(plan: ScanRace, sequences: Sequences) -> dict[str, tuple[Enter, str]]:
    """Returns name in the table to what gets ready, and the loss: the first backend and factors have both losses."""
    entrants = {}
    backends = plan.backends or fast_backends(sequences)
    for number, (backend, enter) in enumerate(ours(backends).items()):
        entrants[f"scan ({backend})"] = enter, LOSSES[0]
        if number == 0 or backend == FACTORS:
            entrants[f"scan ({backend}), last state"] = enter, LOSSES[1]
    peers = plan.named_peers or (recurrence_peers if plan.peers else ())
    return entrants | {name: (recurrence_peers[name], LOSSES[0]) for name in peers}


def _race(plan: ScanRace, sequences: Sequences, contest: Contest) -> Race:
    case, entrants = sequences.case, _entrants(plan, sequences)
    enters = {name: enter for name, (enter, _) in entrants.items()}
    losses = {name: loss for name, (_, loss) in entrants.items()}
    with seeded(plan.seed):
        entries = contest.attempt("preparing", entrants, lambda name: enters[name](sequences))

    def peaks(name: str) -> dict[str, int]:
        return {f"memory_{loss}": memory_of(sequences, enters[name], loss) for loss in LOSSES}

    runs = {name: backward(entry, sequences, losses[name]) for name, entry in entries.items()}
    unit, timings = contest.timed(plan, limit(sequences), contest.tried(runs), "forward and backward")
    seconds = {name: timing.median for name, timing in timings.items()}
    # our scan: with the backend that "auto" picks or, if that does not race, the fastest
    picked = f"scan ({picked_backend(sequences)})"
    whole = [name for name in seconds if name not in contest.peers and losses[name] == LOSSES[0]]
    yardstick = seconds.get(picked, min((seconds[name] for name in whole), default=None))
    rows = []
    for name in sorted(seconds, key=lambda name: (name in contest.peers, seconds[name])):
        memory: dict[str, int | None] = dict.fromkeys((f"memory_{loss}" for loss in LOSSES), None)
        if plan.memory and losses[name] == LOSSES[0]:
            memory |= contest.attempt("memory of", [name], peaks).get(name, {})
        figures = {
            **{"operation": losses[name], "case": case.name, "contender": name, "T": case.T},
            **{"n": entries[name].width, "B": case.B, "m": case.m, "is_complex": entries[name].dtype.is_complex},
            **{"activation": plan.activation, "dtype": plan.dtype, "device": plan.device},
            **{**timings[name].figures, "limit_units": seconds[name] / unit},
            "time_over_ours": None if yardstick is None else seconds[name] / yardstick,
            **memory,
        }
        rows.append(Row(figures, is_peer=name in contest.peers))
    return Race(contest.subject, "forward_backward", rows, contest.left_out, unit)


def memory_of(sequences: Sequences, enter: Enter, loss: str) -> int:
    """Returns the most bytes that one forward and backward holds beside what was there before."""
    run = backward(enter(sequences), sequences, loss)
    run()
    return peak_bytes(run, sequences.device)

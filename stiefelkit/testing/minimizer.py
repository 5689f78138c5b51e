"""The laws of an optimizer of deterministic losses, ours or another's."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.errors import CheckpointError, NonFiniteError, NotAFrameError, OptimizerError, OptionError
from stiefelkit.metrics import working_dtype
from stiefelkit.optim.base.rounding import PROMISED
from stiefelkit.optim.deterministic.minimizer import Minimizer
from stiefelkit.optim.groups import parameter_groups
from stiefelkit.testing import seeds
from stiefelkit.testing.failure import checks_of, laws_of, named, settle
from stiefelkit.testing.optimizer_cases import SteppedCase, equal, error_and_bound, require_states_refused, snapshot
from stiefelkit.testing.require import require, require_refused, require_within, saved_and_loaded
from stiefelkit.weights import attach, change
from stiefelkit.weights.optimizer_hooks import MANIFOLDS

_DTYPES = (torch.float64, torch.complex128, torch.float32)
_OF_EVERY_EXAMPLE = ("convergence", "descent", "frames", "resume")
"""Laws that depend on settings; the others run on the first example only."""
_SHAPES = ((6, 2), (4, 4), (2, 5, 3))
_SAME = {torch.float32: 1e-4, torch.float64: 1e-10}
"""What two ways to one minimum may differ by in the loss, relative to it."""


@dataclass(frozen=True)
class MinimizerCase(SteppedCase):
    """One minimizer with settings, and the dtype of the frames that it moves."""

    shapes = _SHAPES

    def make(self, groups: Any, **settings: Any) -> Any:
        """Makes the minimizer, with these settings before those of the case."""
        return self.cls(groups, **{**dict(self.options), **settings})


class _Brockett:
    """sum of Re tr(W^H A W N) over frames, and |b - 1|^2 of a free vector, whose only minima are global.

    N is diag(1, ..., p), the eigenvalues of A are -n/3, 1 - n/3, ...: at the least value the lowest is taken p times.
    """

    def __init__(self, case: MinimizerCase, shapes: Iterable[tuple[int, ...]] = _SHAPES):
        wide = working_dtype(case.dtype)
        self.least, self.frames, self._a = 0.0, [], []
        for i, shape in enumerate(shapes):
            n, p = shape[-2:]
            basis = init.haar((*shape[:-2], n, n), wide, seeds.generator(100 + i))
            eigenvalues = torch.arange(n, dtype=wide.to_real()) - n / 3
            self.least += (eigenvalues[:p].flip(-1) * self._weights(p)).sum().item() * math.prod(shape[:-2])
            self._a.append(((basis * eigenvalues) @ basis.mH).to(case.dtype))
            self.frames.append(nn.Parameter(init.haar(shape, wide, seeds.generator(i)).to(case.dtype)))
        self.free = nn.Parameter(torch.zeros(3, dtype=case.dtype.to_real()))
        self.everything = [*self.frames, self.free]

    def groups(self) -> list[dict[str, Any]]:
        """Returns a group of frames of either manifold, and one of the free vector."""
        first = {"params": self.frames[:1], "manifold": MANIFOLDS[0]}
        others = [{"params": self.frames[1:], "manifold": MANIFOLDS[1]}] if self.frames[1:] else []
        return [first, *others, {"params": [self.free]}]

    def __call__(self) -> Tensor:
        loss = (self.free - 1).square().sum()
        for w, a in zip(self.frames, self._a, strict=True):
            loss = loss + (w.conj() * (a @ w) * self._weights(w.shape[-1])).sum().real
        return loss

    @staticmethod
    def _weights(p: int) -> Tensor:
        return torch.arange(1, p + 1)


def _differentiated(problem: _Brockett, **options: Any) -> Callable[[], Tensor]:
    """Returns the closure as torch.optim.LBFGS has it."""

    def closure() -> Tensor:
        for p in problem.everything:
            p.grad = None
        loss = problem()
        loss.backward(**options)
        return loss

    return closure


def law_convergence(case: MinimizerCase) -> None:
    """From anywhere to the least value, at a gradient of the length that is asked for, or that rounding permits."""
    problem = _Brockett(case)
    optimizer = case.make(problem.groups(), max_iter=2000)
    returned = optimizer.step(problem)
    progress = optimizer.progress
    require(isinstance(returned, Tensor) and progress is not None, "a step returns no loss, or leaves no progress")
    assert progress is not None
    off, permitted = progress.loss - problem.least, _SAME[case.dtype.to_real()] * abs(problem.least)
    length = progress.gradient_norm
    require(progress.is_done, f"2000 iterations do not end, at a gradient of {length:.3g}", length, permitted)
    require_within(off, permitted, "above the least value by")
    if case.dtype == working_dtype(case.dtype):
        require_within(progress.gradient_norm, 1e-9, "the gradient ends at a length of")


def law_kinks(case: MinimizerCase) -> None:
    """Where a loss has kinks, a step does not claim to be done, and ends at the least loss that it saw."""
    a = torch.randn(30, 6, dtype=case.dtype, generator=seeds.generator(7))
    w = nn.Parameter(init.haar((6, 3), working_dtype(case.dtype), seeds.generator(8)).to(case.dtype))
    optimizer, seen = case.make([{"params": [w], "manifold": MANIFOLDS[0]}], max_iter=60), []

    def closure() -> Tensor:
        seen.append((loss := (a @ w).real.abs().sum()).item())
        return loss

    optimizer.step(closure)
    progress: Any = optimizer.progress
    require(not progress.is_done, f"it claims to be done at a gradient of {progress.gradient_norm:.3g}")
    above, noise = closure().item() - min(seen), 100 * torch.finfo(case.dtype).eps * min(seen)
    require_within(above, noise, "above the least loss that it saw by")


def law_descent(case: MinimizerCase) -> None:
    """No iteration raises the loss by more than rounding."""
    problem = _Brockett(case)
    optimizer = case.make(problem.groups(), max_iter=1)
    before, noise = problem().item(), 100 * torch.finfo(case.dtype).eps * abs(problem.least)
    for _ in range(30):
        optimizer.step(problem)
        after = problem().item()
        require(after <= before + noise, f"an iteration raises the loss by {after - before:.3g}", after - before, noise)
        before = after
    require(before < 0.5 * problem.least, "thirty iterations come not even half the way", before)


def law_frames(case: MinimizerCase) -> None:
    """Whenever the closure is asked, and at the end, frames are frames, within 20 limits of rounding, plus eps."""
    problem = _Brockett(case)
    optimizer = case.make(problem.groups(), max_iter=40)

    def closure() -> Tensor:
        for w in problem.frames:
            require_within(*error_and_bound(w, PROMISED["float64"]), "||W^H W - I||_F =")
        return problem()

    optimizer.step(closure)
    closure()


def law_resume(case: MinimizerCase) -> None:
    """A state dict that went through a file, loaded with weights_only=True, goes on to the same bits."""

    def start(steps: int) -> tuple[_Brockett, Minimizer]:
        problem = _Brockett(case)
        optimizer = case.make(problem.groups(), max_iter=3)
        for _ in range(steps):
            optimizer.step(problem)
        return problem, optimizer

    (problem, optimizer), (other, fresh) = start(2), start(1)
    state, values = saved_and_loaded([optimizer.state_dict(), [p.detach() for p in problem.everything]])
    for p, value in zip(other.everything, values, strict=True):
        p.data.copy_(value)
    fresh.load_state_dict(state)
    for _ in range(2):
        optimizer.step(problem)
        fresh.step(other)
    require(equal(snapshot(optimizer), snapshot(fresh)), "what was loaded does not go on to the same bits")


def law_checkpoint(case: MinimizerCase) -> None:
    """A state dict that is not such as the minimizer makes is refused, and changes nothing."""
    problem = _Brockett(case)
    optimizer = case.make(problem.groups(), max_iter=3)
    optimizer.step(problem)
    good = copy.deepcopy(optimizer.state_dict())
    spoilt: list[tuple[str, Any, Callable[[Any], Any]]] = [
        ("a group of another manifold", CheckpointError, lambda d: d["param_groups"][0].update(manifold=MANIFOLDS[1])),
        ("a group too few", CheckpointError, lambda d: d["param_groups"].pop()),
        ("max_iter=0", OptionError, lambda d: d["param_groups"][0].update(max_iter=0)),
    ]
    for key, value in good["state"].get(0, {}).items():
        spoilt.append((f"{key} that is a word", CheckpointError, lambda d, key=key: d["state"][0].update({key: "no"})))
        if isinstance(value, Tensor):
            spoilt += [
                (f"{key} with NaN", NonFiniteError, lambda d, key=key: d["state"][0][key].fill_(math.nan)),
                (f"{key} too short", CheckpointError, lambda d, key=key: d["state"][0].update({key: torch.ones(2)})),
            ]
    require_states_refused(optimizer, good, spoilt)


def law_finite(case: MinimizerCase) -> None:
    """What is not finite at the start, or raises on the way, changes nothing; what is not finite further on is left."""
    problem = _Brockett(case)
    optimizer = case.make(problem.groups(), max_iter=4)
    optimizer.step(problem)
    before, calls = snapshot(optimizer), iter(range(100))

    def raising() -> Tensor:
        if next(calls) > 2:
            raise KeyError
        return problem()

    require_refused(NonFiniteError, lambda: optimizer.step(lambda: problem() * math.nan), "a loss of NaN")
    require(equal(snapshot(optimizer), before), "a loss of NaN leaves a step half done")
    require_refused(KeyError, lambda: optimizer.step(raising), "a closure that raises")
    require(equal(snapshot(optimizer), before), "a closure that raises leaves a step half done")
    start = [w.detach().clone() for w in problem.frames]

    def moved() -> float:
        return max(torch.dist(w, w0).item() for w, w0 in zip(problem.frames, start, strict=True))

    optimizer.step(lambda: problem() if moved() < 1e-2 else problem() * math.nan)
    require(moved() < 1.001e-2, "a step ends where the loss is not finite")


def law_closures(case: MinimizerCase) -> None:
    """Who differentiates, the closure or the step, does not matter; a step without a loss is refused."""
    ends = []
    for options in (None, {}, {"create_graph": True}):
        problem = _Brockett(case, _SHAPES[:1])
        optimizer = case.make(problem.groups(), max_iter=500)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward")  # that create_graph=True makes a cycle of references
            optimizer.step(problem if options is None else _differentiated(problem, **options))
        ends.append(problem().item())
        for p in problem.everything:
            p.grad = None
    permitted = _SAME[case.dtype.to_real()] * abs(ends[0])
    require_within(max(ends) - min(ends), permitted, "closures that differentiate end apart by")
    problem = _Brockett(case)
    optimizer = case.make(problem.groups())
    require_refused(OptimizerError, optimizer.step, "a step without a closure")
    require_refused(OptimizerError, lambda: optimizer.step(lambda: 1.0), "a closure that returns a number alone")


def law_field(case: MinimizerCase) -> None:
    """Complex frames go as the real ones do that stand for them, [[Re, -Im], [Im, Re]]."""
    if not case.dtype.is_complex or case.dtype != working_dtype(case.dtype):
        return

    def real(x: Tensor) -> Tensor:
        return torch.cat([torch.cat([x.real, -x.imag], -1), torch.cat([x.imag, x.real], -1)], -2)

    for manifold in MANIFOLDS:
        a = torch.randn(5, 5, dtype=case.dtype, generator=seeds.generator(1))
        a, weights = a + a.mH, torch.diag(torch.arange(1, 4)).to(case.dtype)
        w = nn.Parameter(init.haar((5, 3), case.dtype, seeds.generator(2)))
        twin, real_a, real_weights = nn.Parameter(real(w.detach())), real(a), real(weights)
        for frame, m, n in ((w, a, weights), (twin, real_a, real_weights)):
            optimizer = case.make([{"params": [frame], "manifold": manifold}], max_iter=4)
            optimizer.step(lambda w=frame, m=m, n=n: torch.trace(w.mH @ m @ w @ n).real)
        require_within(torch.dist(real(w.detach()), twin).item(), 1e-8, "real and complex frames go apart by")


def law_guard(case: MinimizerCase) -> None:
    """Frames of modules are in good hands, and what is none, or is taken for a free tensor, is refused."""
    require(getattr(case.cls, "moves_frames", False) is True, "the class lacks moves_frames = True")
    layer: Any = attach.orthogonal(nn.Linear(5, 4, dtype=case.dtype), "weight", "stiefel")
    x = torch.randn(7, 5, dtype=case.dtype, generator=seeds.generator(3))
    optimizer = case.make(parameter_groups(layer, lr=1.0))

    def closure() -> Tensor:
        return layer(x).abs().square().sum() + layer.weight.real.pow(4).sum()

    before = closure().item()
    optimizer.step(closure)
    require(closure().item() < before, "the frame of a module does not move")
    held = next(iter(change.coordinates(layer, "weight").values()))
    require_refused(OptimizerError, lambda: case.make([{"params": [held]}]), "a frame as a free tensor")
    wrong = {"params": [nn.Parameter(2 * held.detach())], "manifold": MANIFOLDS[0]}
    require_refused(NotAFrameError, lambda: case.make([wrong]), "what is no frame")


def law_settings(case: MinimizerCase) -> None:
    """Settings are what groups hold, the same in all, and are refused where they make no sense."""
    problem = _Brockett(case)
    for setting in case.cls.settings:
        require(setting.name in case.make(problem.groups()).param_groups[0], f"groups do not hold {setting.name}")
        nonsense: Any = {setting.name: object()}
        require_refused(OptionError, lambda bad=nonsense: case.make(problem.groups(), **bad), f"{setting.name}=object")
    groups = problem.groups()
    groups[1]["max_iter"] = 7
    require_refused(OptionError, lambda: case.make(groups), "a max_iter of its own for one group")
    require_refused(TypeError, lambda: case.make(problem.groups(), no_such_setting=1), "no_such_setting=1")


def law_invariance(case: MinimizerCase) -> None:
    """Where W and W Q have the same loss, whose curvatures lie 1e4 apart, it ends at the least, up to rounding."""
    n, p = 12, 4
    basis = init.haar((n, n), working_dtype(case.dtype), seeds.generator(5))
    values = torch.tensor([1e4, 300.0, 100.0, 30.0, 3.0, *[1.0] * (n - 5)], dtype=torch.float64)
    a = ((basis * values) @ basis.mH).to(case.dtype)
    w = nn.Parameter(init.haar((n, p), working_dtype(case.dtype), seeds.generator(6)).to(case.dtype))
    optimizer = case.make([{"params": [w], "manifold": MANIFOLDS[0]}], max_iter=3000)
    optimizer.step(lambda: -(w.conj() * (a @ w)).sum().real)
    progress: Any = optimizer.progress
    require(progress.is_done, f"it ends ({progress.stopped}) at a gradient of {progress.gradient_norm:.3g}")
    exact, end = (t.detach().to(working_dtype(case.dtype)) for t in (a, w))
    least = torch.linalg.eigvalsh(exact)[-p:].sum().item()
    gap = least - (end.conj() * (exact @ end)).sum().real.item()
    size = 2 * torch.linalg.vector_norm(values[:p]).item() * p**0.5
    require_within(gap, 8 * torch.finfo(case.dtype).eps * size, "above the least value by")


MINIMIZER_LAWS: dict[str, Callable[[MinimizerCase], None]] = named(laws_of(__name__))
"""Name to law. Each takes a case and raises `LawBroken`."""


def minimizer_cases(cls: type[Minimizer]) -> list[MinimizerCase]:
    """Returns the first example of a minimizer in every dtype, the others by turns real and complex.

    Args:
        cls: the minimizer.
    """
    return MinimizerCase.of_examples(cls, _DTYPES)


def check_minimizer(
    cls: type[Minimizer],
    laws: Iterable[str] = tuple(MINIMIZER_LAWS),
    only: str | None = None,
    offset: int | None = None,
) -> None:
    """Checks a minimizer, with the settings in its `examples`, against laws of `MINIMIZER_LAWS`.

    All else is as in `check_parametrization`: `only` is the name of a case such as "LBFGS-float64".

    Args:
        cls: the class.
        laws: names of laws, all by default.
        only: the name of a case.
        offset: shifts every seed; what `STIEFELKIT_SEED_OFFSET` says by default.

    Raises:
        LawBroken: lists every failure: the law, the case, figure and bound, seed, and a line that repeats it.
    """
    settle((check for _, check in minimizer_checks([cls], laws, only)), offset)


def minimizer_checks(
    classes: Iterable[type[Minimizer]], laws: Iterable[str] = tuple(MINIMIZER_LAWS), only: str | None = None
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields each law on each case of the classes, with a name; raises for a law or a case that there is not."""

    def is_due(law: str, case: MinimizerCase) -> bool:
        return law in _OF_EVERY_EXAMPLE or case.options == tuple(case.cls.examples[0].items())

    base = (Minimizer, "sk.optim.Minimizer")
    yield from checks_of("check_minimizer", base, minimizer_cases, classes, MINIMIZER_LAWS, laws, only, is_due)

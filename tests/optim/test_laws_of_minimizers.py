"""Every minimizer keeps the laws of minimizers, and each law catches a minimizer that breaks it."""

import contextlib
import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.errors import CheckpointError, NonFiniteError, NotAFrameError, OptimizerError, OptionError
from stiefelkit.metrics import working_dtype
from stiefelkit.optim import LBFGS, Check, ConjugateGradient, Minimizer, minimizers
from stiefelkit.optim.groups import parameter_groups
from stiefelkit.optim.steps import PROMISED
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import saved_and_loaded
from stiefelkit.testing.optimizer_cases import equal, error_and_bound, snapshot
from stiefelkit.weights import attach, change
from stiefelkit.weights.optimizer_hooks import MANIFOLDS

DTYPES = (torch.float64, torch.complex128, torch.float32)
OF_EVERY_EXAMPLE = ("convergence", "descent", "frames", "resume")
"""Laws that depend on settings; the others run on the first example only."""
SHAPES = ((6, 2), (4, 4), (2, 5, 3))
SAME = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Difference of two minima in the loss, relative to it."""


@dataclass(frozen=True)
class Case:
    """One minimizer with settings, and the dtype of the frames that it moves."""

    cls: type[Minimizer]
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, groups: Any, **settings: Any) -> Any:
        return self.cls(groups, **{**dict(self.options), **settings})

    def __str__(self) -> str:
        return "-".join([self.cls.__name__, str(self.dtype).removeprefix("torch."), *map(str, self.options)])


def cases(cls: type[Minimizer]) -> list[Case]:
    """The first example of a minimizer in every dtype, the others real and complex by turns."""
    return [
        Case(cls, dtype, tuple(options.items()))
        for i, options in enumerate(cls.examples)
        for dtype in (DTYPES[i % 2 : i % 2 + 1] if i else DTYPES)
    ]


class Brockett:
    """sum of Re tr(W^H A W N) over frames, and |b - 1|^2 of a free vector, whose only minima are global.

    N is diag(1, ..., p), the eigenvalues of A are -n/3, 1 - n/3, ...: at the least value the lowest is taken p times.
    """

    def __init__(self, case: Case, shapes: Iterable[tuple[int, ...]] = SHAPES):
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


def differentiated(problem: Brockett, **options: Any) -> Callable[[], Tensor]:
    """Returns the closure as torch.optim.LBFGS has it."""

    def closure() -> Tensor:
        for p in problem.everything:
            p.grad = None
        loss = problem()
        loss.backward(**options)
        return loss

    return closure


def law_convergence(case: Case) -> None:
    """A step from anywhere ends at the least value, at a gradient of the length that is asked for, or of rounding."""
    problem = Brockett(case)
    optimizer = case.make(problem.groups(), max_iter=2000)
    returned = optimizer.step(problem)
    progress = optimizer.progress
    assert isinstance(returned, Tensor)
    assert progress.is_done
    assert progress.loss - problem.least <= SAME[case.dtype.to_real()] * abs(problem.least)
    assert case.dtype == torch.float32 or progress.gradient_norm <= 1e-9


def law_kinks(case: Case) -> None:
    """Where a loss has kinks, a step does not claim to be done, and ends at the least loss that it saw."""
    a = torch.randn(30, 6, dtype=case.dtype, generator=seeds.generator(7))
    w = nn.Parameter(init.haar((6, 3), working_dtype(case.dtype), seeds.generator(8)).to(case.dtype))
    optimizer, seen = case.make([{"params": [w], "manifold": MANIFOLDS[0]}], max_iter=60), []

    def closure() -> Tensor:
        seen.append((loss := (a @ w).real.abs().sum()).item())
        return loss

    optimizer.step(closure)
    assert not optimizer.progress.is_done
    assert closure().item() - min(seen) <= 100 * torch.finfo(case.dtype).eps * min(seen)


def law_descent(case: Case) -> None:
    """No iteration raises the loss by more than rounding."""
    problem = Brockett(case)
    optimizer = case.make(problem.groups(), max_iter=1)
    before, noise = problem().item(), 100 * torch.finfo(case.dtype).eps * abs(problem.least)
    for _ in range(30):
        optimizer.step(problem)
        after = problem().item()
        assert after <= before + noise
        before = after
    assert before < 0.5 * problem.least


def law_frames(case: Case) -> None:
    """At each call of the closure, and at the end, frames are within 20 limits of rounding, plus eps."""
    problem = Brockett(case)
    optimizer = case.make(problem.groups(), max_iter=40)

    def closure() -> Tensor:
        for w in problem.frames:
            error, bound = error_and_bound(w, PROMISED["float64"])
            assert error <= bound
        return problem()

    optimizer.step(closure)
    closure()


def law_resume(case: Case) -> None:
    """A state dict that went through a file, loaded with weights_only=True, goes on to the same bits."""

    def start(steps: int) -> tuple[Brockett, Minimizer]:
        problem = Brockett(case)
        optimizer = case.make(problem.groups(), max_iter=3)
        for _ in range(steps):
            optimizer.step(problem)
        return problem, optimizer

    (problem, optimizer), (other, fresh) = start(2), start(1)
    state = saved_and_loaded(optimizer.state_dict())
    values = saved_and_loaded([p.detach() for p in problem.everything])
    for p, value in zip(other.everything, values, strict=True):
        p.data.copy_(value)
    fresh.load_state_dict(state)
    for _ in range(2):
        optimizer.step(problem)
        fresh.step(other)
    assert equal(snapshot(optimizer), snapshot(fresh))


def law_checkpoint(case: Case) -> None:
    """A state dict that is not such as the minimizer makes is refused, and changes nothing."""
    problem = Brockett(case)
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
    for what, error, spoil in spoilt:
        before, wrong = snapshot(optimizer), copy.deepcopy(good)
        groups = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups])
        spoil(wrong)
        with contextlib.suppress(error):
            optimizer.load_state_dict(wrong)
            raise AssertionError(f"a state dict with {what} is loaded")
        assert equal(snapshot(optimizer), before), what
        assert equal([{**group, "params": None} for group in optimizer.param_groups], groups), what


def law_finite(case: Case) -> None:
    """A step from NaN, or whose closure raises, changes nothing; one that meets NaN on its way stays before it."""
    problem = Brockett(case)
    optimizer = case.make(problem.groups(), max_iter=4)
    optimizer.step(problem)
    before, calls = snapshot(optimizer), iter(range(100))

    def raising() -> Tensor:
        if next(calls) > 2:
            raise KeyError
        return problem()

    for error, closure in ((NonFiniteError, lambda: problem() * math.nan), (KeyError, raising)):
        with pytest.raises(error):
            optimizer.step(closure)
        assert equal(snapshot(optimizer), before)
    start = [w.detach().clone() for w in problem.frames]

    def moved() -> float:
        return max(torch.dist(w, w0).item() for w, w0 in zip(problem.frames, start, strict=True))

    optimizer.step(lambda: problem() if moved() < 1e-2 else problem() * math.nan)
    assert moved() < 1.001e-2


def law_closures(case: Case) -> None:
    """A closure may call backward() or not; a step without a loss is refused."""
    ends = []
    for options in (None, {}, {"create_graph": True}):
        problem = Brockett(case, SHAPES[:1])
        optimizer = case.make(problem.groups(), max_iter=500)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward")  # that create_graph=True makes a cycle of references
            optimizer.step(problem if options is None else differentiated(problem, **options))
        ends.append(problem().item())
        for p in problem.everything:
            p.grad = None
    assert max(ends) - min(ends) <= SAME[case.dtype.to_real()] * abs(ends[0])
    optimizer = case.make(Brockett(case).groups())
    for without_loss in (None, lambda: 1.0):
        with pytest.raises(OptimizerError):
            optimizer.step(without_loss)


def law_field(case: Case) -> None:
    """Complex frames move like the real frames [[Re, -Im], [Im, Re]]."""
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
        assert torch.dist(real(w.detach()), twin) <= 1e-8


def law_guard(case: Case) -> None:
    """A minimizer accepts frames of modules, and refuses a frame as a free tensor and what is no frame."""
    assert case.cls.moves_frames
    layer: Any = attach.orthogonal(nn.Linear(5, 4, dtype=case.dtype), "weight", "stiefel")
    x = torch.randn(7, 5, dtype=case.dtype, generator=seeds.generator(3))
    optimizer = case.make(parameter_groups(layer, lr=1.0))

    def closure() -> Tensor:
        return layer(x).abs().square().sum() + layer.weight.real.pow(4).sum()

    before = closure().item()
    optimizer.step(closure)
    assert closure().item() < before
    held = next(iter(change.coordinates(layer, "weight").values()))
    with pytest.raises(OptimizerError):
        case.make([{"params": [held]}])
    with pytest.raises(NotAFrameError):
        case.make([{"params": [nn.Parameter(2 * held.detach())], "manifold": MANIFOLDS[0]}])


def law_settings(case: Case) -> None:
    """Groups hold every setting, the same in all, and nonsense is refused."""
    problem = Brockett(case)
    for setting in case.cls.settings:
        assert setting.name in case.make(problem.groups()).param_groups[0]
        with pytest.raises(OptionError):
            case.make(problem.groups(), **{setting.name: object()})
    groups = problem.groups()
    groups[1]["max_iter"] = 7
    with pytest.raises(OptionError):
        case.make(groups)
    with pytest.raises(TypeError):
        case.make(problem.groups(), no_such_setting=1)


def law_invariance(case: Case) -> None:
    """Where W and W Q have the same loss, whose curvatures lie 1e4 apart, it ends at the least, up to rounding."""
    n, p = 12, 4
    basis = init.haar((n, n), working_dtype(case.dtype), seeds.generator(5))
    values = torch.tensor([1e4, 300.0, 100.0, 30.0, 3.0, *[1.0] * (n - 5)], dtype=torch.float64)
    a = ((basis * values) @ basis.mH).to(case.dtype)
    w = nn.Parameter(init.haar((n, p), working_dtype(case.dtype), seeds.generator(6)).to(case.dtype))
    optimizer = case.make([{"params": [w], "manifold": MANIFOLDS[0]}], max_iter=3000)
    optimizer.step(lambda: -(w.conj() * (a @ w)).sum().real)
    assert optimizer.progress.is_done
    exact, end = (t.detach().to(working_dtype(case.dtype)) for t in (a, w))
    least = torch.linalg.eigvalsh(exact)[-p:].sum().item()
    gap = least - (end.conj() * (exact @ end)).sum().real.item()
    size = 2 * torch.linalg.vector_norm(values[:p]).item() * p**0.5
    assert gap <= 8 * torch.finfo(case.dtype).eps * size


LAWS = {name.removeprefix("law_"): law for name, law in vars().copy().items() if name.startswith("law_")}
CHECKS = [
    pytest.param(law, case, id=f"{law}-{case}")
    for cls in minimizers.available().values()
    for law in LAWS
    for case in cases(cls)
    if law in OF_EVERY_EXAMPLE or case.options == tuple(cls.examples[0].items())
]


@pytest.mark.parametrize(("law", "case"), CHECKS)
def test_every_minimizer_keeps_the_laws(law, case):
    LAWS[law](case)


class Slack(LBFGS):
    """Ends at a gradient a thousand times as long as it was asked for, and says that it is done."""

    def iterate(self, objective, here, memory):
        return None if here.norm < 1e-5 else super().iterate(objective, here, memory)


class Early(LBFGS):
    """Takes gradients for rounding that are not."""

    def iterate(self, objective, here, memory):
        return (
            None
            if here.norm < 1e-3 * here.floor / torch.finfo(torch.float64).eps ** 0.5
            else super().iterate(objective, here, memory)
        )


class Boasting(LBFGS):
    """Calls every end a minimum."""

    def step(self, closure=None):
        returned = super().step(closure)
        self.progress = dataclasses.replace(self.progress, is_done=True, stopped="rounding")
        return returned


class Leaping(ConjugateGradient):
    """Goes a fixed step, downhill or not."""

    def iterate(self, objective, here, memory):
        place = objective.space.path(here.points, -here.gradient)(1.0)
        return objective.on_manifold(objective.at(place.points))


class Leaving(LBFGS):
    """Asks a little beside the manifold."""

    def iterate(self, objective, here, memory):
        objective.at([w * (1 + 1e-9) for w in here.points])
        return super().iterate(objective, here, memory)


class Counting(LBFGS):
    """Warms up by a count that no state dict holds."""

    made = 0

    def iterate(self, objective, here, memory):
        self.made += 1
        memory = {} if self.made % 5 == 0 else memory
        return super().iterate(objective, here, memory)


class Trusting(LBFGS):
    """Loads what it is given."""

    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)


class Hasty(LBFGS):
    """Moves before it asks."""

    def step(self, closure=None):
        for p in self._params()[-1:]:
            p.data.add_(1e-3)
        return super().step(closure)


class Differentiating(LBFGS):
    """Wants the closure to call backward()."""

    def step(self, closure=None):
        return None if closure is None else super().step(closure)


class RealOnly(LBFGS):
    """Counts imaginary parts twice."""

    def iterate(self, objective, here, memory):
        if any(w.is_complex() for w in here.points):
            here = dataclasses.replace(
                here, gradient=here.gradient * torch.tensor([1.0, 2.0]).repeat(here.gradient.numel() // 2)
            )
        return super().iterate(objective, here, memory)


class Undeclared(LBFGS):
    moves_frames = False


class Unchecked(LBFGS):
    settings = tuple(
        dataclasses.replace(each, check=Check("", lambda value: True)) if each.name == "curvature" else each
        for each in LBFGS.settings
    )


SABOTEURS = [
    (Slack, "convergence"),
    (Early, "invariance"),
    (Boasting, "kinks"),
    (Leaping, "descent"),
    (Leaving, "frames"),
    (Counting, "resume"),
    (Trusting, "checkpoint"),
    (Hasty, "finite"),
    (Differentiating, "closures"),
    (RealOnly, "field"),
    (Undeclared, "guard"),
    (Unchecked, "settings"),
]


@pytest.mark.parametrize(("saboteur", "law"), SABOTEURS)
def test_the_law_catches_its_saboteur(saboteur, law):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        LAWS[law](Case(saboteur, torch.complex128 if law == "field" else torch.float64))


def test_every_law_has_a_saboteur():
    assert {law for _, law in SABOTEURS} == set(LAWS)

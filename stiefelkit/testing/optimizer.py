"""The laws of an optimizer that moves frames, ours or another's."""

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from stiefelkit import init
from stiefelkit.errors import (
    CheckpointError,
    NonFiniteError,
    NotAFrameError,
    OptimizerError,
    OptionError,
    ShapeError,
    StiefelkitError,
)
from stiefelkit.functional import product
from stiefelkit.functional._arithmetic.devices import without_reads
from stiefelkit.metrics import frame_tolerance, orthogonality_error, working_dtype
from stiefelkit.optim.groups import frames, parameter_groups
from stiefelkit.optim.steps import PROMISED
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import saved_and_loaded
from stiefelkit.testing.lowered import lowered_products
from stiefelkit.testing.optimizer_cases import (
    RATE,
    SAME,
    SHAPES,
    OptimizerCase,
    distance,
    equal,
    error_and_bound,
    give_gradients,
    mixed,
    optimizer_cases,
    snapshot,
    walk,
)
from stiefelkit.testing.portable import refusing_reads
from stiefelkit.testing.suite import Suite, laws_of, require, require_refused, require_within
from stiefelkit.weights import attach, change
from stiefelkit.weights.optimizer_hooks import MANIFOLDS

_EXPONENTS = {True: (-44, -38, -30, -22, -12, 0, 19, 30, 38), False: (-320, -300, -200, -160, 0, 150, 160, 300)}
"""Powers of 10 of gradients, of single precision and of double."""
_SMALL = ((6, 6), (7, 3), (2, 5, 4), (3, 1), (1, 1))
_FEW = ((6, 6), (2, 5, 3))  # a square frame and a batch of tall ones: modes take their time


def law_descent(case: OptimizerCase) -> None:
    """A step lowers a linear loss, or raises it with maximize=True, and six small ones do so by more."""
    for manifold in MANIFOLDS:
        for sign in (1, -1) if "maximize" in inspect.signature(case.cls).parameters else (1,):
            ws = case.frames(*SHAPES[:3])
            starts = [w.detach().clone() for w in ws]
            optimizer = case.on(ws, manifold, lr=RATE / 50, **({"maximize": True} if sign < 0 else {}))
            gone: list[float] = []
            for _ in range(6):
                give_gradients(ws, 0)
                optimizer.step()
                ways = ((_gradient_of(w).conj() * (w.detach() - w0)).sum() for w, w0 in zip(ws, starts, strict=True))
                gone.append(sign * sum(way.real.item() for way in ways))
            require(gone[0] < 0, f"the first step does not go downhill in {manifold}", gone[0], 0.0)
            require(gone[-1] < gone[0], f"six steps are no better than one in {manifold}")


def _gradient_of(w: Tensor) -> Tensor:
    assert w.grad is not None
    return w.grad


def law_frames(case: OptimizerCase) -> None:
    """Steps of any length keep ||W^H W - I||_F within what the precision promises, in rounding limits, plus eps."""
    is_double = case.is_wide
    promised = PROMISED["float64" if is_double else dict(case.options).get("precision", "exact")]
    for lr in (0.01, 1.0):
        ws = case.frames(*SHAPES, (24, 24), (60, 10))
        optimizer = case.on(ws, lr=lr)
        for number in range(24):
            walk(optimizer, ws, [number % 5], 3.0)
            for w in ws:
                require_within(*error_and_bound(w, promised), f"at lr={lr} ||W^H W - I||_F =")


def law_precision(case: OptimizerCase) -> None:
    """Single precision moves as double does, and lowered products and autocast change no bit."""
    if case.is_wide:
        return

    def walked(dtype: torch.dtype, lowered: bool = False) -> list[nn.Parameter]:
        ws = case.frames(*SHAPES, (32, 32), dtype=dtype)
        optimizer = case.on(ws)
        with lowered_products() if lowered else contextlib.nullcontext():
            with torch.autocast(torch.device(case.device).type, torch.bfloat16, enabled=lowered):
                walk(optimizer, ws, range(3))
        return ws

    plain = walked(case.dtype)
    off = distance(plain, walked(working_dtype(case.dtype)))
    require_within(off, 10 * SAME, "single precision ends from double by")
    same = all(map(torch.equal, plain, walked(case.dtype, lowered=True)))
    require(same, "lowered products or autocast change the step")


def law_batch(case: OptimizerCase) -> None:
    """Frames in one group, and those of a batch, move as each matrix alone."""
    together = case.frames(*SHAPES)
    alone = [[nn.Parameter(m.clone()) for m in w.detach().reshape(-1, *w.shape[-2:])] for w in together]
    optimizers = [case.on(together), *(case.on([m]) for matrices in alone for m in matrices)]
    for number in range(3):
        give_gradients(together, number)
        for w, matrices in zip(together, alone, strict=True):
            for m, g in zip(matrices, _gradient_of(w).reshape(-1, *w.shape[-2:]), strict=True):
                m.grad = g.clone()
        for optimizer in optimizers:
            optimizer.step()
    gathered = [torch.stack(tuple(matrices)).view_as(w) for w, matrices in zip(together, alone, strict=True)]
    require_within(distance(together, gathered), SAME, "a frame among others ends from where it goes alone by")


def law_resume(case: OptimizerCase) -> None:
    """A state dict that went through a file, loaded with weights_only=True, goes on to the same bits."""

    def advance(ws: list[nn.Parameter], optimizer: Optimizer, schedule: LRScheduler, steps: Iterable[int]) -> None:
        for step in steps:
            walk(optimizer, ws, [step])
            schedule.step()

    (ws, optimizer), (twins, fresh) = mixed(case), mixed(case)
    schedule, other = CosineAnnealingLR(optimizer, 20), CosineAnnealingLR(fresh, 20)
    advance(ws, optimizer, schedule, range(3))
    state, rates, values = saved_and_loaded((optimizer.state_dict(), schedule.state_dict(), [w.detach() for w in ws]))
    advance(twins, fresh, other, [7])  # so that there is something to replace
    for twin, value in zip(twins, values, strict=True):
        twin.data.copy_(value)
    fresh.load_state_dict(state)
    other.load_state_dict(rates)
    advance(ws, optimizer, schedule, range(3, 6))
    advance(twins, fresh, other, range(3, 6))
    require(equal(snapshot(optimizer), snapshot(fresh)), "what was loaded does not go on to the same bits")


def law_checkpoint(case: OptimizerCase) -> None:
    """A state dict that is not such as the optimizer makes is refused, and changes nothing."""
    ws, optimizer = mixed(case)
    walk(optimizer, ws, range(2))
    good = copy.deepcopy(optimizer.state_dict())
    spoilt: list[tuple[str, Any, Callable[[Any], Any]]] = [
        ("a group of another manifold", CheckpointError, lambda d: d["param_groups"][0].update(manifold=MANIFOLDS[1])),
        ("a group without its manifold", CheckpointError, lambda d: d["param_groups"][0].update(manifold=None)),
        ("a group too few", CheckpointError, lambda d: d["param_groups"].pop()),
        ("a negative rate", OptionError, lambda d: d["param_groups"][0].update(lr=-1.0)),
    ]
    for key, value in good["state"].get(0, {}).items():
        if isinstance(value, Tensor) and value.shape == ws[0].shape:
            spoilt.append((f"{key} with NaN", NonFiniteError, lambda d, key=key: d["state"][0][key].fill_(math.nan)))
            for what, wrong in (("of another shape", ws[1].data), ("that is no tensor", "none")):
                exchange = {key: wrong}
                spoilt.append((f"{key} {what}", CheckpointError, lambda d, new=exchange: d["state"][0].update(new)))

    def everything() -> list[object]:
        return [*snapshot(optimizer), [{**group, "params": None} for group in optimizer.param_groups]]

    before = copy.deepcopy(everything())
    for what, error, spoil in spoilt:
        wrong = copy.deepcopy(good)
        spoil(wrong)
        require_refused(error, functools.partial(optimizer.load_state_dict, wrong), f"a state dict with {what}")
        require(equal(everything(), before), f"a state dict with {what} is refused, but leaves something")


def law_finite(case: OptimizerCase) -> None:
    """NaN or infinity in one gradient is an error before anything is written: no frame, no state, no free parameter."""
    alone = case.frames((6, 6))
    for (ws, optimizer), places in ((mixed(case), (0, 2, 4)), ((alone, case.on(alone)), (0,))):
        walk(optimizer, ws, range(2))
        for place in places:
            for bad in (math.nan, math.inf):
                give_gradients(ws, 3)
                _gradient_of(ws[place]).view(-1)[1] = bad
                before = snapshot(optimizer)
                require_refused(NonFiniteError, optimizer.step, f"{bad} in a gradient")
                require(equal(snapshot(optimizer), before), f"{bad} in a gradient leaves a step half done")


def law_guard(case: OptimizerCase) -> None:
    """The optimizer accepts frames of modules, tracks loose frames, and refuses frames as free tensors."""
    require(getattr(case.cls, "moves_frames", False) is True, "the class lacks moves_frames = True")
    layer = attach.orthogonal(nn.Linear(5, 4, dtype=case.dtype, device=case.device), "weight", "stiefel")
    optimizer = case.make(parameter_groups(layer, lr=RATE))
    before = layer.weight.detach().clone()
    walk(optimizer, list(layer.parameters()), range(2))
    require(not torch.equal(layer.weight, before), "the frame of a module does not move")
    held = next(iter(change.coordinates(layer, "weight").values()))
    free = {"params": [nn.Parameter(torch.zeros(2, device=case.device))]}
    beside = [{"params": [held]}, *frames(case.frames((3, 3)))]
    require_refused(OptimizerError, lambda: case.make(beside), "a frame as a free tensor")
    loose = case.frames((4, 3))
    optimizer = case.make([free, {"params": loose, "manifold": MANIFOLDS[0]}])
    added = functools.partial(optimizer.add_param_group, {"params": [held]})
    require_refused(OptimizerError, added, "a frame added as a free tensor")
    loose[0].grad = torch.ones_like(loose[0])
    require_refused(OptimizerError, torch.optim.SGD(loose, lr=0.1).step, "a frame in the hands of torch.optim.SGD")
    (wide,) = case.frames((4, 3))
    require_refused(NotAFrameError, lambda: case.on([nn.Parameter(2 * wide.detach())]), "what is no frame")
    require_refused(ShapeError, lambda: case.on([nn.Parameter(wide.detach().mH)]), "a wide matrix")


def law_groups(case: OptimizerCase) -> None:
    """Each group moves by its own rate and manifold, free ones as torch moves them, and nothing without a gradient."""
    ws, optimizer = mixed(case)
    plain = getattr(case.cls, "free_optimizer", None)
    if plain is not None:
        known = inspect.signature(plain).parameters.keys() - {"params"}
        twin = nn.Parameter(ws[5].detach().clone())
        reference = plain([twin], **{key: value for key, value in optimizer.param_groups[2].items() if key in known})
        for number in range(3):
            give_gradients(ws, number)
            twin.grad = _gradient_of(ws[5]).clone()
            optimizer.step()
            reference.step()
        require(torch.equal(twin, ws[5]), f"free parameters do not go as {plain.__name__} moves them")
    optimizer.param_groups[1]["lr"] = 0.0  # as a schedule sets it
    before = [w.detach().clone() for w in ws]
    walk(optimizer, ws, [5])
    require(all(map(torch.equal, ws[3:5], before[3:5])), "a group with a rate of 0 moves")
    require(not torch.equal(ws[0], before[0]), "a group with a rate does not move")
    fresh = case.frames(*SHAPES)
    optimizer = case.on(fresh, lr=0.0)
    walk(optimizer, fresh, [0])
    require(equal(fresh, case.frames(*SHAPES)), "a rate of 0 moves frames at their first step")
    require(len(optimizer.state) == len(fresh), "a rate of 0 makes no states")
    loss, unmoved = torch.tensor(2.0), fresh[1].detach().clone()
    give_gradients(fresh, 1)
    fresh[1].grad = None
    closure = Mock(return_value=loss)
    is_returned = case.on(fresh).step(closure) is loss
    require(is_returned and closure.call_count == 1, "a closure is not called once, or its loss not returned")
    require(torch.equal(fresh[1], unmoved), "a frame without a gradient moves")
    frame = case.frames((3, 3))
    require_refused(OptionError, lambda: case.on(frame, "stiefel:cannonical"), "an unknown manifold")
    decayed = [{"params": frame, "manifold": MANIFOLDS[0], "weight_decay": 0.1}]
    require_refused(OptionError, lambda: case.make(decayed), "weight decay of a frame")


def law_settings(case: OptimizerCase) -> None:
    """Settings are named in the signature and held by groups, and nonsense is refused."""
    names = [name for name in inspect.signature(case.cls).parameters if name != "params"]
    (group,) = case.on(case.frames((3, 3))).param_groups
    for name in names:
        require(name in group, f"groups do not hold {name}")
        nonsense = {"params": case.frames((3, 3)), "manifold": MANIFOLDS[0], name: object()}
        require_refused(OptionError, lambda group=nonsense: case.make([group]), f"an object for {name}")
    for lr in (-0.1, math.nan, math.inf):
        require_refused(OptionError, lambda lr=lr: case.on(case.frames((3, 3)), lr=lr), f"lr={lr}")
        ws = case.frames((3, 3))
        optimizer = case.on(ws)
        optimizer.param_groups[0]["lr"] = lr
        require_refused(OptionError, functools.partial(walk, optimizer, ws, [0]), f"lr={lr} set later")
        require(equal(ws, case.frames((3, 3))), f"lr={lr} set later is refused after a step")
    require_refused(TypeError, lambda: case.on(case.frames((3, 3)), no_such_setting=1), "no_such_setting=1")
    misspelt = {"params": case.frames((3, 3)), "manifold": MANIFOLDS[0], f"{names[-1]}s": group[names[-1]]}
    require_refused(OptionError, lambda: case.make([misspelt]), f"{names[-1]}s in a group")


def law_invariance(case: OptimizerCase) -> None:
    """Single precision ends where double does if W and W Q have the same loss, and part of a gradient is rounding.

    Principal components have such a loss; variances far apart are for steps that do not grow with the gradient. Of a
    square frame all of the gradient is rounding.
    """
    wide = working_dtype(case.dtype)
    if case.dtype == wide:
        return
    n, p, steps = 12, 4, 150
    basis = init.haar((n, n), wide, seeds.generator(5))

    def gap(dtype: torch.dtype, values: Tensor, manifold: str) -> float:
        a = ((basis * values) @ basis.mH).to(case.device, dtype)
        (w,) = case.frames((n, p), dtype=dtype)
        optimizer = case.on([w], manifold)
        schedule = CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            w.grad = product(-2 * a, w.detach())
            optimizer.step()
            schedule.step()
        exact, end = a.to(wide), torch.linalg.qr(w.detach().to(wide))[0]
        return torch.linalg.eigvalsh(exact)[-p:].sum().item() - (end.conj() * (exact @ end)).sum().real.item()

    def first_step(size: float) -> float:
        (w,), (start,) = case.frames((n, p), dtype=wide), case.frames((n, p), dtype=wide)
        give_gradients([w], 0, size)
        case.on([w]).step()
        return torch.dist(w, start).item()

    even = torch.tensor([1, 0.9, 0.8, 0.7, 0.1, *[0.05] * (n - 5)], dtype=torch.float64)
    steep = 1e5 * torch.tensor([1, 0.03, 0.01, 0.003, 3e-4, *[1e-4] * (n - 5)], dtype=torch.float64)
    is_normalised = first_step(1e5) < 10 * first_step(1.0)
    for values, manifold in [(even, MANIFOLDS[0]), *([(steep, m) for m in MANIFOLDS] if is_normalised else [])]:
        least, double = values[:p].sum().item(), gap(wide, values, manifold)
        if not double <= 0.01 * least:  # which tells nothing
            continue
        permitted = 2 * max(double, 0.0) + 16 * torch.finfo(case.dtype).eps * p**0.5 * least
        single = gap(case.dtype, values, manifold)
        what = f"in {manifold} double precision ends {double:.3g} above the least value, single"
        require_within(single, permitted, what)

    def moved(dtype: torch.dtype) -> float:
        a = ((basis * even) @ basis.mH).to(case.device, dtype)
        (w,), (start,) = case.frames((n, n), dtype=dtype), case.frames((n, n), dtype=dtype)
        optimizer = case.on([w])
        for _ in range(10):
            w.grad = product(a, w.detach())
            optimizer.step()
        return distance([w], [start])

    require_within(moved(case.dtype), 2 * moved(wide) + 0.01 * RATE, "rounding alone moves a square frame by")


def law_sizes(case: OptimizerCase) -> None:
    """After a gradient and a rate of any size a weight is a finite frame, or as it was, with a sentence or unread."""
    for number, (exponent, kind, lr) in enumerate(_draws(case.dtype)):
        shape = _SMALL[number % len(_SMALL)]
        for unread in (False, True):
            what = f"a {kind} gradient of 1e{exponent} of shape {shape} with lr={lr:.2g}{', unread,' if unread else ''}"
            (w,) = ws = case.frames(shape)
            optimizer = case.on(ws, lr=lr)
            for step in range(2):
                w.grad, before = _gradient(w, exponent, kind, step), snapshot(optimizer)
                try:
                    with without_reads() if unread else contextlib.nullcontext():
                        optimizer.step()
                except StiefelkitError as refusal:
                    require("\n" not in str(refusal), f"{what} is refused in more than a sentence: {refusal}")
                    require(torch.equal(w, before[0][0]), f"{what} is refused, but moves the frame")
                    break
                except Exception as error:
                    require(False, f"{what} ends in {type(error).__name__}: {error}")
                error = orthogonality_error(w).max().item()
                require_within(error, frame_tolerance(w.shape[-1], w.dtype), f"{what} leaves ||W^H W - I||_F =")
                finite = all(bool(torch.isfinite(value).all()) for value in _floats(optimizer, w).values())
                require(finite, f"{what} leaves a state that is not finite")


def _draws(dtype: torch.dtype) -> Iterator[tuple[int, str, float]]:
    """Yields sizes and kinds of gradients, and rates that make an ordinary step of them, a long one or none."""
    is_single = dtype != working_dtype(dtype)
    for exponent in _EXPONENTS[is_single]:
        ordinary = min(0.1 * 10.0**-exponent if exponent > -308 else math.inf, 1e300)
        for lr in (ordinary, 1e30 if is_single else 1e200, 1e-30, 1e300):
            for kind in ("random", "lone"):
                yield exponent, kind, lr
    yield from ((0, "zero", lr) for lr in (1e30, 1e300))


def _gradient(w: Tensor, exponent: int, kind: str, seed: int) -> Tensor:
    """Returns a gradient whose largest entry has a size: one of many, or the only one of that size."""
    g = torch.randn(w.shape, dtype=working_dtype(w.dtype), generator=seeds.generator(seed))
    g = g / g.abs().max() * (1e-3 if kind == "lone" else 10.0**exponent if kind == "random" else 0.0)
    if kind == "lone":
        g[..., -1, 0] = 10.0**exponent
    return g.to(w.device, w.dtype)


def law_reads(case: OptimizerCase) -> None:
    """Steps read values on the CPU alone, write in place, keep frames, and differ from those on it by 1 % at most."""
    is_double = case.is_wide
    watched = case.frames(*_FEW)
    refused = case.on(watched)
    for number in range(0 if is_double else 3):  # single precision does all that double does, and more
        give_gradients(watched, number)
        with refusing_reads() if number else without_reads():  # constants are made at first use
            refused.step()
    shapes = (*SHAPES[:3], (24, 24))
    ws, twins, starts = case.frames(*shapes), case.frames(*shapes), case.frames(*shapes)
    optimizer, reading = case.on(ws), case.on(twins)
    promised = PROMISED["float64" if is_double else dict(case.options).get("precision", "exact")]
    places: list[list[int]] = []
    for number in range(3):
        with without_reads():
            walk(optimizer, ws, [number])
        walk(reading, twins, [number])
        states = (value for p in ws for value in optimizer.state[p].values())
        places.append([value.data_ptr() for value in states if isinstance(value, Tensor)])
        for w in ws:
            require_within(*error_and_bound(w, promised), "unread, ||W^H W - I||_F =")
    require(places[0] == places[-1], "a state is not written in place, as a graph requires")
    for w, twin, start in zip(ws, twins, starts, strict=True):
        off, way = torch.dist(w, twin).item(), torch.dist(twin, start).item()
        require_within(off, 0.01 * way + 1e-6, f"unread, a frame that has gone {way:.3g} is off by")


def law_refusal(case: OptimizerCase) -> None:
    """Without reads of values, NaN or infinity in one gradient leaves its group as it is, and its states count that."""
    for bad in (math.nan, math.inf):
        ws, optimizer = mixed(case)
        with without_reads():
            walk(optimizer, ws, [0])
            before = [w.detach().clone() for w in ws]
            states = [_floats(optimizer, w) for w in ws[:3]]
            give_gradients(ws, 3)
            _gradient_of(ws[1]).view(-1)[1] = bad
            optimizer.step()
        require(equal([w.detach() for w in ws[:3]], before[:3]), f"{bad} in a gradient moves its group")
        for w, state in zip(ws[:3], states, strict=True):
            now = _floats(optimizer, w)
            counted = now.pop("refused", None), state.pop("refused", None)
            require(equal(now, state), f"{bad} in a gradient changes a state")
            once = counted[0] is not None and counted[1] is not None and bool(counted[0] == counted[1] + 1)
            require(once, f"{bad} in a gradient is not counted")
        others = zip(ws[3:], before[3:], strict=True)
        require(all(not torch.equal(w, b) for w, b in others), f"{bad} in a gradient stops other groups")


def _floats(optimizer: Optimizer, w: Tensor) -> dict[str, Any]:
    return {key: value.detach().clone() for key, value in optimizer.state[w].items() if isinstance(value, Tensor)}


def law_meta(case: OptimizerCase) -> None:
    """Steps run on the meta device, where tensors have a shape and no values."""
    if case.is_wide:
        return
    ws = [nn.Parameter(torch.empty(shape, dtype=case.dtype, device="meta")) for shape in _FEW]
    optimizer = case.on(ws, lr=RATE)
    for w in ws:
        w.grad = torch.empty_like(w)
    optimizer.step()
    tensors = [value for w in ws for value in optimizer.state[w].values() if isinstance(value, Tensor)]
    require(all(value.is_meta for value in tensors), "a state is made elsewhere")


OPTIMIZERS = Suite("check_optimizer", laws_of(__name__), optimizer_cases)

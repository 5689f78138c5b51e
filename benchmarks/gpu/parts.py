"""The parts in their order, what each measures with `stiefelkit.measuring`, and how many seconds it has."""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stiefelkit as sk
from benchmarks import convolutions
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.truth import KINDS
from benchmarks.gpu.truth import TOLERANCE as TRUTH
from benchmarks.gpu.truth import worst as errors_of
from benchmarks.published_drift import NAME, UncorrectedCayley
from stiefelkit import models
from stiefelkit.measuring import drift, frames, scan
from stiefelkit.measuring.clock import WARM_UPS, Run, clock_of, peak_bytes, replayed, with_kernels
from stiefelkit.measuring.clock import race as race_versions
from stiefelkit.measuring.contest import Contest, Race, Row, Schedule, finite
from stiefelkit.measuring.moved_frames import own_optimizers, peer_optimizers
from stiefelkit.measuring.plans import DriftPlan, OptimizerRace, ParametrizationRace, ScanRace
from stiefelkit.scan import reflector_scan, rotation_scan
from stiefelkit.testing import LawBroken, check_optimizer, check_parametrization
from stiefelkit.training import data
from stiefelkit.training.tasks.adding import Adding
from stiefelkit.training.tasks.mnist import FILES, Mnist
from stiefelkit.training.tasks.task import Task

UNDER_LOWERED = ("frames", "gradients", "precision")
"""The laws that are asked for once more with products lowered."""
COLD_BYTES = 1 << 22
"""From this size of a batch of frames on, a map moves more than it computes, and the cache is flushed."""
TOLERANCE = 1e-5
"""What parameters may be off, of their length, after the same steps by a graph: sums may be in another order."""
STEPS = 5
UNITS, BATCH = 170, 128
MOST_SECONDS, EVERY = 15.0, 20
"""Batches of an epoch end here, from which the time of all follows; and those between two looks at the clock."""
EPS = torch.finfo(torch.float32).eps
Races = Iterator[Race]


@contextlib.contextmanager
def lowered(allowed: bool) -> Iterator[None]:
    """Lets cuDNN and products lower float32, or neither."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("medium" if allowed else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, precision = before
        torch.set_float32_matmul_precision(precision)


def laws(scale: Scale, device: str, schedule: Schedule) -> Races:
    """Law by law of each map and optimizer: whether it holds, and how long that took."""
    kinds: list[tuple[str, tuple[str, ...], dict[str, Any], Callable[..., None]]] = [
        ("maps", scale.laws, dict(sk.available()), check_parametrization),
        ("optimizers", scale.steps_laws, dict(own_optimizers()), check_optimizer),
    ]
    for is_lowered in (False, True):
        for (kind, names, members, check), chosen in zip(kinds, (scale.maps, scale.optimizers), strict=True):
            for law in (law for law in names if not is_lowered or law in UNDER_LOWERED):
                with lowered(is_lowered):
                    rows = [
                        _law(name, partial(check, members[name], [law], device=device))
                        for name in scale.mine(name for name in members if name in (chosen or members))
                    ]
                yield Race(f"{kind}: {law}" + ", products lowered" * is_lowered, "law", rows)


def _law(name: str, check: Callable[[], None]) -> Row:
    start, words = time.monotonic(), ""
    try:
        check()
    except LawBroken as broken:
        words = "; ".join(str(failure).partition("\n")[0] for failure in broken.failures)
    except RuntimeError as error:
        words = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return _held(name, not words, words, seconds=time.monotonic() - start)


def _held(name: str, holds: bool, words: str = "", **figures: float) -> Row:
    return Row({"contender": name, "holds": holds, "words": words, **figures})


def drifts(scale: Scale, device: str, schedule: Schedule) -> Races:
    """All maps and optimizers over many steps, by replays of a graph, and the update without correction; then peers."""
    sk.optim.register(NAME, UncorrectedCayley)
    plan = DriftPlan(device=device, gradients="rotation", **scale.drift)
    ours = replace(plan, methods=tuple(scale.mine(name for name in plan.methods if name not in peer_optimizers)))
    yield from drift.races(replace(ours, replay=device.startswith("cuda")), schedule=schedule)
    if peers := tuple(scale.mine(name for name in plan.methods if name in peer_optimizers)):
        yield from drift.races(replace(plan, methods=peers, steps=min(plan.steps, 1000)), schedule=schedule)


def truth(scale: Scale, device: str, schedule: Schedule) -> Races:
    """Outputs and gradients of maps and layers against float64 on the CPU, on random shapes, in turns until the end."""
    found = {kind: errors_of(kind, device, scale.share[0]) for kind in scale.maps or KINDS}
    worst: dict[str, tuple[str, float]] = {}
    with lowered(False):
        for tried in range(scale.tries):  # noqa: B007
            if schedule.is_over:
                break
            for kind, errors in found.items():
                worst[kind] = max(worst.get(kind, ("", 0.0)), next(errors), key=lambda case: case[1])
    rows = [
        _held(kind, error <= TRUTH, f"{error:.2g} in the worst of {tried + 1} cases, {words}", error=error)
        for kind, (words, error) in worst.items()
    ]
    yield Race(f"outputs and gradients are those of float64, draw {scale.share[0]}", "law", rows)


def compiled(scale: Scale, device: str, schedule: Schedule) -> Races:
    """Forward and backward by torch.compile, by its graphs, and by torch's graphs of a module: right, and how fast."""
    place, nets = torch.device(device), dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]]()
    for name, cls in sk.available().items():
        if cls.supports((64, 64), torch.float32) is None and name in (scale.maps or sk.available()):
            nets[name] = lambda name=name: (sk.orthogonal(nn.Linear(64, 64), "weight", name), (32, 64))
    if not scale.maps:
        nets["OrthogonalRNN"] = lambda: (sk.nn.OrthogonalRNN(4, 64), (100, 16, 4))
        nets["OrthogonalConv2d"] = lambda: (sk.nn.OrthogonalConv2d(8, 8, 3), (4, 8, 12, 12))
    modes: dict[str, Callable[[nn.Module, Tensor], Any]] = {
        "aot_eager": lambda net, x: torch.compile(net, backend="aot_eager")
    }
    if place.type == "cuda":
        modes = {
            mode: lambda net, x, mode=mode: torch.compile(net, mode=mode) for mode in ("default", "reduce-overhead")
        }
        modes["make_graphed_callables"] = lambda net, x: torch.cuda.make_graphed_callables(net, (x,))
    law, times = [], []
    for name, mode in scale.mine((name, mode) for name in nets for mode in modes):
        torch.manual_seed(0)
        net, shape = nets[name]()
        x = torch.randn(shape, device=place)
        launched = partial(_passed, net.to(place), x)
        try:
            fast = partial(_passed, modes[mode](copy.deepcopy(net), x), x)
            pairs = zip(fast(), launched(), strict=True)
        except Exception as error:
            law.append(_held(f"{name}, {mode}", False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
            continue
        off = max(float(torch.dist(a, b) / b.norm().clamp_min(EPS)) for a, b in pairs)
        law.append(_held(f"{name}, {mode}", off < 16 * TOLERANCE, f"off by {off:.2g}", error=off))
        rows = _timed(scale, "", {"launched": launched, mode: fast}, place).rows
        times += [replace(row, figures={**row.figures, "contender": f"{name}, {row.name}"}) for row in rows]
    yield Race("compiled nets have the outputs and gradients of launched ones", "law", law)
    yield Race("forward and backward, compiled", "times", times)


def _passed(net: Any, x: Tensor) -> list[Tensor]:
    """Returns the output and the gradients of its square."""
    out = net(x)
    out = out[0] if isinstance(out, tuple) else out
    return [t.clone() for t in (out.detach(), *torch.autograd.grad(out.square().sum(), list(net.parameters())))]


def maps(scale: Scale, device: str, schedule: Schedule) -> Races:
    """Forward and backward of each map and its peers, size by size."""
    for n, p, batch in scale.sizes:
        is_cold = batch > 1 and 4 * n * p * batch >= COLD_BYTES
        yield from _of_maps(scale, device, schedule, (n, p, batch), cold=is_cold)


def replays(scale: Scale, device: str, schedule: Schedule) -> Races:
    """The same as one graph; on a CPU, which has none, as it is."""
    for size in scale.replays:
        is_cuda = device.startswith("cuda")
        yield from _of_maps(scale, device, schedule, size, precisions=("exact",), replay=is_cuda)


def memory(scale: Scale, device: str, schedule: Schedule) -> Races:
    """Most memory that is held at once: by maps forward and backward, and by the recurrence."""
    size = (scale.memory_size, scale.memory_size, 1)
    yield from _of_maps(scale, device, schedule, size, precisions=("exact",), memory=True, peers=False)
    plan = ScanRace(cases=scale.cases[:1], device=device, memory=True, named_peers=("eager_loop",), **scale.race)
    yield from scan.races(plan, schedule=schedule)


def _of_maps(scale: Scale, device: str, schedule: Schedule, size: tuple[int, int, int], **fields: Any) -> Races:
    n, p, batch = size
    fields = {"peers": True, "operations": ("forward_backward",), "parametrizations": scale.maps, **fields}
    plan = ParametrizationRace(sizes=((n, p),), batch=batch, device=device, **{**scale.race, **fields})
    yield from frames.races(plan, schedule=schedule)


def steps(scale: Scale, device: str, schedule: Schedule) -> Races:
    """One step of each optimizer and its peers, size by size."""
    for n, p, batch in scale.step_sizes:
        names = {"optimizers": scale.optimizers, "peers": True}
        plan = OptimizerRace(sizes=((n, p),), batch=batch, device=device, **names, **scale.race)
        yield from frames.races(plan, schedule=schedule)


def scans(scale: Scale, device: str, schedule: Schedule) -> Races:
    """The recurrence in its cases, each backend, beside torch's loop and cuDNN's layers, with TF32 off and on."""
    config = {**scale.race, "seconds": 6 * scale.race["seconds"]}
    for tf32 in (False, True) if device.startswith("cuda") else (False,):
        with lowered(tf32):
            for race in scan.races(ScanRace(cases=scale.cases, peers=True, device=device, **config), schedule=schedule):
                yield replace(race, subject=race.subject + ", TF32" * tf32)


def linear(scale: Scale, device: str, schedule: Schedule) -> Races:
    """Linear recurrences beside a copy of the states, which is the roofline, and convolutions; errors of both."""
    place = torch.device(device)
    with lowered(False):
        for steps, batch, units in scale.rotations:
            torch.manual_seed(0)
            subject = f"T = {steps}, B = {batch}, n = {units}"
            states = torch.randn(steps, batch, units, device=place, requires_grad=True)
            angle = torch.rand(units // 2, device=place, requires_grad=True)
            yield Race(f"states of a scan, {subject}", "law", [_scan_error(states, angle, g) for g in (0.999, 1.0)])
            yield _timed(scale, f"forward and backward, {subject}", _recurrences(states, angle), place)
            yield _timed(scale, f"two reflectors, {subject}", _reflections(steps, batch, units, place), place)
        contest, size = Contest("convolutions"), scale.image
        words = f"{convolutions.CHANNELS} channels, {size} x {size}, 32 images"
        runs: dict[str, Run] = {}
        for name in convolutions.CONTENDERS:
            try:
                runs[name] = convolutions.forward_backward(name, size, device)
            except NotImplementedError as error:
                contest.left_out[name] = str(error)
        yield replace(_timed(scale, f"convolutions, {words}", runs, place), left_out=contest.left_out)
        errors = {
            name: convolutions.Isometry().figure_of(name, size, device) for name in runs if name != convolutions.UNIT
        }
        rows = [_held(name, error < 16, f"{error:.3g} eps", eps=error) for name, error in errors.items()]
        yield Race(f"singular values of convolutions are one, {words}", "law", rows)


def _scan_error(x: Tensor, angle: Tensor, decay: float) -> Row:
    """Whether states are within 16 eps of the largest, those in float64 being exact."""
    x, angle = x.detach(), angle.detach()
    found, exact = (rotation_scan(*both, decay)[0] for both in ((x, angle), (x.double(), angle.double())))
    assert found is not None
    assert exact is not None
    error = float((found - exact).abs().max() / exact.abs().max()) / EPS
    return _held(f"rotation_scan, g = {decay:g}", error < 16, f"{error:.3g} eps", eps=error)


def _recurrences(states: Tensor, angle: Tensor) -> dict[str, Run]:
    length, batch, units = states.shape
    x, g = (torch.randn(length, batch, width, device=states.device) for width in (units // 2, units))
    layers = {
        "RotationRNN": sk.nn.RotationRNN(units // 2, units),
        "OrthogonalRNN": sk.nn.OrthogonalRNN(units // 2, units),
        "torch.nn.LSTM": nn.LSTM(units // 2, units),
    }
    runs: dict[str, Run] = {
        "copy": g.clone,
        "rotation_scan": lambda: torch.autograd.grad(rotation_scan(states, angle, 0.999)[0], [states, angle], g),  # type: ignore[arg-type]
    }
    for name, layer in layers.items():
        leaves = list(layer.to(states.device).parameters())
        runs[name] = lambda layer=layer, leaves=leaves: torch.autograd.grad(layer(x)[0], leaves, g)
    return runs


def _reflections(steps: int, batch: int, units: int, device: torch.device) -> dict[str, Run]:
    """The DeltaProduct of two keys a step, heads of 64 units, in bfloat16, which flash-linear-attention takes alone."""
    size = min(units, 64)
    q, k, v = (torch.randn(batch, count, units // size, size, device=device) for count in (steps, 2 * steps, 2 * steps))
    tensors = [t.bfloat16().requires_grad_() for t in (q, F.normalize(k, dim=-1), v)]
    g, gates = torch.ones_like(tensors[0]), (q.new_zeros(q.shape[:3]), 2 * k.new_ones(k.shape[:3]))
    runs: dict[str, Run] = {"reflector_scan": lambda: torch.autograd.grad(reflector_scan(*tensors)[0], tensors, g)}  # type: ignore[arg-type]
    with contextlib.suppress(ImportError):
        from fla.ops.gated_delta_product import chunk_gated_delta_product as chunk  # type: ignore[import-not-found]

        runs["fla"] = lambda: torch.autograd.grad(chunk(*tensors, *gates, num_householder=2)[0], tensors, g)
    return runs


def _timed(scale: Scale, subject: str, runs: dict[str, Run], device: torch.device) -> Race:
    found = race_versions(runs, clock_of(device), **scale.race)
    first = next(iter(found.values())).median
    found = with_kernels(found, runs, device)
    rows = [
        Row(
            {"contender": name, **timing.figures, "/ first": timing.median / first}
            | {"bytes": peak_bytes(runs[name], device)}
        )
        for name, timing in found.items()
    ]
    return Race(subject, "times", rows)


def capture(scale: Scale, device: str, schedule: Schedule) -> Races:
    """Whole training steps as one graph, by every optimizer of frames, and of maps by Adam: is it the same step?"""
    n, place = scale.sizes[0][0], torch.device(device)
    own = {name: cls for name, cls in own_optimizers().items() if name in (scale.optimizers or own_optimizers())}
    methods = {f"{name}, frames": ("stiefel", cls) for name, cls in own.items()}
    chosen = scale.maps or ("cayley", "householder", "matrix_exp")
    methods |= {f"{name}, Adam": (name, torch.optim.Adam) for name in chosen}
    contest, law, times = Contest("capture", schedule=schedule), [], []
    for name, (parametrization, cls) in methods.items():
        act = partial(_stepped, n, parametrization, cls, place)
        try:
            found = contest.attempt("capturing", [name], lambda _, act=act: act())
        except (RuntimeError, TypeError) as error:
            law.append(_held(name, False, str(error).partition("\n")[0]))
            continue
        for runs, off in found.values():
            law.append(_held(name, off <= TOLERANCE, f"a parameter is off by {off:.3g} of its length"))
            rows = _timed(scale, "", runs, place).rows
            times += [replace(row, figures={**row.figures, "contender": f"{name}, {row.name}"}) for row in rows]
    yield Race("a replay makes the same step", "law", law, contest.left_out)
    yield Race(f"one training step, n = {n}", "times", times)


def _stepped(
    n: int, parametrization: str, cls: Callable[..., torch.optim.Optimizer], device: torch.device
) -> tuple[dict[str, Run], float]:
    """Returns the steps of a net and of its copy by a graph, and how far apart they are after some."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n))
        for layer in (net[0], net[2]):
            sk.orthogonal(layer, "weight", parametrization, init="haar")
    nets, is_cuda = [net.to(device), copy.deepcopy(net).to(device)], device.type == "cuda"
    x, y = (torch.randn(32, n, generator=torch.Generator().manual_seed(1)).to(device) for _ in range(2))

    def step(net: nn.Module) -> Run:
        groups = sk.optim.parameter_groups(net, lr=1e-3)
        # On a CPU torch's own optimizers refuse it.
        optimizer = cls(groups, lr=1e-3, **({"capturable": True} if is_cuda else {}))

        def run() -> None:
            optimizer.zero_grad(set_to_none=not is_cuda)
            F.mse_loss(net(x), y).backward()
            optimizer.step()

        return run

    plain, graphed = map(step, nets)
    graphed = replayed(graphed, device) if is_cuda else graphed
    for number in range(STEPS + WARM_UPS * is_cuda):  # the capture has made as many as it warms up by
        plain()
        if number < STEPS:
            graphed()
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    off = max((torch.dist(a, b) / torch.linalg.vector_norm(a).clamp_min(1e-30)).item() for a, b in pairs)
    return {"step by step": plain, "replayed": graphed}, off


def epoch(scale: Scale, device: str, schedule: Schedule) -> Races:
    """An epoch of scoRNN on MNIST pixel by pixel, where the data are; a dry run draws short sequences itself."""
    place = data.place()
    folders = [] if place is None else [place, place / Mnist.name]
    if scale.epoch:
        yield _epoch(Adding(T=12, train_size=4 * BATCH), 8, scale.epoch, device)
    elif any(all(_has(folder, file.name) for file in FILES) for folder in folders):
        yield _epoch(Mnist(), UNITS, Mnist().batches_per_epoch(BATCH), device)
    else:
        reason = f"MNIST was not found; name its folder with {data.VARIABLE}."
        yield Race("MNIST", "epoch", [], {"scornn": reason})


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file() or (folder / f"{name}.gz").is_file()


def _epoch(task: Task, units: int, batches: int, device: str) -> Race:
    torch.manual_seed(0)
    net = models.create("scornn", task.input_size, units, task.output_size, negative=units // 10).to(device)
    optimizer = torch.optim.RMSprop(sk.optim.parameter_groups(net, lr=1e-3, skew={"lr": 1e-4}), alpha=0.9)
    losses, seconds, done, begun = [], [], 0, time.monotonic()
    with data.on(device):
        task.batch(0, BATCH, 0)  # what is read once only
        while done < batches and time.monotonic() - begun < MOST_SECONDS:
            start, numbers = time.monotonic(), range(done, min(done + EVERY, batches))
            for number in numbers:
                x, y = (t.to(device) for t in task.batch(number, BATCH, 0))
                optimizer.zero_grad()
                loss = task.loss(net(x, last_only=True), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            done += len(numbers)
            losses[-1].item()
            seconds.append((time.monotonic() - start) / len(numbers))
    (found,) = sk.drift(net).values()
    figures = {
        **{"contender": "scornn", "seconds": statistics.median(seconds), "batches": float(done)},
        **{"s / epoch": statistics.median(seconds) * batches, "loss": torch.stack(losses[-EVERY:]).mean().item()},
        "error / limit": finite(found.error / found.limit),
    }
    return Race(f"{type(task).__name__}, {units} units, batches of {BATCH}: one batch", "epoch", [Row(figures)])


@dataclass(frozen=True)
class GpuPart:
    """A part: what it measures, its seconds, and the processes that share it on a GPU, where it times nothing."""

    measure: Callable[[Scale, str, Schedule], Races]
    seconds: float
    processes: int = 1


PARTS = {
    "laws": GpuPart(laws, 70, 8),
    "drift": GpuPart(drifts, 60, 8),
    "maps": GpuPart(maps, 75),
    "steps": GpuPart(steps, 50),
    "replays": GpuPart(replays, 25),
    "scan": GpuPart(scans, 45),
    "linear": GpuPart(linear, 16),
    "capture": GpuPart(capture, 18),
    "compile": GpuPart(compiled, 50, 8),
    "truth": GpuPart(truth, 30, 8),
    "memory": GpuPart(memory, 15),
    "epoch": GpuPart(epoch, 20),
}
"""Name to part; together less than eight minutes, and each may end by so much later as its last table takes."""

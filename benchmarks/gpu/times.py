"""Times of maps and of steps of optimizers of frames, single and batched, beside other implementations."""

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.gpu.parts import Cells, LeftOut, absent_peers
from benchmarks.gpu.scale import Scale
from stiefelkit.measuring.races import frames
from stiefelkit.measuring.races.field import Race
from stiefelkit.measuring.races.plan import OptimizerRace, ParametrizationRace
from stiefelkit.measuring.report.record import Figure

__all__ = ["of_maps", "of_replays", "of_steps"]

COLD_BYTES = 1 << 22
"""From this size of a batch of frames on, a map moves more than it computes, and the cache is flushed."""


def of_maps(scale: Scale, device: str) -> Cells:
    """Forward and backward of each map and its peers, size by size."""
    told: set[str] = set()
    # The first size in complex64 too, of which some maps are only.
    for (n, p, batch), dtype in [*((size, "float32") for size in scale.sizes), (scale.sizes[0], "complex64")]:
        is_cold = batch > 1 and 4 * n * p * batch >= COLD_BYTES
        fields = {"operations": ("forward_backward",), "cold": is_cold, **_place(n, p, batch, device), "dtype": dtype}
        plan = ParametrizationRace(peers=True, parametrizations=scale.maps, **fields, **scale.race)
        missing = {package: names for package, names in plan.missing_peers().items() if package not in told}
        told |= set(missing)
        yield from _not_installed(missing)
        words = ", cache flushed" * is_cold
        yield from _figures("maps", frames.races(plan), f", {dtype}{words}")


def of_steps(scale: Scale, device: str) -> Cells:
    """One step of each optimizer and its peers, size by size."""
    yield from absent_peers()
    for n, p, batch in scale.step_sizes:
        plan = OptimizerRace(peers=True, optimizers=scale.optimizers, **_place(n, p, batch, device), **scale.race)
        yield from _figures("steps", frames.races(plan))


def of_replays(scale: Scale, device: str) -> Cells:
    """Forward and backward of each map as one graph; on a CPU, which has none, as it is."""
    is_cuda = device.startswith("cuda")
    for n, p, batch in scale.replays:
        fields = {"operations": ("forward_backward",), "precisions": ("exact",), **_place(n, p, batch, device)}
        fields |= {"replay": is_cuda, "parametrizations": scale.maps}
        plan = ParametrizationRace(peers=True, **fields, **scale.race)
        yield from _figures("replays", frames.races(plan))


def _place(n: int, p: int, batch: int, device: str) -> dict[str, Any]:
    return {"sizes": ((n, p),), "batch": batch, "device": device}


def _figures(part: str, races: Iterable[Race], words: str = "") -> Cells:
    for race in races:
        table = f"{race.operation}, {race.subject}{words}"
        yield Figure(part, table, "one product", "s", race.unit)
        for row in race.rows:
            yield Figure(
                part,
                table,
                row.contender,
                "s",
                row["seconds"],
                row["spread"],
                row["samples"],
                {"g": row["gemm_units"], "ratio": row["ratio_to_best_peer"], "error / limit": row["error_over_limit"]},
            )
        yield from (LeftOut(f"{name}, {race.subject}", reason) for name, reason in race.left_out.items())


def _not_installed(missing: dict[str, list[str]]) -> Iterator[LeftOut]:
    for package, names in missing.items():
        yield from (LeftOut(name, f"{package} is not installed.") for name in names)

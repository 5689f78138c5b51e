"""Speed of the maps and drift of the optimizers beside those of others: the plot of README, and the figures under it.

    python -m benchmarks.beside_peers            # measures, in a few minutes on one core, and draws
    python -m benchmarks.beside_peers --draw     # draws what was measured last

Figures go to benchmarks/results/beside-peers.json, the plot to docs/images/beside-peers.svg; those of a GPU are what
`make gpu` has written.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from stiefelkit.measuring import drift, frames
from stiefelkit.measuring.plans import DriftPlan, ParametrizationRace
from stiefelkit.measuring.report import read_record

DOCS = Path(__file__).parent.parent / "docs"
FIGURES, PLOT = DOCS.parent / "benchmarks" / "results" / "beside-peers.json", DOCS / "images" / "beside-peers.svg"
GPU = FIGURES.parent / "gpu" / "h100-2026-11-28" / "gpu.json"
SIZES = (64, 256, 512)
RACED = ("cayley", "householder", "matrix_exp", "givens")
OURS = {"multiplicative_cayley": "MultiplicativeCayley", "cayley_adam": "CayleyAdam", "pogo": "POGO"}
GRAPHED = {"cayley_sgd": "CayleySGD", "cayley_adam": "CayleyAdam", "pogo": "POGO", "landing": "Landing", "spel": "SPEL"}
PEERS = {"geoopt_sgd_euclidean": "geoopt SGD, QR", "geoopt_adam_canonical": "geoopt Adam, canonical"}


def measure(sizes: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Races every map beside its peers, then takes frames for a turn."""
    squares = tuple((n, n) for n in sizes)
    maps = ParametrizationRace(sizes=squares, operations=("forward_backward",), peers=True, seconds=0.5)
    rows = [row.figures for race in frames.races(maps) for row in race.rows]
    plan = DriftPlan(steps=steps, methods=(*OURS, *PEERS), gradients="rotation", step_length=0.1)
    curves = [curve for race in drift.races(plan) for curve in race.curves]
    ratios = [{"method": curve.method, "steps": curve.steps, "ratios": curve.ratios} for curve in curves]
    return {"time": rows, "drift": ratios}


def on_gpu(path: Path, part: str) -> list[dict[str, Any]]:
    """Rows of a part of a file that `benchmarks.gpu` has written."""
    return [
        row.figures for each in read_record(path).parts if each.name == part for race in each.races for row in race.rows
    ]


def draw_times(axes: Any, rows: list[dict[str, Any]], where: str) -> None:
    """Draws the milliseconds of a map in precision "exact", and of its fastest peer by the ratio that is printed."""
    found = {(row["contender"], row["n"]): row for row in rows}
    sizes = sorted({row["n"] for row in rows})
    labels = []
    for group, name in enumerate(RACED):
        for index, n in enumerate(sizes):
            row = found[f"{name} (exact)", n]
            x, ours, ratio = group * (len(sizes) + 1) + index, 1e3 * row["seconds"], row["ratio_to_best_peer"]
            axes.bar(x - 0.2, ours, 0.38, color="C0", label="stiefelkit, exact" if x == 0 else None)
            axes.bar(x + 0.2, ours * (ratio or 0), 0.38, color="C6", label="fastest peer" if x == 0 else None)
            labels.append((x, f"{n}\n\n{name}" if index == len(sizes) // 2 else "\n" * (index % 2) + f"{n}"))
    axes.set(yscale="log", ylabel="ms", title=f"map and its gradient, n × n, {where}")
    axes.set_xticks([x for x, _ in labels], [label for _, label in labels], fontsize="small")
    axes.legend(loc="upper left")


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draws the panels."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rc_file(DOCS / "_static" / "matplotlibrc")
    from matplotlib import pyplot as plt

    figure, ((time, device), (errors, steps)) = plt.subplots(2, 2, figsize=(9.6, 6.4))
    draw_times(time, figures["time"], "one CPU thread")
    draw_times(device, [row for row in on_gpu(GPU, "maps") if row["batch"] == 1], "H100")
    seconds = {row["contender"]: 1e3 * row["seconds"] for row in on_gpu(GPU, "capture") if "seconds" in row}
    for shift, label, how in ((-0.2, "launched", "step by step"), (0.2, "replay of a graph", "replayed")):
        heights = [seconds[f"{name}, frames, {how}"] for name in GRAPHED]
        steps.bar(
            [x + shift for x in range(len(heights))], heights, 0.38, color="C0" if shift > 0 else "C6", label=label
        )
    steps.set(yscale="log", ylabel="ms", title="training step of three 64 × 64 layers, H100", ylim=(0.1, 30))
    steps.set_xticks(range(len(GRAPHED)), GRAPHED.values())
    steps.legend(loc="upper left", ncols=2)
    names = OURS | PEERS
    for curve in figures["drift"]:
        is_ours = curve["method"] in OURS
        errors.loglog(curve["steps"], curve["ratios"], "-" if is_ours else "--", label=names[curve["method"]])
    errors.set(xlabel="step", title="orthogonality error / rounding limit, 64 × 64")
    errors.set_ylim(top=300 * max(max(curve["ratios"]) for curve in figures["drift"]))
    errors.legend(loc="upper left", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Measures, unless it is only to draw, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    parser.add_argument("--plot", type=Path, default=PLOT)
    asked = parser.parse_args()
    if not asked.draw:
        asked.figures.write_text(json.dumps(measure(tuple(asked.sizes), asked.steps), indent=1))
    draw(json.loads(asked.figures.read_text()), asked.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

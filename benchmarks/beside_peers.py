"""Speed of the maps and drift of the optimizers beside those of others: the plot of README, and the figures under it.

    python -m benchmarks.beside_peers            # measures, in a few minutes on one core, and draws
    python -m benchmarks.beside_peers --draw     # draws what was measured last

Figures go to benchmarks/results/beside-peers.json, the plot to docs/images/beside-peers.svg.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from stiefelkit.measuring import drift, frames
from stiefelkit.measuring.plans import DriftPlan, ParametrizationRace

DOCS = Path(__file__).parent.parent / "docs"
FIGURES, PLOT = DOCS.parent / "benchmarks" / "results" / "beside-peers.json", DOCS / "images" / "beside-peers.svg"
SIZES = (64, 256, 512)
RACED = ("cayley", "householder", "matrix_exp", "givens")
OURS = {"multiplicative_cayley": "MultiplicativeCayley", "cayley_adam": "CayleyAdam", "pogo": "POGO"}
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


def fastest(rows: list[dict[str, Any]], name: str, n: int) -> tuple[float, float]:
    """Milliseconds of a map in precision "exact", and of its fastest peer, by the ratio that the race has printed."""
    (row,) = (row for row in rows if row["n"] == n and row["contender"] == f"{name} (exact)")
    return 1e3 * row["seconds"], 1e3 * row["seconds"] * row["ratio_to_best_peer"]


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draws both panels."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rc_file(DOCS / "_static" / "matplotlibrc")
    from matplotlib import pyplot as plt

    figure, (time, errors) = plt.subplots(1, 2, figsize=(8.4, 3.2), width_ratios=(1.25, 1))
    sizes = sorted({row["n"] for row in figures["time"]})
    labels = []
    for group, name in enumerate(RACED):
        for index, n in enumerate(sizes):
            ours, peer = fastest(figures["time"], name, n)
            x = group * (len(sizes) + 1) + index
            time.bar(x - 0.2, ours, 0.38, color="C0", label="stiefelkit, exact" if x == 0 else None)
            time.bar(x + 0.2, peer, 0.38, color="C6", label="fastest peer" if x == 0 else None)
            labels.append((x, f"{n}\n{name}" if index == len(sizes) // 2 else f"{n}"))
    time.set(yscale="log", ylabel="ms", title="map and its gradient, n × n")
    time.set_xticks([x for x, _ in labels], [label for _, label in labels])
    time.legend(loc="upper left")
    names = OURS | PEERS
    for curve in figures["drift"]:
        is_ours = curve["method"] in OURS
        errors.loglog(curve["steps"], curve["ratios"], "-" if is_ours else "--", label=names[curve["method"]])
    errors.set(xlabel="step", title="orthogonality error / rounding limit, 64 × 64")
    errors.set_ylim(top=100 * max(max(curve["ratios"]) for curve in figures["drift"]))
    errors.legend(loc="upper left")
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

"""The drift of a full-capacity uRNN in training, with and without what takes rounding away, and of scoRNN beside it.

    python -m benchmarks.published_drift --data DIR --epochs 2 --out runs/drift-in-training

trains the uRNN twice: by `MultiplicativeCayley`, and by the same steps as their authors' code makes them, in the dtype
of the frame and without any correction; then scoRNN at as many units; and draws all three. Settings are those of the
row of a paper's table that has the size, else the recipe of the task. Runs go on where they were stopped.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from stiefelkit.functional import cayley_increment
from stiefelkit.optim import MultiplicativeCayley, register
from stiefelkit.optim.batch import Bucket
from stiefelkit.optim.steps import as_factor
from stiefelkit.training import data, papers
from stiefelkit.training.config import Config
from stiefelkit.training.display import Terminal
from stiefelkit.training.plot import plot
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import is_run
from stiefelkit.training.tasks import create
from stiefelkit.training.train import resume, train

NAME = "uncorrected_cayley"


class UncorrectedCayley(MultiplicativeCayley):
    """The multiplicative Cayley update as its authors' code makes it, in working precision: rounding errors add up."""

    def move(self, group: dict[str, Any], bucket: Bucket) -> None:
        """See `FrameOptimizer`."""
        w, bucket.lo = bucket.frames(), None
        direction, steps = self.direction(group, bucket, w, bucket.g)
        bucket.add(cayley_increment(w, direction, as_factor(steps, w)))


RUNS = {  # of each run, by its folder: the model, and what moves the frame
    "full_urnn": ("full_urnn", "multiplicative_cayley"),
    "full_urnn-uncorrected": ("full_urnn", NAME),
    "scornn": ("scornn", None),
}


def main() -> int:
    """Trains what is not trained yet, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data; that of STIEFELKIT_DATA if left out")
    parser.add_argument("--task", choices=("mnist", "pmnist", "digits"), default="mnist")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=116)
    parser.add_argument("--out", type=Path, default=Path("runs/drift-in-training"))
    asked = parser.parse_args()
    register(NAME, UncorrectedCayley)
    task = create(asked.task, {})
    rows = {(row.task, row.model, row.settings.hidden_size): row.settings for row in papers.rows() if row.in_paper}
    with data.named(asked.data):
        for name, (model, optimizer) in RUNS.items():
            settings = Settings(hidden_size=asked.hidden_size, threads=1)
            settings = settings.with_defaults(rows.get((asked.task, model, asked.hidden_size), settings))
            config, run = Config.resolve(task, model, settings), asked.out / name
            steps = asked.epochs * task.batches_per_epoch(config.batch_size)
            config = dataclasses.replace(config, steps=steps, optimizer=optimizer or config.optimizer)
            outcome = resume(run, vars(config), Terminal()) if is_run(run) else train(config, run, Terminal())
            if outcome.signal is not None:
                return 128 + outcome.signal
        for path in plot([asked.out / name for name in RUNS], asked.out):
            print(f"Figure: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""One run in a few figures, read back from its folder."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from stiefelkit.errors import RunError
from stiefelkit.training.display import worst_ratio
from stiefelkit.training.log import read
from stiefelkit.training.run_folder import RunFolder

__all__ = ["Summary", "summarise"]


@dataclass(frozen=True)
class Summary:
    """What a table says about a run.

    Args:
        model: name of the model.
        step: step of the last evaluation.
        test: last scores on the held-out set.
        validation: last scores on the examples set apart to choose by; empty where the task has none.
        parameters: number of trainable parameters.
        ms_per_step: median over the log of the process CPU time per optimizer step, in milliseconds.
        orthogonality: worst error over limit, over all weights and the whole log; None without such weights.
    """

    model: str
    step: int
    test: dict[str, float]
    validation: dict[str, float]
    parameters: int
    ms_per_step: float
    orthogonality: float | None


def summarise(path: Path) -> Summary:
    """Returns the figures of a run.

    Raises:
        RunError: the folder is missing, damaged, or the run has not been evaluated yet.
    """
    folder = RunFolder.open(path)
    scores = folder.config.build_task().scores
    records = read(folder.log, scores)
    train = [record for record in records if record["kind"] == "train"]
    test = [record for record in records if record["kind"] == "test"]
    validation = [record for record in records if record["kind"] == "validation"]
    if not train or not test:
        raise RunError(f"Run {path} needs an evaluation in its log, got none yet; continue it with --resume.")
    ratios = [worst_ratio(record["orthogonality"]) for record in train]
    return Summary(
        model=folder.config.model,
        step=test[-1]["step"],
        test={key: test[-1][key] for key in scores},
        validation={key: validation[-1][key] for key in scores} if validation else {},
        parameters=folder.parameters,
        ms_per_step=statistics.median(record["ms_per_step"] for record in train),
        orthogonality=max((ratio for ratio in ratios if ratio is not None), default=None),
    )

"""One run in a few figures, read back from its folder."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from stiefelkit.errors import RunError
from stiefelkit.training.display import worst_ratio
from stiefelkit.training.run_folder import RunFolder, by_kind

__all__ = ["Summary", "summarise"]


@dataclass(frozen=True)
class Summary:
    """What a table says about a run: last scores on the held-out set, and on what is set apart to choose by, if any.

    `ms_per_step` is the median of the process CPU time of a step, `orthogonality` the worst error over limit of all
    weights and the whole log, None without such weights.
    """

    model: str
    step: int
    test: dict[str, float]
    validation: dict[str, float]
    parameters: int
    ms_per_step: float
    orthogonality: float | None


def summarise(path: Path) -> Summary:
    """Returns the figures of a run; raises RunError if it is missing, damaged or has not been evaluated yet."""
    folder = RunFolder.open(path)
    records, scores = by_kind(folder), folder.config.build_task().scores
    train, test, validation = (records[kind] for kind in ("train", "test", "validation"))
    if not train or not test:
        raise RunError(f"Run {path} needs an evaluation in its log, got none yet; continue it with --resume.")
    ratios = [ratio for record in train if (ratio := worst_ratio(record["orthogonality"])) is not None]
    return Summary(
        model=folder.config.model,
        step=test[-1]["step"],
        test={key: test[-1][key] for key in scores},
        validation={key: validation[-1][key] for key in scores} if validation else {},
        parameters=folder.parameters,
        ms_per_step=statistics.median(record["ms_per_step"] for record in train),
        orthogonality=max(ratios, default=None),
    )

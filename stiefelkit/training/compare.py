"""Several models on one task, one after the other."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.errors import OptionError, RunError, UnknownNameError, did_you_mean
from stiefelkit.training.config import BY_COORDINATE, Config, of_coordinates
from stiefelkit.training.display import Board, Silent
from stiefelkit.training.figure import Figures
from stiefelkit.training.files import reachable, refuse_links, write_atomically
from stiefelkit.training.plot import plot
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import Summary, is_run, summarise
from stiefelkit.training.tasks import Task
from stiefelkit.training.train import resume, train

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found, model by model, unless a signal stopped it."""

    summaries: list[Summary]
    figures: list[Path]
    signal: int | None = None


def compare(
    task: Task,
    models: Sequence[str],
    out: Path,
    settings: Settings | None = None,
    *,
    named: Mapping[str, Any] | None = None,
    resuming: bool = False,
    display: Silent | None = None,
    board: Board | None = None,
    figures: Figures | None = None,
) -> Comparison:
    """Trains each model in a folder of its own under `out`, then draws their curves there.

    The models run one after the other, so that their times can be compared.

    Args:
        task: the task.
        models: names of models.
        out: the folder; must be new or empty unless `resuming`.
        settings: over the recipe of each model; a learning rate of a coordinate is for the models that have it.
        named: the options of the task that a resumed run must have; all of them if left out.
        resuming: keep what is finished, continue what is not, start what is missing.
        display: what to show; nothing if left out.
        board: where the curves of each run can be watched; nowhere if left out.
        figures: the format of the plots; PNG if left out.

    Raises:
        OptionError: no model, or one named twice.
        UnknownNameError: no model has a coordinate that is given a learning rate.
        RunError: `out` holds something and `resuming` is False.
    """
    display, settings = display or Silent(), settings or Settings()
    if not models or len(set(models)) < len(models):
        raise OptionError(f"A comparison needs one or more different models, got {', '.join(models) or 'none'}.")
    with reachable("A comparison", out):
        if out.exists() and not out.is_dir():
            raise RunError(f"A comparison needs a folder, got the file {out}; choose another --out.")
        if is_run(out):
            raise RunError(f"A comparison needs a folder of its own, got the run {out}; choose another --out.")
        if not resuming and out.exists() and any(out.iterdir()):
            raise RunError(
                f"A comparison needs a new or empty folder, got {out}; add --resume to continue what is there."
            )
    settings_of = _own_settings(task, models, settings)
    configs = [Config.resolve(task, model, settings_of[model]) for model in models]
    for config in configs:  # a bad option of the last model must not be found out after hours
        config.build_optimizer(config.build_model())
    common = {"task": task.name, "task_options": task.options() if named is None else named}
    for config in configs:
        path = out / config.model
        with reachable("A comparison", path):
            refuse_links(path, out)
        if is_run(path):
            asked = settings_of[config.model].given() | common | {"model": config.model}
            outcome = resume(path, asked, display, board=board)
            if outcome.already:
                display.note(f"{config.model} is finished at step {outcome.step}.")
        else:
            outcome = train(config, path, display, board=board)
        if outcome.signal is not None:
            return Comparison([], [], outcome.signal)
    paths = [out / model for model in models]
    summaries = [summarise(path) for path in paths]
    content = [dataclasses.asdict(summary) for summary in summaries]
    write_atomically(out / "summary.json", (json.dumps(content, indent=2) + "\n").encode())
    return Comparison(summaries, plot(paths, out, figures))


def _own_settings(task: Task, models: Sequence[str], settings: Settings) -> dict[str, Settings]:
    """Maps a model to the settings with those rates and optimizers whose coordinate it has; each is some model's."""
    asked = {table: settings.given().get(table, {}) for table in BY_COORDINATE}
    shared = dataclasses.replace(settings, **{table: {} for table in BY_COORDINATE})
    by_model, present = {}, set()
    for model in models:
        names = Config.resolve(task, model, shared).coordinate_names() if any(asked.values()) else []
        present |= set(names)
        by_model[model] = dataclasses.replace(shared, **{t: of_coordinates(asked[t], names) for t in BY_COORDINATE})
    for name in [name for table in asked.values() for name in table]:
        if not of_coordinates({name: 0.0}, present):
            raise UnknownNameError(
                f"None of {', '.join(models)} has a coordinate {name!r}{did_you_mean(name, present)}"
            )
    return by_model

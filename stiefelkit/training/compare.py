"""Several models on one task, one after the other, so that their times can be compared."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from stiefelkit.errors import OptionError, RunError, UnknownNameError, did_you_mean, needs
from stiefelkit.figure import Figures
from stiefelkit.files import reachable, refuse_links, write_json
from stiefelkit.training.config import BY_COORDINATE, Config
from stiefelkit.training.display import Terminal
from stiefelkit.training.plot import plot
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import Summary, is_run, summarise
from stiefelkit.training.tasks import Task
from stiefelkit.training.train import resume, train


def compare(
    task: Task,
    models: Sequence[str],
    out: Path,
    settings: Settings,
    display: Terminal,
    figures: Figures,
    resuming: bool,
) -> tuple[list[Summary], list[Path], int | None]:
    """Trains each model in a folder of its own under `out`, then draws their curves there.

    Returns the figures of each run, and the plots; or nothing, and the signal that stopped it. A learning rate of a
    coordinate is for the models that have it. Where `resuming`, finished runs are kept, others continued as they began,
    and missing ones begun.
    """
    who, listed = "A comparison", ", ".join(models)
    needs(0 < len(models) == len(set(models)), OptionError, who, "one or more different models", listed or "none")
    with reachable(who, out):
        if out.exists() and (not out.is_dir() or is_run(out)):
            raise RunError(f"{who} needs a folder of its own, got {out}; choose another --out.")
        is_new = resuming or not out.exists() or not any(out.iterdir())
        needs(is_new, RunError, who, "a new or empty folder", f"{out}; add --resume to continue what is there")
    for model in models:
        with reachable(who, out / model):
            refuse_links(out / model, out)
    configs = [Config.resolve(task, model, settings, strict=False) for model in models]
    for table in BY_COORDINATE:
        for name in settings.given().get(table, {}):
            if not any(name in vars(config)[table] for config in configs):
                known = {coordinate for config in configs for coordinate in config.coordinate_names()}
                raise UnknownNameError(f"None of {listed} has a coordinate {name!r}{did_you_mean(name, known)}")
    for config in configs:  # a bad option of the last model must not be found out after hours
        config.build_optimizer(config.build_model())
    for config in configs:
        path = out / config.model
        if is_run(path):
            outcome = resume(path, config, display)
            if outcome.already:
                display.note(f"{config.model} is finished at step {outcome.step}.")
        else:
            outcome = train(config, path, display)
        if outcome.signal is not None:
            return [], [], outcome.signal
    paths = [out / model for model in models]
    summaries = [summarise(path) for path in paths]
    write_json(out / "summary.json", [dataclasses.asdict(summary) for summary in summaries])
    return summaries, plot(paths, out, figures), None

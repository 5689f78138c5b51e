"""Sweeps: optuna studies whose trials are runs, each in a folder that is named by what varies.

Lists alone are a grid, whose combinations wait in the queue of the study; with a range, optuna's sampler searches.
"""

import copy
import hashlib
import itertools
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import BaseTrial, FixedTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from stiefelkit.errors import DivergedError, OptimizerError, OptionError, RunError, StiefelkitError, needs
from stiefelkit.files import reachable, refuse_links
from stiefelkit.training.config import Config
from stiefelkit.training.display import Terminal, say
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import is_run, summarise
from stiefelkit.training.tasks import create
from stiefelkit.training.train import resume, train

SUBJECT = "A sweep"
DONE = (TrialState.COMPLETE, TrialState.PRUNED)


class Sweep:
    """The content of a file: options that are `fixed`, and lists or ranges that `vary`; checked at their first values.

    `grid` has all combinations of lists, the last one fastest; none where there is a range.
    """

    def __init__(self, options: Mapping[str, object]):
        # dashes in keys of any depth are Python's underscores
        self.fixed: dict[str, Any] = json.loads(
            json.dumps(options, default=str), object_pairs_hook=lambda pairs: {k.replace("-", "_"): v for k, v in pairs}
        )
        self.vary: dict[str, Any] = {}
        for key, values in self.fixed.pop("vary", {}).items():
            is_table = isinstance(values, dict) and "low" not in values
            self.vary |= {f"{key}.{entry}": each for entry, each in values.items()} if is_table else {key: values}
        first: dict[str, Any] = {}
        for key, values in self.vary.items():
            try:
                first[key] = values["low"] if isinstance(values, dict) else values[0]
                _suggest(FixedTrial(first), key, values)
            except (LookupError, TypeError, ValueError) as error:
                words = f"a list, or a range such as {{low = 1e-4, high = 1e-2, log = true}}, for vary.{key}"
                raise OptionError(f"{SUBJECT} needs {words}, got {values!r}.") from error
        config = self.config(first)
        config.build_optimizer(config.build_model())
        self.headline = config.build_task().headline
        is_grid = all(isinstance(values, list) for values in self.vary.values())
        combinations = itertools.product(*self.vary.values()) if is_grid else ()
        self.grid = [dict(zip(self.vary, values, strict=True)) for values in combinations]

    def config(self, chosen: Mapping[str, object]) -> Config:
        """Returns the description of a run; raises what `train` would of its options."""
        options = copy.deepcopy(self.fixed)
        for key, value in chosen.items():
            *tables, entry = key.split(".", 1)
            (options.setdefault(tables[0], {}) if tables else options)[entry] = value
        task, model = options.pop("task", ""), options.pop("model", "")
        needs(bool(task and model), OptionError, SUBJECT, 'task = "..." and model = "..."', f"{task!r} and {model!r}")
        settings = {key: options.pop(key) for key in Settings.__dataclass_fields__ if key in options}
        return Config.resolve(create(task, options), model, Settings(**settings))


def load_study(sweep: Sweep, name: str, out: Path, storage: str) -> optuna.Study:
    """Returns the study of this name on a storage, begun or loaded, with the combinations of a grid in its queue."""
    with reachable(SUBJECT, out):
        out.mkdir(parents=True, exist_ok=True)
        refuse_links(out / "sweep.db", out)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats are experimental
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    retry = optuna.storages.RetryHeartbeatStaleTrialCallback()
    try:
        study = optuna.create_study(
            storage=RDBStorage(storage, heartbeat_interval=10, heartbeat_stale_trial_callback=retry),
            study_name=name,
            pruner=optuna.pruners.NopPruner() if sweep.grid else optuna.pruners.MedianPruner(),
            direction="maximize" if sweep.headline == "accuracy" else "minimize",
            load_if_exists=True,
        )
    except (ImportError, SQLAlchemyError, optuna.exceptions.OptunaError) as error:
        raise OptionError(f"{SUBJECT} needs a storage that optuna can open, got {storage}: {error}.") from error
    asked = {"fixed": sweep.fixed, "vary": sweep.vary}
    begun = study.user_attrs.get("options", asked) == asked
    needs(begun, RunError, SUBJECT, f"the options that study {name!r} began with", "others; name another --out")
    study.set_user_attr("options", asked)
    for chosen in sweep.grid:
        study.enqueue_trial(chosen, skip_if_exists=True)
    return study


def run_trials(sweep: Sweep, study: optuna.Study, out: Path, most: int | None) -> int | None:
    """Runs trials, beside those of other processes, until `most` are done or the grid is; returns a signal, or None."""

    def objective(trial: Trial) -> float:
        chosen = {key: _suggest(trial, key, values) for key, values in sweep.vary.items()}
        name = _name(chosen)
        others = study.get_trials(deepcopy=False, states=(TrialState.RUNNING, *DONE))
        if any(other.user_attrs.get("run") == name and other.number < trial.number for other in others):
            raise optuna.TrialPruned  # another process has this run
        trial.set_user_attr("run", name)
        try:
            config, path = sweep.config(chosen), out / name
            kind = "test" if config.build_task().validation() is None else "validation"

            class Reporting(Terminal):
                def record(self, record: Mapping[str, Any]) -> None:
                    super().record(record)
                    if record["kind"] == kind:
                        trial.report(record[sweep.headline], record["step"])
                        if trial.should_prune():
                            raise optuna.TrialPruned

            with reachable(SUBJECT, path):
                refuse_links(path, out)
            outcome = resume(path, config, Reporting()) if is_run(path) else train(config, path, Reporting())
            if outcome.signal is not None:
                raise KeyboardInterrupt(outcome.signal)
        except (DivergedError, OptimizerError, OptionError) as error:
            say(f"{name}: {error}")
            raise optuna.TrialPruned from error
        except (StiefelkitError, KeyboardInterrupt):
            study.enqueue_trial(chosen)
            raise
        summary = summarise(path)
        trial.set_user_attr("test", summary.test[sweep.headline])
        return (summary.validation or summary.test)[sweep.headline]

    while True:
        optuna.storages.fail_stale_trials(study)
        states = [trial.state for trial in study.get_trials(deepcopy=False)]
        is_over = bool(sweep.grid) and TrialState.WAITING not in states
        if is_over or (most and sum(state in DONE for state in states) >= most):
            return None
        try:
            study.optimize(objective, n_trials=1)
        except KeyboardInterrupt as stop:
            if not stop.args:
                raise
            return stop.args[0]


def _suggest(trial: BaseTrial, key: str, values: Any) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(key, values)
    is_integer = isinstance(values["low"], int) and isinstance(values["high"], int)
    return trial.suggest_int(key, **values) if is_integer else trial.suggest_float(key, **values)


def _name(chosen: Mapping[str, object]) -> str:
    """Returns the name of a folder: readable, and cut with a digest where it would be too long."""
    words = ",".join(f"{key}={value}" for key, value in chosen.items()).replace("/", "_") or "run"
    return words if len(words) <= 100 else f"{words[:100]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"

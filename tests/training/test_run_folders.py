"""A run folder is taken as it was written, or refused in one sentence that says what changed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Killed, Watching, edit, flip, killed_at, killed_by, latest_state, refused, small, weights

from stiefelkit.errors import OptionError, RunError
from stiefelkit.training import checkpoint, run_folder, train
from stiefelkit.training.plot import plot
from stiefelkit.training.run_folder import summarise

pytest_plugins = ("tiny_runs",)
torch.set_num_threads(1)


def test_an_edited_config_with_a_new_digest_does_not_fit_the_checkpoint(run: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train.train(small(lr=0.5), tmp_path / "other", killed_at(1))
    shutil.copy(tmp_path / "other/config.json", run)
    assert "config.json" in refused(run)


def test_a_prolonged_run_can_be_resumed_from_either_side_of_a_crash(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function, call in [("replace", 1), ("fsync", 1), ("fsync", 2), ("fsync", 3), ("fsync", 4), ("replace", 2)]:
        path = Path(shutil.copytree(whole, tmp_path / f"{function}-{call}"))
        killed_by(monkeypatch, function, call)
        with pytest.raises(Killed):
            train.resume(path, {"steps": 8})
        monkeypatch.undo()
        again = Path(shutil.copytree(path, tmp_path / f"{function}-{call}-again"))
        train.resume(again)  # with whatever steps the crash left
        assert train.resume(path, {"steps": 8}).step == 8
        assert train.resume(path).already
        # a damaged last checkpoint: the one before knows six steps only, and config.json says eight
        latest_state(path).unlink()
        assert train.resume(path).step == 8


def test_a_stray_folder_is_no_checkpoint_and_displaces_none(run: Path, whole: Path) -> None:
    for name in ("step-99999999", "step-88888888", "step-", "step-x"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints/step-77777777").write_text("a file")
    (run / "checkpoints/.tmp-00000003").mkdir()
    (run / "checkpoints/.tmp-00000005").write_text("a file")
    display = Watching()
    assert train.resume(run, display=display).step == 6
    assert not display.notes
    assert [path.name for path in checkpoint.checkpoints(run / "checkpoints")] == ["step-00000004", "step-00000006"]
    assert weights(run) == weights(whole)
    assert (run / "checkpoints/step-99999999").exists()


def test_what_a_kill_has_left_of_a_checkpoint_goes_with_the_next_one(tmp_path: Path) -> None:
    for step in range(3):
        checkpoint.save(tmp_path, step, {})
    for left in ([], [checkpoint.STATE], [checkpoint.TENSORS]):
        (tmp_path / "step-00000000").mkdir()
        for name in left:
            (tmp_path / "step-00000000" / name).touch()
        checkpoint.save(tmp_path, 2, {})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(run: Path, whole: Path) -> None:
    shutil.copytree(run / "checkpoints/step-00000002", run / "checkpoints/step-99999999")
    flip(run / "checkpoints/step-00000004/tensors.safetensors", -1)
    display = Watching()
    assert train.resume(run, display=display).step == 6
    assert ["step-99999999" in display.notes[0], "step-00000004" in display.notes[1]] == [True, True]
    shutil.rmtree(run / "checkpoints/step-99999999")
    assert weights(run) == weights(whole)


@pytest.mark.parametrize(
    "path", ["model", "optimizer", "rng", "config", "log", "log/bytes", "config/config", "optimizer/state/0/exp_avg"]
)
def test_a_checkpoint_that_lacks_an_entry_is_refused_by_its_name(path: str, run: Path) -> None:
    step, state = checkpoint.load(run / "checkpoints/step-00000004")
    *tables, entry = path.split("/")
    table: Any = state
    for name in tables:
        table = table[int(name) if name.isdigit() else name]
    del table[entry]
    checkpoint.save(run / "checkpoints", step, state)
    with pytest.raises(RunError, match=f"step-00000004.*{entry}"):
        train.resume(run)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 100_000_001):
        checkpoint.save(tmp_path, step, {})
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-100000000", "step-100000001"]


@pytest.mark.parametrize("left", ["nothing", "empty log", "half a line", "stray folder"])
def test_a_run_that_died_before_its_first_checkpoint_starts_again(left: str, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_folder.RunFolder.create(path, small(), 1234)
    if left == "empty log":
        (path / "log.jsonl").touch()
    if left == "half a line":
        (path / "log.jsonl").write_text('{"kind": "tra')
    if left == "stray folder":
        (path / "checkpoints/step-99999999").mkdir(parents=True)
    assert train.resume(path).step == 6
    assert weights(path) == weights(whole)


def test_a_run_without_checkpoints_that_has_a_log_says_how_to_start_again(run: Path, whole: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    assert "log.jsonl" in refused(run)
    (run / "log.jsonl").unlink()
    assert train.resume(run).step == 6
    assert weights(run) == weights(whole)


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "step": 3}',
        '{"kind": "train", "step": 3, "loss": "small"}',
        '{"kind": "test", "step": 3, "loss": 1.0, "accuracy": NaN}',
        '{"kind": "test", "step": 1' + "0" * 400 + ', "loss": 1.0, "accuracy": 0.5}',
        '{"kind": "train", "step": 3, "loss": 1, "gradient_norm": 1, "ms_per_step": 1, '
        '"orthogonality": {"a": {"error": 1, "limit": 0}}}',
    ],
)
def test_readers_name_the_line_of_a_log_that_they_cannot_take(line: str, run: Path) -> None:
    with open(run / "log.jsonl", "a") as file:
        file.write(line + "\n")
    number = len((run / "log.jsonl").read_bytes().splitlines())
    for reader in (summarise, lambda path: plot([path], path)):
        with pytest.raises(RunError, match=f"line {number}"):
            reader(run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_run_of_a_gpu_is_read_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    train.train(small(), path)
    monkeypatch.setattr(run_folder, "_digest", lambda record: "0")
    edit(path / "config.json", lambda record: (record.update(sha256="0"), record["config"].update(device="cuda")))
    assert summarise(path)
    assert plot([path], path)
    with pytest.raises(OptionError, match="finds none; use --device cpu"):
        train.train(small(device="cuda"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_log_that_is_a_folder_is_refused_before_the_first_checkpoint_too(tmp_path: Path) -> None:
    run_folder.RunFolder.create(tmp_path / "run", small(), 1234)
    (tmp_path / "run/log.jsonl").mkdir()
    assert "log.jsonl" in refused(tmp_path / "run")
    (tmp_path / "run/log.jsonl").rmdir()
    (tmp_path / "run/checkpoints").write_text("a file")
    assert "checkpoints" in refused(tmp_path / "run")

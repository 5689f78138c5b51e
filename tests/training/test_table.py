"""Tables: which rows are read, what is asked, how they are split and scaled, and what is refused."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_laws import Constant, check_task

from stiefelkit.cli import main
from stiefelkit.errors import DataError
from stiefelkit.testing import seeds
from stiefelkit.training import checkpoint, data
from stiefelkit.training.run_folder import RunFolder, summarise
from stiefelkit.training.tasks.table import Table

ROWS = 400


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(data.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(columns: Mapping[str, Sequence[Any]], name: str = "x.csv", delimiter: str = ",") -> str:
    lines = [delimiter.join(columns), *(delimiter.join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    Path(name).write_text("\n".join(lines) + "\n")
    return name


def numbers(count: int = ROWS, offset: int = 0) -> list[float]:
    return np.random.default_rng(seeds.seed(offset)).normal(3.0, 2.0, count).tolist()


def one_series() -> str:
    return written({"time": range(ROWS), "wind": numbers(), "level": numbers(offset=1)})


def many_series(lengths: Sequence[int] = (6,) * 90) -> str:
    ids = [f"s{k}" for k, length in enumerate(lengths) for _ in range(length)]
    source = np.random.default_rng(seeds.seed(2))
    order = source.permutation(len(ids))  # rows of different series stand among each other
    words = [f"class {int(name[1:]) % 3}" for name in ids]
    columns = {"who": [ids[k] for k in order], "a": range(len(ids)), "kind": [words[k] for k in order]}
    return written(columns)


def rows_of(task: Table, part: str, column: int = 0) -> list[list[int]]:
    """What a part reads in a column of integers, in the file's own units."""
    x, _ = task._prepared.parts[part].all()
    mean, deviation = list(task.scales.values())[column]
    return (x[..., column] * deviation + mean).round().int().tolist()


def test_the_laws_of_tasks_hold_for_each_layout() -> None:
    file = one_series()
    ways: list[dict[str, Any]] = [{"window": 9}, {"window": 4, "ahead": 3}]
    for options in (*ways, {"window": 1, "target": "time", "kind": "regression"}):
        check_task("table", file=file, **options)
    many_series()
    check_task("table", file="x.csv", series="who")
    check_task("table", file="x.csv", series="who", window=3)


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_windows_of_one_series_are_its_rows_in_order_and_none_crosses_a_border(ahead: int) -> None:
    task = Table(file=one_series(), target="level", features="time", window=7, ahead=ahead)
    borders = {"train": (0, 280), "valid": (280, 340), "test": (340, 400)}
    for part, (first, end) in borders.items():
        starts = range(first, end - 7 - ahead + 1)
        assert rows_of(task, part) == [list(range(start, start + 7)) for start in starts]
    truth = np.loadtxt("x.csv", delimiter=",", skiprows=1)[:, 2]
    mean, deviation = task.scales["level"]
    wanted = (truth[340 + 6 + ahead : 400] - mean) / deviation
    assert task.held_out()[1].tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_target_is_an_input_only_where_it_lies_ahead() -> None:
    file = one_series()
    assert list(Table(file=file, window=4).scales) == ["time", "wind", "level"]
    assert Table(file=file, window=4).input_size == 2
    ahead = Table(file=file, window=4, ahead=1)
    assert ahead.input_size == 3
    x, y = ahead.held_out()
    assert torch.equal(x[1:, -1, 2], y[:-1])
    assert Table(file=file, window=4, ahead=1, features="wind").input_size == 1


def test_scales_are_those_of_the_training_part_alone_and_what_is_constant_there_is_only_shifted() -> None:
    values = [*numbers(280), *(1e6 + k for k in range(120))]
    constant = [2.5] * 300 + [3.5] * 100
    task = Table(file=written({"a": values, "b": constant, "y": numbers(offset=1)}), window=5)
    assert task.scales["a"] == pytest.approx((np.mean(values[:280]), np.std(values[:280])))
    x, y = task._prepared.parts["train"].x, task._prepared.parts["train"].y
    for part in (x[:280, 0], y[:280]):
        assert float(part.mean()) == pytest.approx(0, abs=1e-5)
        assert float(part.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert x[:, 1].tolist() == [0.0] * 300 + [1.0] * 100


def test_series_are_whole_sequences_each_in_one_part() -> None:
    task = Table(file=many_series(), series="who")
    assert task.classes == ("class 0", "class 1", "class 2")
    table = np.loadtxt("x.csv", delimiter=",", skiprows=1, dtype=str)
    expected = {tuple(map(int, table[table[:, 0] == f"s{k}", 1])) for k in range(90)}
    parts = {part: {*map(tuple, rows_of(task, part))} for part in ("train", "valid", "test")}
    assert [len(rows) for rows in parts.values()] == [62, 14, 14]
    assert set().union(*parts.values()) == expected
    windows = Table(file="x.csv", series="who", window=4)
    for part, rows in parts.items():
        assert {*map(tuple, rows_of(windows, part))} == {row[k : k + 4] for row in rows for k in range(3)}


@pytest.mark.parametrize(
    ("target", "kind", "expected"),
    [
        (["yes", "no"], "", ("no", "yes")),
        ([3, 7], "", (3, 7)),
        ([3, 7], "regression", ()),
        ([0.5, 1.5], "classification", (0.5, 1.5)),
        (["1e1", "2"], "", ()),
    ],
)
def test_words_and_integers_are_classes_unless_kind_says_otherwise(
    target: list[Any], kind: str, expected: tuple[Any, ...]
) -> None:
    task = Table(file=written({"a": numbers(), "y": target * (ROWS // 2)}), window=3, kind=kind)
    assert task.classes == expected
    assert task.output_size == max(1, len(expected))
    assert task.headline == ("accuracy" if expected else "loss")


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_other_delimiters_and_a_mark_of_byte_order_change_nothing(delimiter: str) -> None:
    columns = {"a": numbers(), "y": numbers(offset=1)}
    plain = Table(file=written(columns), window=3).held_out()
    path = Path(written(columns, "other.csv", delimiter))
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert all(map(torch.equal, plain, Table(file="other.csv", window=3).held_out()))


def test_the_baseline_is_the_best_constant_or_with_ahead_the_last_value() -> None:
    words = written({"a": numbers(), "y": ["yes", "no", "no", "no"] * 100})
    task = Table(file=words, window=1)
    shares = task.held_out()[1].bincount() / len(task.held_out()[1])
    assert task.evaluate(Constant(shares.log())) == pytest.approx(task.baseline, rel=1e-5)
    walk = np.random.default_rng(seeds.seed()).normal(size=ROWS).cumsum()
    task = Table(file=written({"y": walk.tolist(), "a": numbers()}, "walk.csv"), target="y", window=3, ahead=1)
    x, y = task.held_out()
    assert task.baseline["loss"] == pytest.approx(float((x[:, -1, 1] - y).square().mean()), rel=1e-5)
    constant = Table(file="walk.csv", target="y", window=3)
    assert constant.baseline["loss"] == pytest.approx(float(constant.held_out()[1].var(correction=0)), rel=1e-5)


def test_a_file_is_found_in_the_folder_of_data_or_from_here(tmp_path: Path) -> None:
    one_series()
    (tmp_path / "d" / "table").mkdir(parents=True)
    Path("x.csv").rename(tmp_path / "d" / "table" / "y.csv")
    with data.named(tmp_path / "d"):
        expected = tmp_path / "d" / "table" / "y.csv"
        assert Table(file="y.csv", window=3)._path() == Table(window=3)._path() == expected
        one_series()
        assert Table(file="x.csv")._path() == tmp_path / "x.csv"
    assert Table(file=str(tmp_path / "x.csv"), window=3).sequences == 278


def test_a_file_that_changes_is_read_anew_by_the_next_task_and_not_by_one_that_has_begun() -> None:
    task = Table(file=one_series(), window=3)
    before = task.held_out()[1]
    written({"a": numbers(offset=7), "level": numbers(offset=8)})
    assert torch.equal(task.held_out()[1], before)
    assert not torch.equal(Table(file="x.csv", window=3).held_out()[1], before)


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing": ("", {"file": "y.csv"}, "y.csv"),
    "column": ("", {"target": "levle"}, "did you mean"),
    "one series": ("", {"window": None}, "--series"),
    "long": ("", {"window": 60, "ahead": 1}, "60 rows"),
    "many": ("", {"target": "time"}, "--kind"),
    "leak": ("", {"features": "wind,level"}, "level"),
    "empty": (" ", {}, "whole file"),
    "no names": ("1,2\n3,4\n", {}, "names"),
    "short": ("a,b,y\n1,1,2\n3\n", {}, "column 'b'"),
    "nan": ("a,y\n1,2\nnan,4\n", {}, "row 2"),
    "no target": ("a,y\n1,2\n1,\n", {}, "column 'y'"),
    "words": ("a,y\n1,u\n1,v\n", {"kind": "regression"}, "'u'"),
    "constant": ("a,y\n" + "1,0.5\n" * 50, {}, "different"),
    "lengths": ("a,s,y\n1,1,0\n2,1,1\n3,2,0\n", {"window": None, "series": "s"}, "1 to 2"),
}


@pytest.mark.parametrize("way", BROKEN)
def test_what_is_no_table_is_refused_in_a_sentence(way: str) -> None:
    content, options, words = BROKEN[way]
    one_series()
    if content:
        Path("x.csv").write_text(content.strip(" "))
    with pytest.raises(DataError, match=words):
        Table(**{"file": "x.csv", "window": 3, **options}).held_out()


def test_a_run_is_trained_evaluated_and_plotted_without_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    table = f"table --file {one_series()} --window 5 --hidden-size 4 --batch-size 8 --steps 2 --model lstm"
    assert main(f"train {table} --target level --ahead 1 --out run".split()) == 0
    folder = RunFolder.open(Path("run"))
    task: Any = folder.config.build_task()
    net, last = folder.config.build_model(task), checkpoint.latest(folder.checkpoints)
    assert last is not None
    net.load_state_dict(last[1]["model"])
    assert task.evaluate(net)["loss"] == pytest.approx(summarise(Path("run")).test["loss"], rel=1e-5)
    assert main(f"train {table} --target time --kind classification --out classes".split()) == 0
    assert main("plot run classes --out plots".split()) == 2
    assert "one score and one loss" in capsys.readouterr().err
    Path("x.csv").unlink()
    assert main("plot run --out plots".split()) == 0

"""Text: what is read and what is to be predicted, where the state begins anew, which characters there are."""

import math
from pathlib import Path

import pytest
import small_data
import torch
from task_laws import Constant

from stiefelkit.errors import DataError
from stiefelkit.testing import seeds
from stiefelkit.training import data
from stiefelkit.training.tasks import chars
from stiefelkit.training.tasks.chars import Chars

TEXT = "".join(chr(ord("a") + (k * k + k // 7) % 23) for k in range(1000))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "text"
    root.mkdir()
    monkeypatch.setenv(data.VARIABLE, str(root))
    return root


def spoken(task: Chars, split: str) -> list[tuple[str, str]]:
    """What each sequence reads and what it must say; a dot where there is nothing."""
    alphabet = [*task._text().alphabet, "."]
    x, y = task._split(split).all()
    read = [[int(row.argmax()) if row.any() else -1 for row in rows] for rows in x]
    return [
        ("".join(alphabet[code] for code in codes), "".join(alphabet[max(code, -1)] for code in targets))
        for codes, targets in zip(read, y.tolist(), strict=True)
    ]


@pytest.mark.parametrize("ahead", [1, 5])
def test_windows_read_the_text_once_and_say_what_comes_later(folder: Path, ahead: int) -> None:
    (folder / "a.txt").write_text(TEXT)
    task = Chars(T=64, ahead=ahead)
    for split, part in (("train", TEXT[:900]), ("valid", TEXT[900:950]), ("test", TEXT[950:])):
        pairs = spoken(task, split)
        assert "".join(read for read, _ in pairs).rstrip(".") == part[:-ahead]
        assert "".join(said for _, said in pairs).rstrip(".") == part[ahead:]


def test_lines_begin_anew_and_their_ends_are_no_characters(folder: Path) -> None:
    for name in ("train", "valid", "test"):
        (folder / f"ptb.{name}.txt").write_text(" the cat\n\nsat  \n on the mat \na\n")
    task = Chars(reset="line", ahead=2)
    assert [read.rstrip(".") for read, _ in spoken(task, "test")] == [" the c", "s", " on the m"]
    assert [said.rstrip(".") for _, said in spoken(task, "test")] == ["he cat", "t", "n the mat"]
    assert "\n" not in task._text().alphabet
    assert task.input_size == task.output_size == len(set(" the catsonm"))


def test_batches_of_lines_are_padded_with_nothing(folder: Path) -> None:
    (folder / "a.txt").write_text("\n".join(["ab" * 9, "ab", "ba" * 30] * 20))
    task = Chars(reset="line")
    x, y = task.batch(0, 12, seeds.seed())
    assert torch.equal(x.sum(-1) == 1, y >= 0)
    assert not x[y < 0].any()
    output = torch.randn(*y.shape, task.output_size, generator=seeds.generator(1))
    rows = output[y >= 0].log_softmax(-1)
    bits = -rows[torch.arange(len(rows)), y[y >= 0]].mean() / math.log(2)
    assert float(task.loss(output, y)) == pytest.approx(float(bits), rel=1e-5)


def test_the_baseline_is_what_frequencies_score(folder: Path) -> None:
    small_data.text(folder / "a.txt")
    task = Chars(T=30)
    train_part = (folder / "a.txt").read_text()
    train_part = train_part[: int(0.9 * len(train_part))]
    counts = torch.tensor([float(train_part[1:].count(letter)) for letter in sorted(set(train_part))])
    scores = task.evaluate(Constant((counts / counts.sum()).log()), chunk=3)
    assert scores == pytest.approx(task.baseline, rel=1e-5)
    uniform = task.evaluate(Constant(torch.zeros(len(counts))))
    assert uniform["loss"] == pytest.approx(math.log2(len(counts)), rel=1e-5)


def test_characters_that_training_lacks_are_neither_input_nor_target(folder: Path) -> None:
    (folder / "a.txt").write_text(f"{3 * TEXT:.2870}Z{TEXT:.129}")
    task = Chars(T=50)
    assert "Z" not in task._text().alphabet
    (read, said), *_ = spoken(task, "test")
    assert (read.index("."), said.index(".")) == (20, 19)
    assert read.count(".") == said.count(".") == 1
    assert math.isfinite(task.evaluate(Constant(torch.zeros(task.output_size)))["loss"])


def test_three_files_are_three_parts(folder: Path) -> None:
    for name, letters in (("train", "abcabc"), ("valid", "bca"), ("test", "ccb")):
        (folder / f"x.{name}.txt").write_text(letters)
    (folder / "readme.md").write_text("no text")
    task = Chars(T=4)
    assert spoken(task, "train") == [("abca", "bcab"), ("b...", "c...")]
    assert spoken(task, "test") == [("cc", "cb")]
    (folder / "other.txt").write_text(TEXT)
    assert Chars(file="x.*.txt").input_size == 3
    assert Chars(file="other.txt").input_size == len(set(TEXT[:900]))


def test_a_mark_of_byte_order_is_no_character(folder: Path, tmp_path: Path) -> None:
    for place, encoding in ((folder, "utf-8"), (tmp_path / "marked", "utf-8-sig")):
        place.mkdir(exist_ok=True)
        (place / "a.txt").write_text("aß\n語😀" * 100, encoding=encoding)
    plain, marked = (chars.text(place, "", by_line=False) for place in (folder, tmp_path / "marked"))
    assert marked.alphabet == plain.alphabet == ["\n", "a", "ß", "語", "😀"]
    assert marked.digest == plain.digest


def test_what_is_no_text_is_refused(folder: Path) -> None:
    for name, content, task, words in (
        ("readme.md", "", Chars(), "--file"),
        ("a.txt", "", Chars(), "train part"),
        ("a.txt", "abc\udcff\udcfe" * 50, Chars(), "UTF-8"),
        ("b.txt", TEXT, Chars(), "b.txt"),
        ("b.txt", TEXT, Chars(file="b.txt", ahead=60), "--ahead"),
        ("c.txt", "a" * 950 + "é" * 50, Chars(file="c.txt"), "'é'"),
    ):
        (folder / name).write_text(content, "utf-8", "surrogateescape")
        with pytest.raises(DataError, match=words):
            task.held_out()


def test_a_part_without_a_known_target_adds_nothing():
    task, y = Chars(T=4), torch.full((2, 4), chars.NO_TARGET)
    assert set(task.totals(torch.zeros(2, 4, 5), y).values()) == {(0.0, 0)}

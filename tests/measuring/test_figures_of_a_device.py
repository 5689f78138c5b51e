"""`benchmarks.gpu`: a process for each part, a file that is whole after every cell, a page, and tables of asv."""

import importlib
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import device_rows
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import driver
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.scale import FULL, SCALES
from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.measuring.report.page import record_page
from stiefelkit.measuring.report.record import Figure, PartOutcome, Record, read_record

MACHINE = {
    "CPU": "a processor",
    "GPU": "a GPU",
    "device": "cuda",
    "torch": "2.13.0",
    "stiefelkit": "0.1",
    "driver": "1.2",
}
NINE_MINUTES = 540


@pytest.fixture
def record() -> Record:
    made = Record(MACHINE, "2026-01-01T00:00+00:00", "python -m benchmarks.gpu", finished=True)
    made.parts = [PartOutcome("laws", 3.0, 110), PartOutcome("maps", 4.0, 90, "it took too long.")]
    made.add(Figure("laws", "maps: frames", "cayley", "law", 0.1, holds=True), {})
    made.add(Figure("laws", "maps: frames", "givens", "law", None, holds=False, words="||W^H W - I||_F < 1"), {})
    made.add(Figure("maps", "64 x 64", "cayley", "s", 1.5e-3, 1e-4, 20, {"ratio": 2.0}), {"SM clock": 1755.0})
    made.add(Figure("maps", "64 x 64", "one product", "s", 1e-5), {"SM clock": 1755.0})
    made.left_out = {"maps": {"geotorch_cayley": "geotorch is not installed."}}
    return made


def says(*lines: object, code: str = "") -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import time\nfor line in {[json.dumps(line) for line in lines]!r}: print(line)\n{code}",
    ]


def test_the_parts_are_there_in_their_order_and_fit_into_nine_minutes():
    assert list(PARTS)[:3] == ["laws", "drift", "maps"]
    assert sum(part.seconds for part in PARTS.values()) < NINE_MINUTES
    assert FULL.time == 1
    for part in PARTS.values():
        module, _, name = part.where.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_what_a_process_says_is_taken_line_by_line(tmp_path):
    assert list(driver.said(says({"a": 1}, {"b": 2}), 1e6, tmp_path / "log")) == [{"a": 1}, {"b": 2}]


def test_a_process_that_fails_or_hangs_loses_no_line_before_and_is_said_to(tmp_path, monkeypatch):
    lines = list(driver.said(says({"a": 1}, code="raise ValueError('too much')"), 1e6, tmp_path / "log"))
    assert lines[0] == {"a": 1}
    assert "too much" in lines[1]["error"]
    monkeypatch.setattr(driver, "GRACE", 0.0)
    (line,) = driver.said(says(code="time.sleep(600)"), 0.2, tmp_path / "log")
    assert "was ended" in line["error"]


def test_the_file_is_rewritten_after_every_cell_and_one_failure_does_not_end_the_rest(tmp_path, monkeypatch):
    path, seen = tmp_path / "gpu.json", []

    def said(words, seconds, log):
        if words[3] == "laws":
            yield {"error": "it fell over."}
            return
        for number in range(2):
            seen.append(len(read_record(path).rows))
            yield {"figure": vars(Figure("maps", "t", f"c{number}", "s", 1.0)), "clocks": {}}

    monkeypatch.setattr(driver, "said", said)
    made = driver.measure(["laws", "maps"], "smoke", "cpu", path, "command", lambda line: None)
    assert seen == [0, 1]
    assert made.broken == ["laws: it fell over."]
    assert read_record(path) == made
    assert all({"torch", "stiefelkit", "CPU"} <= set(row["machine"]) for row in made.rows)


def test_a_record_comes_back_from_its_file_and_others_are_refused(tmp_path, record):
    path = tmp_path / "gpu.json"
    record.write(path)
    assert read_record(path) == record
    for content in ("", "[]", "{}", json.dumps({**vars(record), "parts": [], "rows": [{"part": "maps"}]})):
        path.write_text(content)
        with pytest.raises(errors.RunError, match=re.escape(str(path))):
            read_record(path)
    with pytest.raises(errors.RunError, match="can be read"):
        read_record(tmp_path / "none.json")


def test_the_page_has_every_row_what_broke_and_what_was_left_out(record):
    page = record_page(record)
    tree = ElementTree.fromstring(page.split("\n", 1)[1])
    text = " ".join("".join(tree.itertext()).split())
    words = (
        "a GPU",
        "1.2",
        "1 of 2 hold",
        "||W^H W - I||_F < 1",
        "1.50",
        "0.100",
        "geotorch is not installed",
        "too long",
    )
    assert [word for word in words if word not in text] == []


def test_the_report_draws_a_file_and_measures_nothing(tmp_path, record, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record.write(Path("gpu.json"))
    assert main(["report", "--from", "gpu.json", "--out", "gpu.html"]) == 0
    assert Path("gpu.html").read_text() == record_page(record)
    assert main(["report", "--from", "gpu.json", "--json", "other.json"]) != 0
    assert "--json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"machine": {}},
        {"machine": 3},
        {"left_out": []},
        {"left_out": {"maps": 3}},
        {"parts": [{"part": [], "seconds": "x", "limit": 0}]},
    ],
    ids=str,
)
def test_a_file_that_lacks_something_is_refused_in_a_sentence(change, tmp_path, record, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record.write(Path("gpu.json"))
    Path("gpu.json").write_text(json.dumps(json.loads(Path("gpu.json").read_text()) | change))
    assert main(["report", "--from", "gpu.json", "--out", "gpu.html"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "gpu.json" in said
    assert not Path("gpu.html").exists()


def test_asv_takes_in_the_rows_of_a_file(tmp_path, record, monkeypatch):
    record.write(tmp_path / "gpu.json")
    monkeypatch.setenv(device_rows.VARIABLE, str(tmp_path / "gpu.json"))
    device_rows._medians.cache_clear()
    try:
        rows, _ = device_rows._axes("s")
        assert rows == ("maps: 64 x 64: cayley", "maps: 64 x 64: one product")
        table = device_rows.Times()
        table.setup(rows[0], "recorded")
        assert table.track_seconds(rows[0], "recorded") == 1.5e-3
    finally:
        device_rows._medians.cache_clear()
    with pytest.raises(NotImplementedError, match="names no file"):
        device_rows.Times().setup("maps: another", "recorded")


@pytest.mark.parametrize(("words", "said"), [(["--device", "cpu"], "add --dry-run"), (["--parts", "non"], "'non'")])
def test_what_cannot_be_measured_is_said(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_every_scale_names_laws_that_there_are():
    from stiefelkit.testing import LAWS, OPTIMIZER_LAWS

    for scale in SCALES.values():
        assert set(scale.laws) <= set(LAWS)
        assert set(scale.steps_laws) <= set(OPTIMIZER_LAWS)

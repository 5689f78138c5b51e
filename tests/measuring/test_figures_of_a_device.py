"""`benchmarks.gpu`: a process for each part, a file that is whole after every table, and a page."""

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import recorded
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.scale import SCALES
from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.measuring.contest import Race, Row
from stiefelkit.measuring.report import Part, Record, read_record

MACHINE = {"CPU": "a processor", "GPU": "a GPU", "device": "cuda", "torch": "2.13.0", "stiefelkit": "0.1"}
NINE_MINUTES = 540


@pytest.fixture
def record() -> Record:
    made = Record(MACHINE, "python -m benchmarks.gpu", "2026-01-01T00:00+00:00", finished=True)
    laws = [Row({"contender": "cayley", "holds": True, "words": "", "seconds": 0.1})]
    laws += [Row({"contender": "givens", "holds": False, "words": "||W^H W - I||_F < 1", "seconds": 0.1})]
    times = Race("n = 64", "times", [Row({"contender": "cayley", "seconds": 1.5e-3, "samples": 20, "bytes": 2e6})])
    made.parts = [
        Part("laws", 3.0, 110.0, [Race("maps: frames", "law", laws)]),
        Part("maps", 4.0, 90.0, [times], {"geotorch_cayley": "geotorch is not installed."}, "it took too long."),
    ]
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
    assert SCALES["full"].time == 1


def test_a_process_that_fails_or_hangs_loses_no_line_before_and_is_said_to(tmp_path, monkeypatch):
    lines = list(command.said(says({"a": 1}, code="raise ValueError('too much')"), 1e6, tmp_path / "log"))
    assert lines[0] == {"a": 1}
    assert "too much" in lines[1]["error"]
    monkeypatch.setattr(command, "GRACE", 0.0)
    (line,) = command.said(says(code="time.sleep(600)"), 0.2, tmp_path / "log")
    assert "was ended" in line["error"]


def test_the_file_is_rewritten_after_every_table_and_one_failure_does_not_end_the_rest(tmp_path, monkeypatch):
    path, seen = tmp_path / "gpu.json", []

    def said(words, seconds, log):
        if words[3] == "laws":
            yield {"error": "it fell over."}
            return
        for number in range(2):
            seen.append(len(read_record(path).parts[-1].races))
            row = {"figures": {"contender": f"c{number}", "seconds": 1.0}, "family": "", "is_peer": False}
            yield {"race": {"subject": "t", "operation": "times", "rows": [row], "left_out": {}, "unit": None}}

    monkeypatch.setattr(command, "said", said)
    made = command.measure(["laws", "maps"], "smoke", "cpu", path, "command", lambda line: None)
    assert seen == [0, 1]
    assert made.broken == ["laws: it fell over."]
    assert read_record(path) == made
    assert {"torch", "stiefelkit", "CPU"} <= set(made.machine)


def test_a_record_comes_back_from_its_file_and_others_are_refused(tmp_path, record):
    path = tmp_path / "gpu.json"
    record.write(path)
    assert read_record(path) == record
    for content in ("[]", json.dumps({"kind": record.kind, "parts": [{"name": 1}]})):
        path.write_text(content)
        with pytest.raises(errors.RunError, match=re.escape(str(path))):
            read_record(path)
    with pytest.raises(errors.RunError, match="read"):
        read_record(tmp_path / "none.json")


def test_the_page_has_every_row_what_broke_and_what_was_left_out(record):
    tree = ElementTree.fromstring(record.page().split("\n", 1)[1])
    text = " ".join("".join(tree.itertext()).split())
    words = ("a GPU", "1 of 2 hold", "||W^H W - I||_F < 1", "1.50", "2.00", "geotorch is not installed", "too long")
    assert [word for word in words if word not in text] == []


def test_the_report_draws_a_file_and_measures_nothing(tmp_path, record, monkeypatch, capsys):
    record.write(Path("gpu.json"))
    assert main(["report", "--from", "gpu.json", "--out", "gpu.html"]) == 0
    assert Path("gpu.html").read_text() == record.page()
    Path("gpu.json").write_text("{}")
    assert main(["report", "--from", "gpu.json", "--out", "other.html"]) == 2
    assert "gpu.json" in capsys.readouterr().err
    assert not Path("other.html").exists()


@pytest.mark.parametrize(("words", "said"), [(["--device", "cpu"], "add --dry-run"), (["--parts", "non"], "'non'")])
def test_what_cannot_be_measured_is_said(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_figures_of_gpus_are_rows_of_asv_and_pages(monkeypatch):
    for path in Path(recorded.__file__).parent.glob("results/gpu/*/gpu.json"):
        monkeypatch.setenv(recorded.VARIABLE, str(path))
        assert all(recorded._figures(name) for name in ("seconds", "worst", "bytes", "error_over_limit"))
        assert read_record(path).page()


def test_shares_of_a_part_are_one_table(record):
    (race,) = record.parts[1].races
    other = Race(race.subject, race.operation, [Row({"contender": "givens", "seconds": 2e-3})], {"a": "b"})
    command.add(record.parts[1], other)
    assert [[row.name for row in each.rows] for each in record.parts[1].races] == [["cayley", "givens"]]
    assert race.left_out == {"a": "b"}
    shares = [replace(SCALES["full"], share=(number, 3)).mine(range(7)) for number in range(3)]
    assert sorted(itertools.chain(*shares)) == list(range(7))

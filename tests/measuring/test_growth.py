"""How time and memory are said to grow. No test asserts a time."""

import json
import math
from pathlib import Path

import pytest
import torch

import stiefelkit as sk
from stiefelkit.cli import main
from stiefelkit.measuring.clock import peak_bytes
from stiefelkit.measuring.contest import Race, Row
from stiefelkit.measuring.frames import PRODUCT, growth, races
from stiefelkit.measuring.plans import ParametrizationRace
from stiefelkit.testing import seeds

CPU = torch.device("cpu")


def fitted(**changes):
    small = {"seed": seeds.seed(), "sizes": ((4, 4), (8, 8), (16, 16)), "repeats": 1, "seconds": 1e-3, "memory": True}
    one = {"precisions": ("exact",), "operations": ("forward_backward",)}
    return growth(list(races(ParametrizationRace(**{**small, **one, **changes}))))


def test_the_exponent_is_that_between_the_two_largest_squares():
    like = {"operation": "forward_backward", "contender": "cayley (exact)", "dtype": "float32", "device": "cpu"}
    rows = [{**like, "n": n, "p": p, "seconds": 1e-4 + n**3} for n, p in ((64, 64), (256, 256), (128, 128), (512, 8))]
    (found,) = growth([Race("", "", [Row(row)], unit=row["n"] ** 2.5) for row in rows])
    assert [(row.name, row["points"]) for row in found.rows] == [(PRODUCT, [128, 256]), ("cayley", [128, 256])]
    assert [row["exponent"] for row in found.rows] == pytest.approx([2.5, 3.0])
    assert growth([Race("", "", [Row(rows[0])], unit=1.0)]) == []


# Memory


def test_the_peak_is_what_was_held_at_once_not_what_was_asked_for():
    def run() -> None:
        a = torch.empty(1000)
        b = torch.empty(3000)
        del a
        c = torch.empty(2000)
        del b, c

    assert peak_bytes(run, CPU) == 4 * 5000
    assert peak_bytes(lambda: None, CPU) == 0


# The measurement


@pytest.mark.slow
def test_every_member_is_measured_against_what_it_declares():
    time, memory = fitted()
    assert (time.operation, memory.operation) == ("time", "memory")
    assert {row.name for row in time.rows} == {PRODUCT, *sk.available()}
    for row in (*time.rows, *memory.rows):
        assert row["points"] == [8, 16]
        assert math.isfinite(row["exponent"])
    of_time = {row.name: row for row in time.rows}
    for name, cls in sk.available().items():
        dtype = torch.float32 if cls.supports((4, 4), torch.float32) is None else torch.complex64
        assert of_time[name]["expected"] == cls((4, 4), dtype=dtype).traits.cost_exponent
        assert of_time[name]["dtype"] == str(dtype).removeprefix("torch.")
    assert of_time[PRODUCT]["expected"] == 3


def test_the_command_prints_and_writes_the_fits(tmp_path: Path, capsys, monkeypatch):
    rows = tmp_path / "rows.json"
    words = (
        "bench parametrizations --parametrizations cayley,fourier --sizes 4,8,8x4 --memory --repeats 1 --seconds 1e-3"
    )
    assert main([*words.split(), "--json", str(rows)]) == 0
    shown = capsys.readouterr().out
    assert "time against n" in shown
    assert "4 to 8" in shown
    assert "fourier, complex64" in shown
    assert {row.get("what") for row in json.loads(rows.read_text())} == {None, "time", "memory"}

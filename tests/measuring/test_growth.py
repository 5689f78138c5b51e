"""How time and memory are said to grow. No test asserts a time."""

import json
import math
from pathlib import Path

import pytest
import torch

import stiefelkit as sk
from stiefelkit.cli import main
from stiefelkit.measuring.clock import peak_bytes
from stiefelkit.measuring.frames import races
from stiefelkit.measuring.growth import LOGARITHM, PRODUCT, fit, growth
from stiefelkit.measuring.plans import ParametrizationRace
from stiefelkit.testing import seeds

CPU = torch.device("cpu")


def fitted(**changes):
    small = {"seed": seeds.seed(), "sizes": ((4, 4), (8, 8), (16, 16)), "repeats": 1, "seconds": 1e-3, "memory": True}
    one = {"precisions": ("exact",), "operations": ("forward_backward",)}
    return growth(list(races(ParametrizationRace(**{**small, **one, **changes}))))


# The fit


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0])
def test_a_power_law_is_found_with_no_spread(exponent):
    xs = [64, 128, 256, 512]
    law = fit(xs, [7e-6 * x**exponent for x in xs], exponent)
    assert law.exponent == pytest.approx(exponent)
    assert law.spread == pytest.approx(0, abs=1e-6)
    assert (law.first, law.last, law.overhead_until) == (64, 512, None)


def test_what_is_paid_whatever_the_size_is_left_out_and_named():
    xs = [16, 32, 64, 128, 256]
    law = fit(xs, [1e-4 + 1e-9 * x**3 for x in xs], 3.0)
    assert law.overhead_until == 32
    assert (law.first, law.last) == (64, 256)
    flat = fit(xs, [1.0] * 5, 3.0)
    assert (flat.first, flat.exponent, flat.spread) == (128, 0.0, None)
    assert fit([5], [1.0], 3.0).exponent is None


def test_faster_means_beyond_the_spread_and_a_logarithm():
    xs = [128, 256, 512, 1024]
    with_log = fit(xs, [x**2 * math.log(x) for x in xs], 2.0)
    cubic = fit(xs, [x**3 for x in xs], 2.0)
    assert with_log.exponent is not None
    assert 2 < with_log.exponent < 2 + LOGARITHM
    assert not with_log.faster_than(2.0)
    assert cubic.faster_than(2.0)
    assert not cubic.faster_than(3.0)


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
        assert row["points"] == [4, 8, 16]
        assert all(value > 0 for value in row["values"])
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
    assert "time against n, 4 to 8" in shown
    assert "fourier, complex64" in shown
    assert {row.get("what") for row in json.loads(rows.read_text())} == {None, "time", "memory"}

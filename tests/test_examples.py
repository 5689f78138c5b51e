"""The programs of examples/ run as they stand."""

import importlib.util
import re
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, words, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split()])
    module.main()


def test_a_large_rotation_spreads_the_outliers_and_stays_a_rotation(monkeypatch, capsys):
    run("large_rotation", "--n 32 --steps 12", monkeypatch)
    shown = capsys.readouterr().out
    kurtosis = [float(found) for found in re.findall(r"kurtosis +([\d.]+)", shown)]
    assert len(kurtosis) == 12
    assert min(kurtosis) < kurtosis[0] / 5
    (worst,) = re.findall(r"at worst ([\d.]+) limits", shown)
    assert float(worst) <= 2

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


def test_every_optimizer_solves_procrustes_pca_and_ica_without_a_module(monkeypatch, capsys):
    run("frames", "--steps 120", monkeypatch)
    _, *rows = capsys.readouterr().out.splitlines()
    found = [(row[:24].strip(), row[24:48].strip(), *map(float, row[48:].split())) for row in rows]
    assert len({name for _, name, *_ in found}) == 6
    assert len(found) == 3 * 6
    for problem, name, error, drift in found:
        assert error < 0.02, (problem, name)
        assert drift <= 20, (problem, name)

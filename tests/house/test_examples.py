"""The programs of examples/ run as they stand."""

import itertools
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import stiefelkit as sk
from stiefelkit.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split()])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("options", ["", "--dtype bfloat16 --optimizer SGDG"])
def test_a_large_rotation_spreads_the_outliers_and_stays_a_rotation(options, monkeypatch, capsys):
    run("large_rotation", f"--n 32 --steps 12 {options}", monkeypatch)
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


def test_a_net_is_fine_tuned_by_rotations_that_merge_and_fold(monkeypatch, capsys):
    run("finetune", "--steps 60", monkeypatch)
    *_, blocks, reflectors = capsys.readouterr().out.splitlines()
    for row in (blocks, reflectors):
        numbers, before, after, limits, restored, folded = map(float, row[14:].split())
        assert numbers < 3000
        assert after > before + 0.2
        assert limits <= 2
        assert restored == 0
        assert folded < 1e-4


@pytest.mark.slow
def test_certificates_of_convolutions_stand_on_layers_of_norm_1(monkeypatch, capsys):
    run("certified", "--epochs 8", monkeypatch)
    _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) >= 2
    for row in rows[:2]:  # a third is orthogonium's, where it is installed
        clean, *certified, excess, _, _ = map(float, row[18:].split())
        assert clean > 0.8
        assert sorted(certified, reverse=True) == certified
        assert 0.2 < certified[-1] < certified[0] < clean
        assert excess < 1e-5


def test_transitions_near_a_group_are_snapped_into_it_and_a_net_is_told_by_length(monkeypatch, capsys, tmp_path):
    sizes = "--hidden-size 50 --options.heads 2 --steps 60 --rise 30 --test-T 256 --test-size 2"
    assert main(f"train words --group S3 --model reflector {sizes} --out {tmp_path / 'run'}".split()) == 0
    capsys.readouterr()
    run("word_problem", f"{tmp_path / 'run'} --steps 1 --out {tmp_path / 'runs.jsonl'}", monkeypatch)
    ways = ["trained", "penalty", "snapped", "contracted"]
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()] == ways
    run("word_problem", f"--table {tmp_path / 'runs.jsonl'}", monkeypatch)
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4 + 1
    told = runpy.run_path(str(EXAMPLES / "word_problem.py"))
    permutations = torch.eye(5, dtype=torch.float64)[torch.tensor([*itertools.permutations(range(5))])]
    table = (permutations[None] @ permutations[:, None]).flatten(-2) @ permutations.flatten(-2).mT == 5
    turned = torch.linalg.matrix_exp(0.1 * torch.arange(3000.0).double().sin().reshape(120, 5, 5).triu(1))
    near = sk.functional.msign(permutations @ turned)[:, None]
    exact = told["representation"](near, table.int().argmax(-1))
    assert told["defects"](near, table.int().argmax(-1)).max() > 1e-3
    assert told["defects"](exact, table.int().argmax(-1)).max() < 1e-24
    for one in (exact[7, 0], exact[0, 0], exact[100, 0]):
        keys = told["reflections_of"](one, 5)
        assert torch.allclose(
            torch.linalg.multi_dot([torch.eye(5, dtype=one.dtype) - 2 * k.outer(k) for k in keys.flip(0)]), one
        )


@pytest.mark.slow
def test_a_learned_rotation_lowers_the_error_of_four_bits_and_is_exported(monkeypatch, capsys, tmp_path):
    run("quantize", f"--n 64 --steps 150 --out {tmp_path / 'rotated.pt2'}", monkeypatch)
    _, plain, as_it_stands, drawn, learned, last = capsys.readouterr().out.splitlines()
    errors = [float(row[26:].split()[0]) for row in (plain, as_it_stands, drawn, learned)]
    assert errors[0] < 1e-6
    assert errors[3] < errors[2] < errors[1]
    worst, away = map(float, re.findall(r"([\d.e-]+) (?:limits|away)", last))
    assert worst <= 2
    assert away < 1e-3
    assert torch.export.load(tmp_path / "rotated.pt2").module()(torch.zeros(597, 64)).shape == (597, 10)


@pytest.mark.slow
def test_the_scan_of_reflectors_is_timed_beside_the_loop_and_a_chunked_form(monkeypatch, capsys):
    run("reflector_times", "--steps 64 --batch 1 --heads 1 --size 8 --rounds 1", monkeypatch)
    _, row = capsys.readouterr().out.splitlines()
    assert len([float(seconds) for seconds in row.split()[3:]]) == 3
    run("reflector_times", "--predict --heads 1 --size 8", monkeypatch)
    assert "GB" in capsys.readouterr().out

"""Every draw takes its seed from one place, so that one number shifts them all."""

import re
from pathlib import Path

import pytest
import torch

import stiefelkit.testing
from stiefelkit.testing import seeds

HERE = Path(__file__).parents[1]
SOURCES = [*HERE.glob("*.py"), *Path(stiefelkit.testing.__file__).parent.glob("*.py")]
RAW = re.compile(
    r"(manual_seed|default_rng|RandomState)\((?!(seeds\.)?seed\(|PAPERS_SEED\))"
    r"|\brandom\.seed\(|torch\.seed\(|Generator\(\)"
    r"|(Plan|Config|Settings|Problem|whole_and_scan)\(.*\bseed=\d|\bRandom\(\d|--seed \d|derandomize=True"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_seed_is_set_but_by_the_one_place(path):
    if path.name in (Path(seeds.__file__).name, Path(__file__).name):
        return
    lines = path.read_text().splitlines()
    raw = [f"{path.name}:{k}: {line.strip()}" for k, line in enumerate(lines, 1) if RAW.search(line)]
    assert not raw


def test_the_offset_shifts_every_seed(monkeypatch):
    monkeypatch.setenv(seeds.OFFSET, "0")
    plain = torch.randn(3, generator=seeds.generator(1005))
    monkeypatch.setenv(seeds.OFFSET, "1000")
    assert seeds.seed(5) == 1005
    assert torch.equal(torch.randn(3, generator=seeds.generator(5)), plain)

"""Every draw takes its seed from one place, so that one number shifts them all."""

import os
import re
import subprocess
import sys
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


@pytest.mark.slow
@pytest.mark.parametrize("offset", ["0", "1000"])
def test_hypothesis_draws_alike_under_one_offset(offset, tmp_path):
    program = (HERE / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(program)
    (tmp_path / "test_drawn.py").write_text(
        "from hypothesis import given, strategies as st\n"
        "@given(st.integers(0, 10**9))\n"
        "def test_drawn(k):\n    print('drawn', k)\n"
    )
    # Twice in one process: importing torch takes longer than all the rest.
    program = (
        "import pytest\nfor _ in range(2):\n    pytest.main(['-q', '-s', '-p', 'no:cacheprovider', 'test_drawn.py'])"
    )
    env = os.environ | {"PYTHONPATH": ":".join(sys.path), seeds.OFFSET: offset}
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    drawn = [line for line in out.splitlines() if line.startswith("drawn")]
    half = len(drawn) // 2
    assert drawn[:half] == drawn[half:] != []

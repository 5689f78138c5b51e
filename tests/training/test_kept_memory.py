"""A run keeps the memory of its tensors from step to step, and gives it back when it ends."""

import subprocess
import sys

import pytest

pytest.importorskip("resource", reason="page faults are counted on POSIX alone")

from stiefelkit.training.memory import kept_memory

COUNTED = """
import resource
import torch
from stiefelkit.training.memory import kept_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.zeros(16_000_000)  # 64 MB, beyond what malloc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

torch.set_num_threads(1)
faults()
outside = faults()
with kept_memory() as keeps:
    faults()
    inside, held = faults(), resident()
print(int(keeps), outside, inside, held - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other C libraries are left alone")
def test_tensors_of_the_next_step_take_no_new_pages():
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True)
    keeps, outside, inside, returned = map(int, done.stdout.split())
    if keeps:
        assert inside < outside / 2  # where a piece lies may change once or twice
        assert returned > 10_000  # pages of 64 MB, less what lies between other pieces
    else:
        assert inside > outside / 2


def test_where_there_is_no_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr("stiefelkit.training.memory.sys.platform", "win32")
    with kept_memory() as keeps:
        assert not keeps

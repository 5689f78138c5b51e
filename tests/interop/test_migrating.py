"""What docs/migrating.md shows of other libraries runs with them."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```py\n((?:import|from) (\w+).*?)```", PAGE, re.DOTALL)
BLOCKS = {library: block for block, library in SHOWN}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_proj(self.q_proj(x))


def test_the_page_shows_every_library_that_it_names():
    assert {"geotorch", "geoopt", "pymanopt", "peft"} <= set(BLOCKS)


@pytest.mark.parametrize("library", sorted(BLOCKS))
def test_what_the_page_shows_of_a_library_runs(library: str):
    pytest.importorskip(library, reason="needs the extra [interop]")
    c = torch.cov(torch.randn(20, 500, dtype=torch.float64))
    there = {"torch": torch, "nn": nn, "layer": nn.Linear(8, 8), "model": Attention(), "c": c}
    exec(BLOCKS[library], there)
    if "opt" in there:
        (there["w"] * torch.randn(8, 4)).sum().backward()
        there["opt"].step()

"""README prints code that runs, and names what there is; pages of docs/ run when `make docs` builds them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CELL = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/saving.md"])
def test_the_python_of_a_page_runs(page):
    blocks = CELL.findall((ROOT / page).read_text())
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "page"})


def test_readme_names_what_the_registries_hold():
    import stiefelkit as sk

    text = (ROOT / "README.md").read_text()
    for name in [*sk.available(), *sk.models.names()]:
        assert f"`{name}`" in text


def test_costs_in_the_readme_are_those_that_the_maps_declare():
    import torch

    import stiefelkit as sk

    costs = re.findall(r"^\| \[?`(\w+)`.*\| ([^|]*n[²³][^|]*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in costs} == set(sk.available())
    for name, cost in costs:  # the last power is that of the default options
        cls = sk.available()[name]
        dtypes = [dtype for dtype in (torch.float32, torch.complex64) if cls.supports((8, 8), dtype) is None]
        (declared,) = {cls((8, 8), dtype=dtype).traits.cost_exponent for dtype in dtypes}
        assert {"²": 2, "³": 3}[re.findall(r"n([²³])", cost)[-1]] == declared


def test_the_demo_of_all_models_trains_every_model():
    from stiefelkit import models
    from stiefelkit.training.recipes import recipes_of

    (listed,) = re.findall(r"^MODELS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(listed.split(",")) == models.names() == sorted(recipes_of("digits"))


def test_no_cell_begins_with_a_formula_and_ends_with_a_digit() -> None:
    """The parser takes the last character of such a text for the one before it, so for a price, and prints dollars."""
    found = [
        f"{path.name}: {cell}"
        for path in (ROOT / "docs").rglob("*.md")
        for line in path.read_text().splitlines()
        for cell in map(str.strip, line.split("|"))
        if cell.startswith("$") and cell[-1].isdigit()
    ]
    assert found == []

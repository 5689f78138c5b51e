"""README prints code that runs, and names what there is; pages of docs/ run when `make docs` builds them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CELL = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_python_of_the_readme_runs():
    blocks = CELL.findall((ROOT / "README.md").read_text())
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_readme_names_what_the_registries_hold():
    import stiefelkit as sk

    text = (ROOT / "README.md").read_text()
    for name in [*sk.available(), *sk.models.names()]:
        assert f"`{name}`" in text


def test_the_demo_of_all_models_trains_every_model():
    from stiefelkit import models
    from stiefelkit.training.recipes.digits import RECIPES

    (listed,) = re.findall(r"^MODELS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(listed.split(",")) == models.names() == sorted(RECIPES)

"""The code printed in README and docs runs as printed."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


CELL = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))  # the gallery runs when it is built
    if CELL.search(page.read_text())
]


@pytest.mark.parametrize("page", PAGES)
def test_printed_python_runs(page, monkeypatch, tmp_path):
    from stiefelkit import models, optim, parametrizations
    from stiefelkit.measuring.races import peers
    from stiefelkit.scan import activations
    from stiefelkit.training import tasks

    for room, table in (
        (parametrizations, "registered"),
        (optim, "optimizers"),
        (optim, "minimizers"),
        (activations, "_activations"),
        (models, "_models"),
        (tasks, "tasks"),
        (peers, "peers"),
    ):
        monkeypatch.setattr(room, table, getattr(room, table).copy())
    monkeypatch.setattr(activations, "_by_name", {})
    blocks = CELL.findall((ROOT / page).read_text())
    name = "printed_" + re.sub(r"\W", "_", page)
    (tmp_path / f"{name}.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)


def test_the_pages_that_print_python_are_found():
    found = {Path(page).stem for page in PAGES}
    assert {"README", "index", "tour", "adapters", "attaching", "extending", "optimizers", "recurrence"} <= found


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

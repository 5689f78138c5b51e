"""The code printed in README and docs runs as printed."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("adapters", "attaching", "extending", "optimizers", "recurrence")),
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
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    name = "printed_" + re.sub(r"\W", "_", page)
    (tmp_path / f"{name}.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)


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

"""What docs/migrating.md shows of other libraries runs in them."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
THERE = [
    (title, code) for title, part in SECTIONS.items() for code in re.findall(r"^```py\n(.*?)^```", part, re.M | re.S)
]


def rows(title):
    """The codes on the left side of the tables of a section."""
    lines = re.findall(r"^(?:\| |\* - )(`.*?)(?: \||$)", SECTIONS[title], re.MULTILINE)
    return [code for line in lines for code in re.findall(r"`([^`]+)`", line)]


@pytest.mark.parametrize(("title", "code"), THERE, ids=[title for title, _ in THERE])
def test_code_of_another_library_runs(title, code):
    library = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)[0]
    pytest.importorskip(library, reason=f"needs {library}")
    with torch.random.fork_rng():
        exec(compile(code, title, "exec"), {"torch": torch, "nn": nn})


def test_the_calls_of_torch_run():
    title = "From torch.nn.utils.parametrizations.orthogonal"
    for code in rows(title):
        layer = parametrizations.orthogonal(nn.Linear(8, 8), "weight")
        names = {"layer": layer, "orthogonal": parametrizations.orthogonal, "nn": nn}
        names["remove_parametrizations"] = parametrize.remove_parametrizations
        if code.startswith("orthogonal("):
            names["layer"] = nn.Linear(8, 8)
        elif "=" in code or code.startswith('"'):  # a setting: of the map, by its name
            key, _, value = code.rpartition("=")
            setting = {key or "orthogonal_map": eval(value)}
            parametrizations.orthogonal(nn.Linear(8, 8), "weight", **setting)
            continue
        eval(code, names)


@pytest.mark.parametrize(
    ("title", "library", "rooms"),
    [
        ("From geotorch", "geotorch", [""]),
        ("From geoopt", "geoopt", ["", "optim"]),
        ("From pymanopt", "pymanopt", ["manifolds", "optimizers"]),
        ("From orthogonium", "orthogonium", ["layers"]),
        ("From PEFT's OFT, BOFT and HRA", "peft", [""]),
    ],
)
def test_every_name_of_another_library_is_one(title, library, rooms):
    pytest.importorskip(library, reason=f"needs {library}")
    places = [importlib.import_module(f"{library}.{room}".rstrip(".")) for room in rooms]
    names = [match[0] for match in (re.match(r"[\w.]+", code) for code in rows(title)) if match]
    found = [name.removeprefix(f"{library}.") for name in names if name[0].isupper() or library in name]
    assert found
    missing = [name for name in found if not any(hasattr(place, name.split(".")[-1]) for place in places)]
    assert not missing

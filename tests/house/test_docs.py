"""README prints code that runs, and names what there is; pages of docs/ run when `make docs` builds them."""

import re
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
WRITTEN = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/references.bib", "docs/conf.py")),
    *(page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts),
    *(ROOT / "benchmarks").glob("*.md"),
]
CELL = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_python_of_the_readme_runs():
    blocks = CELL.findall((ROOT / "README.md").read_text())
    assert blocks
    exec(compile("\n".join(blocks), "README.md", "exec"), {"__name__": "readme"})


def test_the_python_of_the_page_on_saving_runs():
    blocks = CELL.findall((ROOT / "docs" / "saving.md").read_text())
    assert blocks
    exec(compile("\n".join(blocks), "saving.md", "exec"), {"__name__": "saving"})


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
    from stiefelkit.training.tasks.digits import RECIPES

    (listed,) = re.findall(r"^MODELS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(listed.split(",")) == models.names() == sorted(RECIPES)


def test_links_to_the_world_are_https_and_spelled_in_one_way():
    spellings = defaultdict(set)
    for page in WRITTEN:
        for link in re.findall(r"\bhttps?:[^\s)>\"'`}\]]*", page.read_text()):
            parts = urlsplit(link)
            assert parts.scheme == "https", f"{page.name}: {link}"
            assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), f"{page.name}: {link}"
            assert not re.search(r"[.,;:]$|//", link.removeprefix("https://")), f"{page.name}: {link}"
            spellings[parts.netloc.removeprefix("www.") + parts.path.rstrip("/").lower(), parts.query].add(link)
    assert spellings
    assert all(len(links) == 1 for links in spellings.values()), spellings


def test_arxiv_numbers_are_written_as_arxiv_writes_them():
    numbers = re.findall(r"eprint=\{(.*?)\}", (ROOT / "docs" / "references.bib").read_text())
    assert len(numbers) == len(set(numbers)) > 20
    assert all(re.fullmatch(r"\d{4}\.\d{4,5}", number) for number in numbers)


CODE = re.compile(r"^```(?:python|py|sh)\b[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_code_on_pages_fits_its_column():
    wide = []
    for page in (page for page in WRITTEN if (ROOT / "docs") in page.parents and page.suffix == ".md"):
        for block in CODE.findall(page.read_text()):
            wide += [f"{page.name}: {line}" for line in block.splitlines() if len(line) > 88]
    for file in (ROOT / "stiefelkit").rglob("*.py"):  # examples of docstrings are on the pages, too
        code = re.findall(r"^ *((?:>>>|\.\.\.) .*)$", file.read_text(), re.MULTILINE)
        wide += [f"{file.name}: {line}" for line in code if len(line) > 88]
    assert wide == []


def test_no_cell_begins_with_a_formula_and_ends_with_a_digit() -> None:
    """The parser takes the last character of such a text for the one before it, so for a price, and prints dollars."""
    found = [
        f"{path.name}: {cell}"
        for path in WRITTEN
        if path.suffix == ".md"
        for line in path.read_text().splitlines()
        for cell in map(str.strip, line.split("|"))
        if cell.startswith("$") and cell[-1].isdigit()
    ]
    assert found == []

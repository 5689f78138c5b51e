"""What docstrings and pages name as a source is in docs/references.bib, and what is there is named."""

import ast
import re
from functools import cache
from pathlib import Path

from sphinx_parts import sphinx_part

ROOT = Path(__file__).parents[2]
citations = sphinx_part("citations")
PAGES = [page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts]


@cache
def docstrings():
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return {
        f"{path.relative_to(ROOT)}, {getattr(node, 'name', 'module')}": ast.get_docstring(node) or ""
        for path in (ROOT / "stiefelkit").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, nodes)
    }


def test_every_reference_of_a_docstring_is_in_the_bibliography():
    for place, doc in docstrings().items():
        for entry in citations.references(doc):
            assert citations.named(entry), f"{place}: {entry}"


def test_every_paper_that_is_named_by_author_and_year_is_in_the_bibliography():
    texts = docstrings() | {page.name: page.read_text() for page in PAGES}
    for place, text in texts.items():
        is_private = re.search(r", _\w+$", place) or "/_" in place
        for surname, year in [] if is_private else citations.SHORT.findall(text):
            assert citations.short(surname, year), f"{place}: {surname} {year}"


def test_pages_cite_what_is_in_the_bibliography_and_it_holds_nothing_else():
    cited = [re.split(r"[,\s]+", keys) for page in PAGES for keys in citations.CITED.findall(page.read_text())]
    keys = {key for group in cited for key in group}
    assert keys <= set(citations.bibliography())
    for doc in docstrings().values():
        keys |= {key for entry in citations.references(doc) for key in citations.named(entry)}
        keys |= {citations.short(*match) for match in citations.SHORT.findall(doc)}
    assert set(citations.bibliography()) <= keys


def test_a_source_that_is_missing_is_noticed():
    assert not citations.named("Nobody, A paper that nobody wrote, 1900.")
    assert citations.named(
        "Li, Fuxin, Todorovic, Efficient Riemannian optimization on the Stiefel manifold via the "
        "Cayley transform, ICLR 2020, algorithm 1."
    ) == ["li2020"]
    assert citations.short("Rätsch", "2017") is None
    assert citations.short("Koutník", "2014") == "koutnik2014"

"""Formulas are typeset when the pages are built, from LaTeX that reads well in a terminal, and nothing is fetched."""

import re
from pathlib import Path

import pytest
from sphinx_parts import sphinx_part

ROOT = Path(__file__).parents[2]


formulas, local = map(sphinx_part, ("formulas", "local"))
IN_CODE = re.compile(r":math:`([^`]*)`")
ON_PAGES = re.compile(r"(?<![\\$\w])\$\$?(?![\s\d])([^$\n`]+?)(?<!\s)\$\$?(?![\d\w])")


def _sources():
    for path in sorted((ROOT / "stiefelkit").rglob("*.py")):
        yield from ((path, formula) for formula in IN_CODE.findall(path.read_text(encoding="utf-8")))


def _pages():
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if not {"generated", "_build"} & set(path.parts):
            text = re.sub(r"^(`{3,}|:::).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
            text = re.sub(r"`[^`\n]*`", "", text)
            yield from ((path, formula) for formula in ON_PAGES.findall(text))


@pytest.mark.parametrize("found", [_sources, _pages])
def test_every_formula_can_be_typeset(found):
    mistakes, count = [], 0
    for path, formula in found():
        count += 1
        try:
            formulas.mathml(formula)
        except formulas.FormulaError as error:
            mistakes.append(f"{path.relative_to(ROOT)}: {error}")
    assert count
    assert not mistakes, "\n".join(mistakes)


@pytest.mark.parametrize("formula", ["x^", r"\nosuch W"])
def test_a_wrong_formula_is_refused(formula):
    with pytest.raises(formulas.FormulaError):
        formulas.mathml(formula)


def test_formulas_in_docstrings_have_no_commands_that_a_terminal_would_show():
    commands = [f"{path.relative_to(ROOT)}: {formula}" for path, formula in _sources() if "\\" in formula]
    assert not commands, "\n".join(commands)


def test_signs_stand_for_commands_and_words_for_names():
    assert formulas.latex("‖W − I‖ ≤ √p") == r"\| W - I\|  \le  \sqrt{p}"
    assert formulas.latex(r"tr W + \sin t + uv") == r"\operatorname{tr} W + \sin t + uv"


@pytest.mark.parametrize(
    "page", ['<script src="https://cdn.example.org/a.js"></script>', '@import "https://example.org/a.css";']
)
def test_what_a_page_fetches_from_another_host_is_found(page):
    assert len(local.fetched(page)) == 1


def test_links_to_read_are_not_fetched():
    assert not local.fetched('<a href="https://example.org">x</a><img src="a.png">')

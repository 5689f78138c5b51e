"""Names are shown letter by letter: no markup, no formulas, no orders to the terminal, none left out."""

import dataclasses
import html
import io

import pytest
from matplotlib.figure import Figure
from rich.table import Table

from stiefelkit import models
from stiefelkit.cli import main
from stiefelkit.errors import printable
from stiefelkit.figure import literal
from stiefelkit.measuring.report import environment
from stiefelkit.training import papers
from stiefelkit.training.display import Screen

NAMES = ["_old", r"$\frac$", "[red]x", "a\x1b[31mb", ":smile:", "<script>\"&'"]


@pytest.mark.parametrize("name", NAMES)
def test_legends_consoles_and_pages_show_a_name_letter_by_letter(name: str):
    axes = Figure().subplots()
    axes.plot([0, 1], [0, 1], label=literal(name))
    (text,) = axes.legend().get_texts()
    parsed, is_formula = text._preprocess_math(text.get_text())  # type: ignore[attr-defined]
    assert (parsed.removeprefix("\u200b"), is_formula) == (printable(name), False)
    screen, shown, table = Screen(), io.StringIO(), Table(name)
    screen.file = shown
    table.add_row(name)
    screen.print(name)
    screen.print(table)
    assert shown.getvalue().count(printable(name)) == 3
    written = environment().from_string('<td title="{{ name }}">{{ name }}</td>').render(name=name)
    assert html.unescape(written) == f'<td title="{printable(name)}">{printable(name)}</td>'
    assert "<script" not in written


@pytest.mark.parametrize("name", NAMES)
def test_a_list_shows_a_plugin_letter_by_letter(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def factory(input_size: int, hidden_size: int, output_size: int) -> None: ...

    factory.__doc__ = f"Builds {name} of [bold]markup[/bold]."
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setitem(models._models._targets, name, factory)
    monkeypatch.setitem(models._models._origins, name, f"{name} 1.0")
    assert main(["list"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "[bold]markup[/bold]" in line]
    assert line.count(printable(name)) == 3
    assert main(["list", name]) == 0
    assert printable(name) in capsys.readouterr().out


def test_experiments_of_any_name_are_listed_letter_by_letter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "200")
    (row, *_) = papers.rows()
    named = [dataclasses.replace(row, name=name, paper=f"paper {name}") for name in NAMES]
    monkeypatch.setattr(papers, "rows", lambda: named)
    assert main(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    for name in NAMES:
        assert f"paper {printable(name)}" in out

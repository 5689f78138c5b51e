"""Names are shown letter by letter: no markup, no formulas, no orders to the terminal, none left out."""

import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.table import Table
from tiny_runs import small

from stiefelkit.cli import main
from stiefelkit.errors import printable
from stiefelkit.training import train
from stiefelkit.training.display import Screen
from stiefelkit.training.figure import literal

NAMES = ["_old", r"$\frac$", "[red]x", "a\x1b[31mb", ":smile:", "50%$"]


@pytest.mark.parametrize("name", NAMES)
def test_a_legend_shows_a_name_letter_by_letter(name: str):
    axes = Figure().subplots()
    axes.plot([0, 1], [0, 1], label=literal(name))
    (text,) = axes.legend().get_texts()
    shown = text.get_text()
    assert text._preprocess_math(shown)[0].removeprefix("\u200b") == printable(name)  # type: ignore[attr-defined]
    assert text._preprocess_math(shown)[1] is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_a_console_shows_a_name_letter_by_letter_in_lines_and_tables(name: str, monkeypatch: pytest.MonkeyPatch):
    screen, shown = Screen(), io.StringIO()
    screen.file = shown
    table = Table(name)
    table.add_row(name)
    screen.print(name)
    screen.print(table)
    assert shown.getvalue().count(printable(name)) == 3


def test_runs_of_any_name_are_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [tmp_path / name for name in NAMES]
    for run in runs:
        train.train(small(steps=2), run)
    assert main(["plot", *map(str, runs), "--out", str(tmp_path / "[bold]\x1b[31m")]) == 0
    assert capsys.readouterr().out.count("/[bold]\\x1b[31m/") == 2

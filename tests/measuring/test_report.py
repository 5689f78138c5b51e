"""The page of a report: well formed, complete in itself, and made of what was measured."""

import base64
import dataclasses
import json
import math
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.measuring.drift.plan import DriftPlan
from stiefelkit.measuring.moved_frames import own_optimizers
from stiefelkit.measuring.races.recurrences import LOOP
from stiefelkit.measuring.races.scan_cases import ScanCase
from stiefelkit.measuring.report import findings, plan
from stiefelkit.measuring.report.charts import figure_of
from stiefelkit.measuring.report.page import page, tables, tiles
from stiefelkit.measuring.report.plan import SECTIONS, ReportPlan
from stiefelkit.testing import seeds

QUICK = {"repeats": 1, "seconds": 1e-3}
TINY = {
    "drift": {"steps": 4, "sizes": ((4, 4),)},
    "time": {"sizes": ((4, 4), (8, 8)), "precisions": ("exact",), **QUICK},
    "growth": {"sizes": (4, 8), "matrices": (1, 2), "steps": (4, 8), "batches": (1, 2), **QUICK},
    "norms": {"sizes": ((4, 4),), "factors": (1.0, 100.0)},
    "scan": {"cases": (ScanCase("A", T=10, n=4, B=2), ScanCase("D", T=10, n=4, B=2, is_complex=True)), **QUICK},
}
VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use"}


@pytest.fixture(scope="module")
def found() -> findings.Findings:
    return list(findings.gather(ReportPlan(scale=TINY, seed=seeds.seed())))[-1]


@pytest.fixture(scope="module")
def html(found) -> str:
    return page(found)


@pytest.fixture(scope="module")
def tree(html) -> ElementTree.Element:
    doctype, rest = html.split("\n", 1)
    assert doctype == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


class Elements(HTMLParser):
    """Reads a page as a browser does, and balances its tags."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


# The page


@pytest.mark.slow
def test_the_page_is_well_formed_as_html_and_as_xml(html, tree):
    assert Elements(html).open == []
    assert tree.tag == "html"
    assert tree.get("lang")
    ids = [element.get("id") for element in tree.iter() if element.get("id")]
    assert len(ids) == len(set(ids))


def test_the_page_needs_nothing_outside_itself(html):
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)
    for tag, attributes in Elements(html).seen:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "src", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:image/svg" if tag == "img" else "#"), (tag, value)


def test_every_reference_within_the_page_has_a_target(html, tree):
    ids = {element.get("id") for element in tree.iter()}
    used = re.findall(r'href="#([^"]+)"', html)
    assert used
    assert set(used) <= ids


def test_every_table_has_a_caption_and_heads_of_columns_and_rows(tree):
    found = list(tree.iter("table"))
    assert len(found) > len(SECTIONS)
    for table in found:
        caption = table.find("caption")
        assert caption is not None
        assert caption.text
        heads = table.findall("thead/tr/th")
        assert heads
        assert all(head.get("scope") == "col" and head.text for head in heads)
        for row in table.findall("tbody/tr"):
            cells = list(row)
            assert cells[0].tag == "th"
            assert cells[0].get("scope") == "row"
            assert len(cells) == len(heads)


def test_every_chart_says_in_words_what_it_shows(tree):
    drawn = list(tree.iter("img"))
    assert len(drawn) == 9
    for chart in drawn:
        assert len(chart.get("alt") or "") > 40
        svg = ElementTree.fromstring(base64.b64decode((chart.get("src") or "").partition(",")[2]))
        links = [value for element in svg.iter() for name, value in element.attrib.items() if name.endswith("href")]
        assert all(link.startswith("#") for link in links)
    for figure in tree.iter("figure"):
        assert figure.find("figcaption") is not None


def test_colours_of_the_page_are_there_in_light_and_in_dark(html):
    style = html[html.index("<style>") : html.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark")
    for variable in {*re.findall(r"var\((--\w+)\)", html)}:
        assert f"{variable}:" in light
        assert f"{variable}:" in dark.split("}")[0]
    assert "figure img { filter: invert" in dark


def test_nothing_on_the_page_tells_whose_machine_it_is(html, found):
    import platform

    facts = " ".join(found.machine.values())
    assert platform.node() not in facts.split()
    assert "/" not in facts
    assert Path.home() == Path("/") or f"{Path.home()}/" not in html
    assert str(Path.cwd()) not in html


def test_every_section_says_by_which_commands_it_can_be_had_alone(tree, found):
    for section in SECTIONS:
        (element,) = [each for each in tree.iter("section") if each.get("id") == section]
        lines = [code.text for code in element.iter("code")]
        assert lines == found.plan.commands(section)


@pytest.mark.parametrize(
    "scale",
    [
        ReportPlan(),
        ReportPlan(full=True),
        ReportPlan(quick=True),
        ReportPlan(parametrizations=("cayley", "stiefel"), dtype="float64"),
    ],
)
def test_those_commands_are_ones_that_the_command_line_takes(scale):
    from stiefelkit.cli.app import app

    for section in SECTIONS:
        for line in scale.commands(section):
            words = line.removeprefix("stiefelkit ").split()
            command, _, _ = app.parse_args(words, print_error=False, exit_on_error=False)
            assert callable(command)


def test_the_command_of_the_drift_makes_the_plan_that_was_measured():
    from stiefelkit.cli.app import app

    for chosen in (ReportPlan(), ReportPlan(parametrizations=("cayley",))):
        for line, wanted in zip(chosen.commands("drift"), chosen.plans("drift"), strict=True):
            _, bound, _ = app.parse_args(line.removeprefix("stiefelkit ").split(), print_error=False)
            for name in ("steps", "gradients", "step_length", "look_every", "dtype", "methods"):
                assert getattr(bound.arguments["plan"], name) == getattr(wanted, name)


# What is on it


def test_every_member_is_measured_in_every_section_that_it_can_be(found):
    names = set(sk.available())
    assert {row.member for race in found.time for row in race.rows} >= names
    assert {row.contender for race in found.growth for row in race.rows} >= names
    assert {row.family for race in found.norms for row in race.rows} == names - {"stiefel"}
    methods = {curve.method for curve in found.drift}
    assert methods >= (names - {"stiefel"}) | set(own_optimizers()) | {"unconstrained"}
    assert [race.subject.name for race in found.scan] == ["A", "D"]
    assert all("fourier" not in name for left_out in found.left_out.values() for name in left_out)


def test_the_figures_on_the_page_are_those_measured(tree, found):
    shown = {
        row.find("th").text: [cell.text for cell in row.findall("td")]  # pyright: ignore[reportOptionalMemberAccess]
        for section in tree.iter("section")
        if section.get("id") == "drift"
        for row in section.iter("tr")
        if row.find("td") is not None
    }
    for curve in found.drift:
        assert shown[curve.method][-1] == figure_of(curve.worst)


def test_a_section_that_was_not_asked_for_is_not_there():
    chosen = ReportPlan(scale=TINY, seed=seeds.seed(), sections=("norms",), parametrizations=("cayley",), peers=False)
    (only,) = findings.gather(chosen)
    text = page(only)
    assert only.finished
    assert 'id="norms"' in text
    assert not re.search(r'id="(drift|time|ratios|growth|scan)"', text)
    assert [row.family for row in only.norms[0].rows] == ["cayley", "cayley"]


def test_what_is_not_finite_is_drawn_and_written_as_such(found):
    lost = dataclasses.replace(found.drift[0], errors=[1e-7, *[math.nan] * (len(found.drift[0].steps) - 1)])
    figures = found.norms[0].rows[0].figures | {"errors_over_limit": [1.0, None]}
    row = dataclasses.replace(found.norms[0].rows[0], figures=figures)
    race = dataclasses.replace(found.norms[0], rows=[row, *found.norms[0].rows[1:]])
    odd = dataclasses.replace(found, drift=[lost, *found.drift[1:]], norms=[race, *found.norms[1:]])
    text = page(odd)
    assert "not finite" in text
    assert tiles(odd)[0].figure == "not finite"
    assert Elements(text).open == []


def test_peak_memory_has_columns_where_it_was_measured(found):
    race = found.scan[0]
    memory = {"memory_sequence": 3_000_000, "memory_last_state": 1_500_000}
    rows = [dataclasses.replace(row, figures=row.figures | memory) for row in race.rows]
    _, table = tables(dataclasses.replace(found, scan=[dataclasses.replace(race, rows=rows)]))["scan"]
    assert table.columns[1:] == ["last state", f"/ {LOOP}", "sequence", f"/ {LOOP}"]
    assert all(len(row.cells) + 1 == len(table.columns) for row in table.rows)
    assert table.rows[0].cells == [1.5, 1.0, 3.0, 1.0]


def test_words_that_are_markup_stay_words(found):
    odd = dataclasses.replace(found, machine={**found.machine, "CPU": "<b>&"}, left_out={"drift": {"<i>": "a & b"}})
    assert "&lt;b&gt;&amp;" in page(odd)
    assert "<i>" not in page(odd)


def test_figures_are_short():
    assert figure_of(math.inf) == "not finite"
    assert [figure_of(value) for value in (0.0, 1.0, 25.25, 0.999, 1e9)] == [
        *("0", "1.00", "25.2", "1.00", "1.0 × 10⁹"),
    ]


# The command


@pytest.fixture
def _small(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "USUAL", TINY)
    monkeypatch.setattr(plan, "QUICK", TINY)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("_small")
def test_the_command_writes_the_page_and_the_figures(capsys):
    assert main(["report", "--quick", "--sections", "norms,drift", "--json", "figures.json"]) == 0
    assert "Page: report.html" in capsys.readouterr().out
    assert Elements(Path("report.html").read_text()).open == []
    content = json.loads(Path("figures.json").read_text())
    assert content["finished"]
    assert content["norms"]
    assert content["drift"]
    assert content["scan"] == []
    assert set(content["plan"]["commands"]) == {"norms", "drift"}
    assert sorted(path.name for path in Path().iterdir()) == ["figures.json", "report.html"]


@pytest.mark.usefixtures("_small")
def test_an_interruption_leaves_the_old_page_and_whole_figures(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    Path("report.html").write_text("old")
    monkeypatch.setitem(findings.RACES, "scan", interrupted)
    assert main(["report", "--sections", "norms,scan", "--json", "figures.json"]) == 130
    assert Path("report.html").read_text() == "old"
    content = json.loads(Path("figures.json").read_text())
    assert not content["finished"]
    assert content["norms"]
    assert sorted(path.name for path in Path().iterdir()) == ["figures.json", "report.html"]


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("report --parametrizations cayly", 'did you mean "cayley"'),
        ("report --sections drifts", "no section 'drifts'"),
        ("report --device cuda", "CUDA") if not torch.cuda.is_available() else ("report --dtype int8", "no dtype"),
        ("report --dtype bfloat16", "no dtype 'bfloat16'"),
        ("report --out nowhere/report.html", "existing folder"),
        ("report --threads 0", "threads"),
        ("report --full --quick", "--full or --quick, got both"),
    ],
)
def test_user_errors_are_one_sentence_and_come_before_the_first_measurement(line, sentence, capsys):
    assert main(line.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert sentence in said
    assert list(Path().iterdir()) == []


def test_plans_refuse_what_no_member_can_do():
    with pytest.raises(errors.UnknownNameError):
        ReportPlan(parametrizations=("nobody",))


def test_a_command_line_reads_back_as_its_words_whatever_they_hold():
    drift = DriftPlan(methods=("cayley",), step_length=0.12345678)
    words = shlex.split(plan.command("drift", drift, out="my runs/a; b"))
    assert words[:2] == ["stiefelkit", "drift"]
    assert words[words.index("--out") + 1] == "my runs/a; b"
    assert float(words[words.index("--step-length") + 1]) == drift.step_length

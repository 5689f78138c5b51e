"""The page of a report: well formed, complete in itself, and made of what was measured."""

import base64
import dataclasses
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import stiefelkit as sk
from stiefelkit.cli import main
from stiefelkit.measuring import plans, report
from stiefelkit.measuring.contest import DriftCurve, Race
from stiefelkit.measuring.moved_frames import own_optimizers
from stiefelkit.measuring.plans import ReportPlan, ScanCase
from stiefelkit.measuring.report import Record, gather
from stiefelkit.measuring.tables import three_digits
from stiefelkit.testing import seeds

QUICK = {"repeats": 1, "seconds": 1e-3}
TINY = {
    "drift": {"steps": 4, "sizes": ((4, 4),)},
    "time": {"sizes": ((4, 4), (8, 8)), "precisions": ("exact",), **QUICK},
    "scan": {"cases": (ScanCase("A", T=10, n=4, B=2), ScanCase("D", T=10, n=4, B=2, is_complex=True)), **QUICK},
}


@pytest.fixture(scope="module")
def found() -> Record:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "USUAL", TINY)
        return list(gather(ReportPlan(seed=seeds.seed()), "stiefelkit report"))[-1]


@pytest.fixture(scope="module")
def html(found) -> str:
    return found.page()


def parsed(html: str) -> ElementTree.Element:
    """The elements of a page, which is well formed as HTML and as XML."""
    doctype, rest = html.split("\n", 1)
    assert doctype == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


@pytest.fixture(scope="module")
def tree(html) -> ElementTree.Element:
    return parsed(html)


def races_of(record: Record, section: str) -> list[Race]:
    return next(part.races for part in record.parts if part.name == section)


# The page


def test_the_page_is_well_formed_and_needs_nothing_outside_itself(html, tree):
    assert (tree.tag, bool(tree.get("lang"))) == ("html", True)
    ids = [element.get("id") for element in tree.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)
    for element in tree.iter():
        assert element.tag not in ("script", "link", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in element.attrib)
        for name in {"href", "src", "xlink:href"} & set(element.attrib):
            assert element.attrib[name].startswith("data:image/svg" if element.tag == "img" else "#")


def test_every_chart_says_in_words_what_it_shows(tree):
    drawn = list(tree.iter("img"))
    assert len(drawn) == 1
    for chart in drawn:
        assert len(chart.get("alt") or "") > 40
        svg = ElementTree.fromstring(base64.b64decode((chart.get("src") or "").partition(",")[2]))
        links = [value for element in svg.iter() for name, value in element.attrib.items() if name.endswith("href")]
        assert all(link.startswith("#") for link in links)


def test_nothing_on_the_page_tells_whose_machine_it_is(html, found):
    import platform

    facts = " ".join(found.machine.values())
    assert platform.node() not in facts.split()
    assert "/" not in facts
    assert Path.home() == Path("/") or f"{Path.home()}/" not in html
    assert str(Path.cwd()) not in html


# What is on it


def test_every_member_is_measured_in_every_section(found):
    names = set(sk.available())
    assert {row.name.partition(" (")[0] for race in races_of(found, "time") for row in race.rows} >= names
    methods = {row.name for race in races_of(found, "drift") for row in race.rows}
    assert methods >= names | set(own_optimizers()) | {"unconstrained"}
    assert [race.subject[0] for race in races_of(found, "scan")] == ["A", "D"]


def test_the_figures_on_the_page_are_those_measured(tree, found):
    shown = {
        (row.find("th").text or "").partition(",")[0]: [cell.text for cell in row.findall("td")]  # pyright: ignore
        for section in tree.iter("section")
        if section.get("id") == "drift"
        for row in section.iter("tr")
        if row.find("td") is not None
    }
    for row in races_of(found, "drift")[0].rows:
        assert shown[row.name][-1] == three_digits(row["worst"])


def test_what_is_not_finite_is_drawn_and_words_that_are_markup_stay_words(found):
    (race,) = races_of(found, "drift")
    lost = DriftCurve.of(race.rows[0].figures)
    lost.errors[1:] = [math.nan] * (len(lost.steps) - 1)
    row = dataclasses.replace(race.rows[0], figures={**lost.figures, "contender": "cayley"})
    races = [dataclasses.replace(race, rows=[row, *race.rows[1:]])]
    odd = dataclasses.replace(found.parts[0], races=races, left_out={"<i>": "a & b"})
    text = dataclasses.replace(found, machine={**found.machine, "CPU": "<b>&"}, parts=[odd]).page()
    assert "nan" in "".join(parsed(text).itertext())
    assert "&lt;b&gt;&amp;" in text
    assert "<i>" not in text


# The command


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(plans, "USUAL", TINY)
    monkeypatch.setattr(plans, "QUICK", TINY)


@pytest.mark.usefixtures("_small")
def test_the_command_writes_the_page_and_the_figures(capsys):
    assert main(["report", "--quick", "--sections", "scan,drift", "--json", "figures.json"]) == 0
    assert "Page: report.html" in capsys.readouterr().out
    assert parsed(Path("report.html").read_text()).tag == "html"
    content = json.loads(Path("figures.json").read_text())
    assert content["finished"]
    assert [part["name"] for part in content["parts"]] == ["scan", "drift"]
    assert sorted(path.name for path in Path().iterdir()) == ["figures.json", "report.html"]
    page = Path("report.html").read_bytes()
    assert main(["report", "--from", "figures.json"]) == 0
    assert Path("report.html").read_bytes() == page


@pytest.mark.usefixtures("_small")
def test_an_interruption_leaves_the_old_page_and_whole_figures(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    Path("report.html").write_text("old")
    monkeypatch.setitem(report.RACES, "scan", interrupted)
    assert main(["report", "--sections", "drift,scan", "--json", "figures.json"]) == 130
    assert Path("report.html").read_text() == "old"
    content = json.loads(Path("figures.json").read_text())
    assert not content["finished"]
    assert content["parts"][0]["races"]
    assert sorted(path.name for path in Path().iterdir()) == ["figures.json", "report.html"]

"""Figures about word problems, on three pages, are those of the logs in benchmarks/results/words."""

import json
import re
import runpy
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "benchmarks/results/words"
PAGE, WHICH, MODELS, README = (
    (ROOT / page).read_text() for page in ("docs/state-tracking.md", "docs/which.md", "docs/models.md", "README.md")
)


def lines(name):
    return [json.loads(line) for line in (LOGS / f"{name}.jsonl").read_text().splitlines()]


def in_one_line(text):
    return " ".join(text.split())


def test_the_table_of_the_page_and_its_costs_are_what_the_example_prints(capsys):
    runpy.run_path(str(ROOT / "examples/word_problem.py"))["tell"](lines("runs"))
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert rows == [
        line for line in printed if line.startswith("|") and not re.search("snapped|penalty|contract", line)
    ]
    for line in printed:
        assert line.startswith("|") or line in in_one_line(PAGE), line


def test_other_figures_of_the_pages_are_those_of_a_log():
    def share(how, length, of, worst=min):
        return f"{worst(100 * run[how][length] for run in of):.3g} %"

    runs = lines("runs")
    exact, gated, free = (
        [run for run in runs if run["options"].get("tau") == tau] for tau in ("exact", "gated", "free")
    )
    in_a5 = [run for run in exact if run["group"] == "A5"]
    learned = sum(run["trained"]["4096"] > 0.99 for run in gated)
    tried = [run for run in lines("gated") if run["dimension"] == 4]
    facts = {
        f"{share('snapped', '16384', exact)} at 16,384 letters on every seed of exact nets": PAGE,
        f"by the same recipe on {learned} of {len(gated)} seeds": PAGE,
        f"The first two lines come to {share('trained', '4096', lines('command'))} at 4,096": PAGE,
        f"{len(tried)} recipes failed, the best with {share('trained', '64', tried, max)} at 64 letters": PAGE,
        f"[products in A5 after 4,096 steps: {share('trained', '4096', in_a5)}](state-tracking.md)": WHICH,
        f"{len({run['seed'] for run in runs})} seeds of each net": README,
        f"| {100 * lines('digits')[-1]['accuracy']['1200']:.1f} % | 2025 | Siems": MODELS,
    }
    for words, page in facts.items():
        assert words in in_one_line(page), words
    assert all(run["commit"] and run["command"] for run in runs)
    assert min(len(exact), len(gated), len(free)) >= 5
    assert statistics.fmean(run["trained"]["4096"] for run in free) < 0.5


def test_no_rate_that_was_tried_is_better_than_the_one_of_a_net():
    tried = {}
    for run in lines("rates"):
        tried.setdefault(run["model"], []).append((run["trained"]["32"], run["lr"]))
    for run in lines("runs"):
        if run["model"] in tried:
            assert (max(tried[run["model"]])[0], run["lr"]) in tried[run["model"]], run["model"]

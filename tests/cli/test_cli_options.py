"""The laws of options: what is left out is said, what does nothing is refused, and all of it fits into 80 columns."""

import dataclasses
import inspect
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.cli.about import kinds
from stiefelkit.cli.app import asked
from stiefelkit.cli.options import built, facts
from stiefelkit.cli.options_file import read_options
from stiefelkit.cli.tasks import filled
from stiefelkit.contract import table
from stiefelkit.measuring.drift.plan import DriftPlan
from stiefelkit.measuring.races.field import Race, Row
from stiefelkit.measuring.races.plan import GrowthPlan, NormPlan, OptimizerRace, ParametrizationRace, ScanRace
from stiefelkit.measuring.report.plan import ReportPlan
from stiefelkit.measuring.tables import of_race
from stiefelkit.testing import seeds
from stiefelkit.training.gradients import GradientPlan
from stiefelkit.training.tasks import tasks

SMALL = (
    f"--seed {seeds.seed()} --T 2 --train-size 30 --test-size 20 --hidden-size 5 --steps 2 --batch-size 8"
    " --eval-every 1 --log-every 1"
)
TRAIN = f"train copying --model scornn {SMALL}"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def config(path: str) -> dict[str, Any]:
    return json.loads(Path(path, "config.json").read_text())["config"]


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words.split()) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("task", tasks.names())
def test_help_shows_what_the_recipes_fill_in(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    cls, model = tasks.get(task), "full_urnn"
    of_all, of_one = (shown(f"train {task}{words} --help", capsys) for words in ("", f" --model {model}"))
    of_one = " ".join(of_one.replace("│", " ").split())
    for name, recipe in cls.recipes.items():
        assert f"\n{name}:" in of_all
        settings = recipe.filled(recipe.settings).given()
        token = asked.set(("train", task, "--model", name))
        found = {field: filled(cls, field) for field in settings}
        asked.reset(token)
        for field, value in settings.items():
            if isinstance(value, dict):
                tables = {key: item for key, item in value.items() if isinstance(item, dict)}
                pairs = [f'{key} "{table["optimizer"]} lr={table["lr"]}' for key, table in tables.items()]
                pairs += [f"{key} {item}" for key, item in value.items() if key not in tables]
                assert all(pair in found[field] for pair in pairs)
            else:
                assert found[field] == (f"{value:g}" if isinstance(value, float) else str(value))
            assert name != model or f"[default: {found[field]}]" in of_one


def test_a_file_of_options_may_begin_with_a_mark_of_byte_order() -> None:
    Path("my.toml").write_text("steps = 7\n", encoding="utf-8-sig")
    assert read_options(Path("my.toml")).options == {"steps": 7}


def test_help_reads_the_model_of_a_comparison_and_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text('[digits]\nmodel = "full_urnn"\n')
    for words in ("train digits --config my.toml", "compare digits --models=full_urnn"):
        assert "[default: multiplicative_cayley]" in " ".join(
            shown(f"{words} --help", capsys).replace("│", " ").split()
        )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{TRAIN} --rates.phase 1e-3", "'scornn' has no coordinate 'phase'; known: skew."),
        (f"train copying --model lstm {SMALL} --rates.skew 1e-3", "'lstm' has no coordinate 'skew'"),
        (
            f"compare copying --models scornn,lstm {SMALL} --rates.phase 1",
            "None of scornn, lstm has a coordinate 'phase'",
        ),
        (f"{TRAIN} --options.parametrization householder --rates.skew 1", "known: reflectors"),
    ],
)
def test_a_rate_of_a_coordinate_that_is_not_there_is_refused(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(words, capsys)
    assert not list(Path().iterdir())


def test_a_rate_goes_to_the_models_of_a_comparison_that_have_the_coordinate() -> None:
    words = (
        f"compare copying --models scornn,margin_rnn,lstm {SMALL} --rates.skew 1e-3 --rates.spectrum 1e-2 --out runs"
    )
    assert main(words.split()) == 0
    rates = {model: config(f"runs/{model}")["rates"] for model in ("scornn", "margin_rnn", "lstm")}
    assert rates == {"scornn": {"skew": 1e-3}, "margin_rnn": {"skew": 1e-3, "spectrum": 1e-2}, "lstm": {}}
    assert main([*words.split(), "--resume"]) == 0


def test_rates_of_a_recipe_are_for_its_own_coordinates() -> None:
    assert main(f"{TRAIN} --options.parametrization householder --options.reflections 2 --out run".split()) == 0
    assert config("run")["rates"] == {}
    assert main(f"{TRAIN} --options.parametrization matrix_exp --out other".split()) == 0
    assert config("other")["rates"] == {"skew": 2e-4}


def test_a_table_of_a_file_is_for_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text(
        'model = "scornn"\nsteps = 2\nhidden-size = 7\nlr = 0.5\n[rates]\nskew = 0.25\n'
        "[copying]\nT = 3\ntrain_size = 30\ntest_size = 20\nhidden_size = 6\nbatch_size = 8\n"
        '[copying.rates]\nskew = 0.125\n[adding]\nT = 5\nmodel = "lstm"\n[digits]\nstepz = 1\n'
    )
    assert main("train copying --config my.toml --lr 0.0625 --out run".split()) == 0
    found = config("run")
    assert found["task_options"] == {"T": 3, "train_size": 30, "test_size": 20, "fresh": False, "at_marker": False}
    assert (found["hidden_size"], found["steps"], found["lr"]) == (6, 2, 0.0625)
    assert found["rates"] == {"skew": 0.125}
    assert "no option 'stepz'" in refused("train digits --config my.toml", capsys)
    Path("my.toml").write_text("[digist]\nsteps = 1\n")
    assert 'did you mean "digits"' in refused("train digits --model scornn --config my.toml", capsys)
    Path("my.toml").write_text("digits = 1\n")
    assert "needs a table of that task, got 1" in refused("train digits --model scornn --config my.toml", capsys)
    Path("my.toml").write_text("[digits]\nsteps = 1\n")
    assert "no option 'digits'" in refused("drift --config my.toml", capsys)


HEADS = {"png": b"\x89PNG", "pdf": b"%PDF-", "svg": b"<?xml"}


@pytest.mark.slow
def test_every_figure_is_written_in_the_format_asked_for_and_the_same_each_time() -> None:
    assert main(f"compare copying --models scornn {SMALL} --out runs --format svg".split()) == 0
    for kind in HEADS:
        assert main(f"plot runs --out plots --format {kind} --dpi 50".split()) == 0
    assert main("drift --steps 2 --sizes 2 --methods cayley --out drift --format pdf".split()) == 0
    words = "plot gradients --T 3 --hidden-size 3 --batch-size 2 --steps 0 --models lstm --out plots --format svg"
    assert main(words.split()) == 0
    files = [f"plots/{name}.{kind}" for kind in HEADS for name in ("learning", "orthogonality")]
    for file in [*files, "drift/drift.pdf", "plots/gradients.svg"]:
        assert Path(file).read_bytes().startswith(HEADS[file[-3:]]), file
    assert Path("runs/learning.svg").read_bytes() == Path("plots/learning.svg").read_bytes()
    assert main("plot runs --out large".split()) == 0
    heads = (Path(folder, "learning.png").read_bytes()[16:20] for folder in ("plots", "large"))
    assert [int.from_bytes(width, "big") for width in heads] == [360, 1440]


@pytest.mark.parametrize(("option", "says"), [("--format gif", "png"), ("--dpi 2", "20"), ("--dpi 9999", "2400")])
def test_a_format_that_is_none_is_refused_before_anything_is_done(
    option: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (f"compare copying --models scornn {SMALL}", "drift --steps 1", "plot gradients", "plot ."):
        assert says in refused(f"{words} {option}", capsys)
        assert not list(Path().iterdir())


def test_list_fits_into_80_columns_and_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("list", capsys)
    assert "…" not in text
    for found in kinds().values():
        assert all(f"│ {name} " in text for name in found)


def test_list_of_a_name_shows_its_options_image_cost_and_reference(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, found in kinds().items():
        for name, target in found.items():
            text = shown(f"list {name}", capsys)
            assert text.startswith(f"{name}: a")
            assert "…" not in text
            if kind in ("parametrization", "model"):
                assert "References" in text
            if kind == "parametrization":
                assert all(f"\n  {fact} " in text for fact in ("shapes", "cost", "init", "precision", "use"))
                options = list(inspect.signature(target.__init__).parameters)[4:]
                assert all(f"\n  {option} " in text for option in options)
    assert "skew 28" in shown("list cayley", capsys)
    assert 'did you mean "cayley"' in refused("list cayly", capsys)


class Half(sk.OrthogonalParam):
    """A map whose author has not come far."""

    coordinate_names = ("skew",)

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        return [((4, 4), {})]


@pytest.mark.slow
def test_a_class_that_lacks_a_method_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = table.registered.copy()
    own.register("half", Half)
    monkeypatch.setattr(table, "registered", own)
    missing = "'half' is left out: A parametrization needs coordinates, forward, traits, got Half without"
    for words in (
        "list",
        "bench parametrizations --sizes 2 --parametrizations givens --operations forward --seconds 0.01",
    ):
        with pytest.warns(UserWarning, match=missing):
            assert "half" not in shown(words, capsys)
    with pytest.warns(UserWarning, match=missing):
        assert "No parametrization is named 'half'" in refused("bench parametrizations --parametrizations half", capsys)
    for given in ("half", Half):
        with pytest.raises(errors.OptionError, match="needs coordinates, forward, traits"):
            sk.orthogonal(nn.Linear(4, 4), "weight", given)


def test_a_member_without_coordinate_names_is_refused_in_one_sentence() -> None:
    class Nameless(sk.parametrizations.Cayley):
        pass

    names = "coordinate_names"
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(sk.parametrizations.Cayley, names)
        with pytest.raises(errors.OptionError, match=names):
            sk.orthogonal(nn.Linear(4, 4), "weight", Nameless)


def test_every_column_of_growth_has_a_heading() -> None:
    of_one = {"contender": "one", "precision": None, "dtype": "float32", "expected": 3.0, "spread": 0.1}
    of_one |= {"first": 1, "last": 2, "overhead_until": None, "against": "n", "points": [1, 2], "device": "cpu"}
    rows = [
        Row({**of_one, "exponent": exponent, "faster": faster})
        for exponent, faster in ((3.5, True), (2.9, False), (None, False))
    ]
    (table,) = of_race(Race("n", "time", rows, {}), "float32")
    assert all(table.columns)
    assert [row.cells[-1] for row in table.rows] == ["yes", "no", None]


PLANS = {
    "drift": DriftPlan,
    "report": ReportPlan,
    "plot gradients": GradientPlan,
    "bench growth": GrowthPlan,
    "bench norms": NormPlan,
    "bench optimizers": OptimizerRace,
    "bench parametrizations": ParametrizationRace,
    "bench scan": ScanRace,
}


@pytest.mark.parametrize("command", PLANS)
def test_every_field_of_a_plan_is_an_option_with_its_own_words(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(shown(f"{command} --help", capsys).replace("│", " ").split())
    for field in dataclasses.fields(PLANS[command]):
        names = field.metadata.get("fields", field.metadata.get("names", (f"--{field.name}",)))
        for name in () if field.metadata.get("hidden") else names:
            option = f"--{name.lstrip('-').replace('_', '-')} "
            assert text.count(f" {option}") >= 1, option
    assert all(help for _, _, help, _ in facts(PLANS[command]).values())


def test_options_left_out_are_those_of_the_plan() -> None:
    for cls in PLANS.values():
        assert built(cls, {}) == cls()


MANY = ".".join(["a"] * 30_000)
HOSTILE = {
    "lists in lists": ("lr = " + "[" * 20_000 + "]" * 20_000, "nested too deeply"),
    "tables in tables": ("a = " + "{a = " * 20_000 + "1" + "}" * 20_000, "nested too deeply"),
    "tables as deep as Python reads": ("a = " + "{a = " * 50 + "1" + "}" * 50, "nested too deeply"),
    "a long key": (f"{MANY} = 1", "more than 32 parts"),
    "a long heading": (f"[{MANY}]", "more than 32 parts"),
    "a long key in a table": (f"a = {{{MANY} = 1}}", "more than 32 parts"),
    "a quoted key": (".".join(['"a b"'] * 30_000) + " = 1", "more than 32 parts"),
    "a large file": ("#" * 2**20 + "\n", "larger than"),
    "a null character": ('device = "a\\u0000b"', "null character"),
    "no text": ("\udcff", "can't decode"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", [f"{TRAIN} --out run --config", "sweep --out run"])
def test_a_file_that_no_options_need_is_refused_in_a_sentence(
    name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, sentence = HOSTILE[name]
    Path("options.toml").write_bytes(text.encode(errors="surrogateescape"))
    error = refused(f"{command} options.toml", capsys)
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert not Path("run").exists()


def test_long_lists_of_numbers_and_words_with_dots_are_read() -> None:
    numbers = ", ".join(f"0.{i}" for i in range(1, 2000))
    Path("options.toml").write_text(f'lr = [{numbers}]\nfile = "{"a/b.c-" * 40}"\na.b."c.d" = 1\n')
    assert len(read_options(Path("options.toml")).options["lr"]) == 1999


TINY = ["--T", "1", "--train-size", "2", "--test-size", "2", "--hidden-size", "2", "--batch-size", "2", "--steps", "1"]


def test_help_is_drawn_when_it_is_asked_for(monkeypatch, tmp_path):
    def refuse(*names):
        raise LookupError(names)

    monkeypatch.setattr("stiefelkit.cli.tasks._settings", refuse)
    assert main(["train", "copying", "--model", "scornn", *TINY, "--out", str(tmp_path / "run")]) == 0
    with pytest.raises(LookupError):
        main(["train", "copying", "--help"])


def test_a_run_begins_within_two_thousand_calls(tmp_path):
    home, calls = str(Path(sk.__file__).parent), Counter()

    def count(frame, event, argument):
        code = frame.f_code
        begun = code.co_name == "advance" and code.co_filename.endswith("session.py")
        if event == "call" and not calls["begun"] and code.co_name != "<module>" and code.co_filename.startswith(home):
            calls["begun" if begun else "before"] += 1

    for name in ("one", "two"):  # the first imports what it needs
        calls.clear()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            assert main(["train", "copying", "--model", "scornn", *TINY, "--out", str(tmp_path / name)]) == 0
        finally:
            sys.setprofile(before)
    assert calls["begun"] == 1
    assert calls["before"] <= 2000


def test_a_list_in_a_file_is_the_words_with_commas_of_the_command_line() -> None:
    Path("my.toml").write_text('models = ["scornn", "lstm"]\nsteps = 1\nbatch-size = 4\nT = 2\n')
    assert main("compare copying --config my.toml --out both".split()) == 0
    assert sorted(path.name for path in Path("both").iterdir() if path.is_dir()) == ["lstm", "scornn"]


@pytest.mark.parametrize("more", ["", "--rates.u 1e-3 "])
def test_names_with_dots_are_names_of_coordinates(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train copying --model scurnn --steps 1 {more}--rates.u.skew 1e-3 --out"
    assert main([*words.split(), str(tmp_path / "run")]) == 2
    assert f"no coordinate '{'u' if more else 'u.skew'}'" in capsys.readouterr().err

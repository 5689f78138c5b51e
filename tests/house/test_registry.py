import dataclasses
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors, registry
from stiefelkit.cli.runs import add_tasks, train
from stiefelkit.contract import table
from stiefelkit.registry import Registry
from stiefelkit.training.tasks import tasks


class Mine(sk.parametrizations.Cayley):
    pass


@pytest.fixture
def fresh(monkeypatch):
    own = Registry(
        "stiefelkit.parametrizations",
        "parametrization",
        {"cayley": "stiefelkit.parametrizations.cayley:Cayley"},
        table.registered.check,
    )
    monkeypatch.setattr(table, "registered", own)
    return own


def plugins(monkeypatch, **points):
    from importlib.metadata import EntryPoint

    found = [EntryPoint(name, value, "stiefelkit.parametrizations") for name, value in points.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)


def test_a_taken_name_is_refused(fresh):
    with pytest.raises(errors.OptionError, match="taken"):
        sk.register("cayley", Mine)
    for _ in range(2):
        sk.register("mine", Mine)
    assert sk.available()["mine"] is Mine
    assert fresh.name_of(Mine) == "mine"


@pytest.mark.parametrize(("name", "target"), [("mine", int), ("my map", Mine)])
def test_what_is_no_parametrization_or_no_word_is_refused(fresh, name, target):
    with pytest.raises(errors.OptionError):
        sk.register(name, target)


def install(folder, monkeypatch, name, points, **modules):
    """Puts a distribution with these lines of entry points, and its modules, where Python finds them."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(points)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("line", [b"mine\n", b"\xff = a:b\n"])
def test_a_distribution_that_cannot_be_read_is_left_out_beside_a_good_one(fresh, monkeypatch, tmp_path, line):
    good = b"[stiefelkit.parametrizations]\nturned = turned_plugin:Mine\n"
    text = "from stiefelkit.parametrizations.cayley import Cayley\n\n\nclass Mine(Cayley):\n    pass\n"
    install(tmp_path, monkeypatch, "damaged", b"[stiefelkit.parametrizations]\n" + line)
    install(tmp_path, monkeypatch, "good", good, turned_plugin=text)
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert set(sk.available()) == {"cayley", "turned"}
    assert len(caught) == 1
    assert fresh.origin("turned") == "good 1.0"


@pytest.mark.parametrize("text", ["raise SystemExit", "1 / 0"])
def test_a_plugin_that_fails_when_imported_is_left_out(fresh, monkeypatch, tmp_path, text):
    points = b"[stiefelkit.parametrizations]\nends = ends_plugin:Mine\n"
    install(tmp_path, monkeypatch, "ends", points, ends_plugin=text)
    with pytest.warns(UserWarning, match="'ends' is left out"):
        assert set(sk.available()) == {"cayley"}
    with pytest.raises(errors.PluginError, match="import"):
        sk.orthogonal(torch.nn.Linear(2, 2), "weight", "ends")


def test_ctrl_c_while_a_plugin_is_imported_stops_the_program(fresh, monkeypatch, tmp_path):
    points = b"[stiefelkit.parametrizations]\nslow = slow_plugin:Mine\n"
    install(tmp_path, monkeypatch, "slow", points, slow_plugin="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        sk.available()


def test_a_plugin_that_fails_when_it_is_looked_at_is_left_out():
    def check(target):
        raise SystemExit(4)

    table = Registry("nobody.home", "root", {"square": "math:sqrt"}, check)
    with pytest.raises(errors.PluginError, match=r"needs to be one that can be looked at, got SystemExit\(4\)\."):
        table.find("square")
    with pytest.warns(UserWarning, match="'square' is left out"):
        assert table.available() == {}
    roots = Registry("nobody.home", "root", {"square": "math:sqrt", "cube": "math:cbrt"})
    with pytest.warns(UserWarning, match="'cube' is left out: The root 'cube' needs code that runs, got ZeroDivision"):
        assert roots.map(lambda name, root: 1 / (name != "cube")) == {"square": 1}


def test_a_task_whose_options_cannot_be_read_leaves_the_others_their_commands(monkeypatch):
    odd = dataclasses.dataclass(frozen=True)(
        type("Odd", (tasks.get("copying"),), {"__annotations__": {"a": "Unheard"}, "a": 3, "name": "odd"})
    )
    monkeypatch.setitem(tasks._targets, "odd", odd)
    with pytest.warns(UserWarning, match="The task 'odd' is left out"):
        add_tasks()
    assert "copying" in train
    assert "odd" not in train


def test_a_contested_name_is_an_error_where_it_is_used(fresh, monkeypatch):
    from importlib.metadata import EntryPoint

    points = [EntryPoint("mine", f"{home}:Map", "stiefelkit.parametrizations") for home in ("here", "there")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(errors.OptionError, match="one owner"):
        fresh.get("mine")
    assert fresh.get("cayley")


def test_a_plugin_does_not_displace_a_built_in(fresh, monkeypatch):
    plugins(monkeypatch, cayley="elsewhere:Cayley")
    with pytest.warns(UserWarning, match="built in"):
        assert fresh.get("cayley").__name__ == "Cayley"


def test_names_say_which_distribution_they_come_from(fresh, monkeypatch, tmp_path):
    from importlib.metadata import Distribution, EntryPoint

    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: rotations\nVersion: 1.2\n")
    point = EntryPoint("mine", "no.such.module:Map", "stiefelkit.parametrizations")
    point = point._for(Distribution.at(tmp_path))  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    sk.register("by_hand", Mine)
    origins = [fresh.origin(name) for name in ("cayley", "mine", "by_hand")]
    assert origins == [f"stiefelkit {sk.__version__}", "rotations 1.2", None]
    with pytest.raises(errors.UnknownNameError, match="cayley"):
        fresh.origin("cayly")


def test_what_is_not_of_the_kind_is_refused_by_name_and_left_out_with_a_warning():
    def check(target):
        if not callable(target):
            raise errors.OptionError(f"A root needs to be a function, got {target!r}.")

    table = Registry("nobody.home", "root", {"square": "math:sqrt", "pi": "math:pi"}, check)
    assert table.find("square") is math.sqrt
    with pytest.raises(errors.OptionError, match=r"got 3\.14"):
        table.find("pi")
    with pytest.raises(errors.OptionError, match="got 2"):
        table.find(2)
    with pytest.warns(UserWarning, match="The root 'pi' is left out: A root needs"):
        assert set(table.available()) == {"square"}


@pytest.mark.slow
def test_members_load_lazily():
    code = """
        import sys, stiefelkit
        assert "stiefelkit.parametrizations.cayley" not in sys.modules
        stiefelkit.parametrizations.Cayley
        assert "stiefelkit.parametrizations.cayley" in sys.modules
        assert "matplotlib" not in sys.modules and "sklearn" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.slow
def test_the_tests_are_of_what_stands_here_whatever_plugins_are_installed(tmp_path):
    folder = tmp_path / "plugin-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[stiefelkit.parametrizations]\nmine = plugin:Mine\n")
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parents[1])!r}]\n"
        "from stiefelkit.contract import table\n"
        "import conftest\n"
        "assert 'mine' not in table.registered.names()\n"
        "assert conftest.INSTALLED\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_damaged_distribution_without_plugins_of_this_kind_is_nobodys_business(fresh, monkeypatch, tmp_path):
    install(tmp_path, monkeypatch, "damaged", b"[console_scripts]\nmine\n")
    assert fresh.names() == ["cayley"]

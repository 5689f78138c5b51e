import subprocess
import sys
import textwrap

import pytest

import stiefelkit as sk
from stiefelkit import errors, registry
from stiefelkit.registry import Registry


class Mine(sk.parametrizations.Cayley):
    pass


@pytest.fixture
def fresh(monkeypatch):
    own = Registry("parametrization", {"cayley": "stiefelkit.parametrizations.cayley:Cayley"}, "nobody.home")
    monkeypatch.setattr(registry, "parametrizations", own)
    return own


def plugins(monkeypatch, **points):
    from importlib.metadata import EntryPoint

    found = [EntryPoint(name, value, "stiefelkit.parametrizations") for name, value in points.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)


def test_a_registered_class_is_found_by_name(fresh):
    sk.register("mine", Mine)
    assert sk.available()["mine"] is Mine
    assert fresh.name_of(Mine) == "mine"


def test_a_taken_name_is_refused(fresh):
    with pytest.raises(errors.OptionError, match="taken"):
        sk.register("cayley", Mine)
    sk.register("mine", Mine)
    sk.register("mine", Mine)


@pytest.mark.parametrize(("name", "target"), [("mine", int), ("my map", Mine), ("", Mine)])
def test_what_is_no_parametrization_or_no_word_is_refused(fresh, name, target):
    with pytest.raises(errors.OptionError):
        sk.register(name, target)


def test_an_installed_plugin_is_available(fresh, monkeypatch):
    plugins(monkeypatch, mine="stiefelkit.parametrizations.cayley:Cayley")
    assert "mine" in sk.available()


def test_a_broken_plugin_warns_and_the_rest_works(fresh, monkeypatch):
    plugins(monkeypatch, broken="no.such.module:Map")
    with pytest.warns(UserWarning, match="broken"):
        assert set(sk.available()) == {"cayley"}


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


def test_a_plugin_that_is_no_parametrization_warns_and_is_left_out(fresh, monkeypatch):
    plugins(monkeypatch, root="math:sqrt")
    with pytest.warns(UserWarning, match="root"):
        assert set(sk.available()) == {"cayley"}


def test_a_broken_plugin_asked_for_by_name_is_one_sentence(fresh, monkeypatch):
    plugins(monkeypatch, broken="no.such.module:Map")
    with pytest.raises(errors.PluginError, match=r"'broken' needs 'no\.such\.module:Map' to import"):
        fresh.get("broken")


def test_members_load_lazily():
    code = """
        import sys, stiefelkit
        assert "stiefelkit.parametrizations.cayley" not in sys.modules
        stiefelkit.parametrizations.Cayley
        assert "stiefelkit.parametrizations.cayley" in sys.modules
        assert "matplotlib" not in sys.modules and "sklearn" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_unknown_attributes_are_attribute_errors():
    with pytest.raises(AttributeError):
        sk.parametrizations.Givenss  # noqa: B018

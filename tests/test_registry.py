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
    plugins(monkeypatch, cayley="elsewhere:Cayley", mine="stiefelkit.parametrizations.cayley:Cayley")
    with pytest.raises(errors.OptionError, match="one owner"):
        fresh.get("cayley")
    assert fresh.get("mine")


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

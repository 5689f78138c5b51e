import contextlib
import gc
import os
import signal
import zlib
from importlib.metadata import distributions

import pytest
import torch
from hypothesis import settings

from stiefelkit import registry
from stiefelkit.functional._kernels import launch
from stiefelkit.testing import lowered_products, seeds

pytest.register_assert_rewrite(
    "decoder_laws", "manifold_laws", "task_laws", "optimizers_at_hand", "tiny_runs", "two_ranks"
)

THREADS = "STIEFELKIT_TEST_THREADS"
PRECISION = "STIEFELKIT_TEST_PRECISION"
IS_LOWERED = os.environ.get(PRECISION, "highest") != "highest"

INSTALLED = [p for place in distributions() for p in place.entry_points if p.group.startswith("stiefelkit.")]
"""Plugins of the environment, which are not what is tested; those that a test itself brings are seen."""
_entry_points = registry.entry_points
registry.entry_points = lambda group: [point for point in _entry_points(group) if point not in INSTALLED]

torch.set_num_threads(int(os.environ.get(THREADS, "1")))
if IS_LOWERED:
    torch.set_float32_matmul_precision(os.environ[PRECISION])

settings.register_profile("laws", deadline=None, derandomize=seeds.seed() == 0, database=None)
settings.load_profile("laws")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow what `make test` leaves to `make test-all`: the cases of a test beyond a spread of some of them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        kept = max(8, round(2.5 * len(each) ** 0.5))
        for item in sorted(each, key=lambda item: zlib.crc32(item.nodeid.encode()))[kept:]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        freeze_what_stays()


def freeze_what_stays():
    """Keeps modules, cases and caches from the garbage collector: each full turn over them takes two seconds."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    # A shell has its background jobs ignore Ctrl-C, nohup a hangup, and the commands that tests start inherit that.
    usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    for number, handler in ((getattr(signal, name), usual[name]) for name in usual if hasattr(signal, name)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # Without an offset hypothesis draws from the source of each test; with one, from the offset.
    if seeds.seed() and getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(seeds.seed())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    # The whole protocol, so that fixtures are inside as well.
    with lowered_products() if IS_LOWERED else contextlib.nullcontext():
        result = yield
    if nextitem is not None and nextitem.path != item.path:
        freeze_what_stays()
    return result


@pytest.fixture(autouse=True)
def _seeded():
    seeds.reseed()


@pytest.fixture
def _interpreter(monkeypatch):
    """Has Triton's interpreter run programs of scans."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def _as_on_a_device(_interpreter, monkeypatch):
    """Has it run those of maps too."""
    monkeypatch.setattr(launch.Interpreter, "is_on", True)


@pytest.fixture
def _for_gpus(monkeypatch, tmp_path):
    """Has programs compiled for GPUs that need not be there."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

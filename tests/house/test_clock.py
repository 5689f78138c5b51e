"""The laws of the clock: medians of interleaved samples, whose number follows from how long they take."""

import gc
import itertools

import pytest
import torch

from benchmarks.gpu.worker import indexed_device
from stiefelkit.measuring.clock import WARM_UPS, Timing, race


class Watch:
    """A clock that is told what each version takes, and writes down who ran."""

    def __init__(self, **seconds):
        self.seconds, self.samples = seconds, []
        self.versions = {name: (lambda name=name: self.ran.append(name)) for name in seconds}
        self.ran: list[str] = []

    def __call__(self, run, calls):
        before = len(self.ran)
        for _ in range(calls):
            run()
        name = self.ran[-1]
        assert len(self.ran) == before + calls
        self.samples.append(name)
        took = self.seconds[name]
        return calls * (took.pop(0) if isinstance(took, list) else took)

    @property
    def measured(self):
        """Samples after the warm-up."""
        return self.samples[WARM_UPS * len(self.seconds) :]


def test_a_timing_is_the_median_of_the_samples_per_call():
    warm = [1.0] * WARM_UPS
    watch = Watch(a=[*warm, 5.0, 1.0, 90.0], b=[*warm, 2.0, 2.0, 4.0])
    found = race(watch.versions, watch, repeats=3, seconds=9)
    assert list(found) == ["a", "b"]
    assert [found[name].median for name in "ab"] == [5.0, 2.0]
    assert found["a"] == Timing((5.0, 1.0, 90.0))


def test_every_round_has_one_sample_of_each_version_and_the_order_changes():
    watch = Watch(a=0.01, b=0.02, c=0.03)
    race(watch.versions, watch, repeats=20, seconds=9)
    rounds = [tuple(watch.measured[i : i + 3]) for i in range(0, 60, 3)]
    assert all(set(each) == {"a", "b", "c"} for each in rounds)
    assert len(set(rounds)) > 2


def test_a_slow_version_gets_fewer_samples_spread_over_the_rounds():
    watch = Watch(slow=0.1, quick=0.01)
    found = race(watch.versions, watch, repeats=40, seconds=0.5)
    assert {name: len(timing.samples) for name, timing in found.items()} == {"slow": 5, "quick": 40}
    places = [i for i, name in enumerate(watch.measured) if name == "slow"]
    assert max(later - earlier for earlier, later in itertools.pairwise(places)) <= 2 + 40 // 5


@pytest.mark.parametrize("call", [2e-6, 0.01, 0.2, 35.0])
@pytest.mark.parametrize(("repeats", "seconds"), [(1, 0.1), (30, 0.25), (200, 4.0)])
def test_samples_of_a_race_take_no_more_than_their_seconds_or_one_call(call, repeats, seconds):
    watch = Watch(one=call)
    race(watch.versions, watch, repeats=repeats, seconds=seconds)
    assert call * (len(watch.ran) - WARM_UPS) <= max(seconds, call) * (1 + 1e-9)


@pytest.mark.slow
def test_a_quick_version_is_called_many_times_for_one_sample():
    watch = Watch(quick=1e-5)
    found = race(watch.versions, watch, repeats=3)
    assert len(watch.ran) == WARM_UPS + 3 * 100
    assert found["quick"].median == pytest.approx(1e-5)


@pytest.mark.slow
def test_the_collector_is_off_while_the_clock_runs_and_back_after_it():
    states = []
    race({"a": lambda: states.append(gc.isenabled())}, repeats=2)
    assert states
    assert not any(states)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        race({"a": lambda: 1 / 0})
    assert gc.isenabled()


@pytest.mark.parametrize(("given", "index"), [("cuda", 3), ("cuda:0", 0), ("cuda:2", 2), ("cpu", None)])
def test_a_cuda_device_without_an_index_is_the_current_one(monkeypatch, given, index):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert indexed_device(given) == torch.device(given.partition(":")[0], index)


def test_torch_refuses_to_set_a_device_without_an_index(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ValueError, match="index"):
        torch.cuda.set_device(torch.device("cuda"))
    torch.cuda.set_device(indexed_device("cuda"))
    assert chosen == [1]


def test_a_version_beyond_its_seconds_is_called_once_to_warm_up_and_once_for_its_sample():
    watch = Watch(slow=35.0, quick=0.01)
    found = race(watch.versions, watch, repeats=30, seconds=0.25)
    assert found["slow"] == Timing((35.0,))
    assert watch.ran.count("slow") == 2

"""What is done with a weight takes few calls."""

from benchmarks.calls import GOALS, ours


def test_each_operation_on_a_weight_stays_within_its_calls() -> None:
    found = ours()
    assert found.keys() == GOALS.keys()
    assert {name: count for name, count in found.items() if count > GOALS[name]} == {}

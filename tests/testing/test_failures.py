"""A broken law says what is needed to see it again."""

import re
import warnings
from typing import Any

import pytest

from stiefelkit.parametrizations.cayley import Cayley
from stiefelkit.testing import LawBroken, cases, check_parametrization, seeds


class Small(Cayley):
    @classmethod
    def examples(cls):
        return [((3, 3), {}), ((12, 12), {"precision": "fast"})]


class Stretched(Small):
    def forward(self, skew, phase=None):
        return super().forward(skew, phase) * 1.01


class WrongGradient(Small):
    def forward(self, skew, phase=None):
        return super().forward(skew + 1e-3 * (skew - skew.detach()), phase)


class WrongHessian(Small):
    def forward(self, skew, phase=None):
        return super().forward(skew + 1e-3 * (skew - skew.detach()) * skew.detach().sum(), phase)


class Raising(Small):
    def forward(self, skew, phase=None):
        raise ArithmeticError(f"no luck with {skew.numel()} coordinates")


def failures(cls, *args: Any, **options: Any) -> Any:
    with pytest.raises(LawBroken) as caught:
        check_parametrization(cls, *args, **options)
    assert str(caught.value) == "\n".join(map(str, caught.value.failures))
    return caught.value.failures


@pytest.mark.parametrize("offset", [0, 1000])
@pytest.mark.parametrize(
    ("cls", "law"),
    [
        (Stretched, "frames"),
        (Stretched, "round_trip"),
        (WrongGradient, "gradients"),
        (WrongHessian, "second_derivatives"),
        (Raising, "pure"),
    ],
)
def test_the_printed_line_repeats_the_failure(cls, law, offset):
    for failure in failures(cls, [law], offset=offset):
        with pytest.raises(LawBroken) as again:
            exec(failure.line, {})
        (found,) = again.value.failures
        assert str(found) == str(failure)
        if failure.where.endswith("float64") and cls in (WrongGradient, WrongHessian):
            assert re.search(r"\S+ along a direction, where a difference gives \S+: off by", failure.found)
            assert failure.figure > failure.bound


def test_a_line_for_a_class_that_cannot_be_imported_needs_it_in_scope():
    class Local(Stretched):
        pass

    failure = failures(Local, ["frames"])[0]
    with pytest.raises(LawBroken, match=re.escape(str(failure))):
        exec(failure.line, {"Local": Local})


def test_all_failures_are_listed_once_each_with_seed_figure_and_bound():
    (failure,) = failures(Stretched, ["frames"], only="Stretched-3x3-float64", offset=7)
    assert f"{seeds.OFFSET}=7" in failure.details
    assert failure.figure > failure.bound > 0  # type: ignore[operator]
    found = failures(Stretched, ["frames", "round_trip"])
    assert len({(failure.law, failure.where) for failure in found}) == len(found)
    names = {str(case) for case in cases(Stretched)}
    assert {failure.where for failure in found if failure.law == "frames"} == names


def test_the_decay_that_a_law_asks_for_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_parametrization(Cayley, ["decay"], only="Cayley-9x4-float32")

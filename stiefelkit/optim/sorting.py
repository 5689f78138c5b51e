"""The frames of a group sorted into buckets, from one step to the next."""

import itertools
import operator
from collections.abc import MutableMapping
from typing import Any

from torch import Tensor

from stiefelkit.optim.bucket import Bucket, buckets, gradient_of

__all__ = ["Sorting"]

_dtype_of = operator.attrgetter("dtype")
_nothing = itertools.repeat(None)


class Sorting:
    """The buckets of a group, and by what they are known to be still the right ones.

    Args:
        params: the frames of the group.
        states: the optimizer's, by parameter.
    """

    def __init__(self, params: list[Tensor], states: MutableMapping[Tensor, dict[str, Any]]):
        self._params = list(params)
        self._lack = self._lacking()
        self._buckets = buckets(params, states)
        self._states = list(states.values())
        self._dtypes = [p.dtype for p in params]
        self._is_kept = not any(bucket.is_sharded for bucket in self._buckets)
        self._places = self._present_places() if self._is_kept else []

    def begun(self) -> list[Bucket]:
        """The buckets, at the beginning of a step."""
        for bucket in self._buckets:
            bucket.begin()
        return self._buckets

    def holds(self, params: list[Tensor], states: list[dict[str, Any]]) -> bool:
        """Whether the same frames have a gradient, in the same dtypes and places, and the same states."""
        return (
            self._is_kept
            and _are_same(self._params, params)
            and _are_same(self._states, states)
            and self._lack == self._lacking()
            and self._dtypes == [*map(_dtype_of, params)]
            and self._places == self._present_places()
        )

    def _lacking(self) -> list[bool]:
        return [*map(operator.is_, map(gradient_of, self._params), _nothing)]

    def _present_places(self) -> list[int]:
        # Whatever is assigned to `.data` is elsewhere.
        return [*map(Tensor.data_ptr, self._params)]


def _are_same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))

"""The frames of a group sorted into buckets, from one step to the next."""

import itertools
import operator
from collections.abc import MutableMapping
from typing import Any

from torch import Tensor

from stiefelkit.optim.bucket import buckets, gradient_of

__all__ = ["Sorting"]

_nothing = itertools.repeat(None)


class Sorting:
    """The buckets of a group, and by what they are known to be still the right ones.

    Args:
        params: the frames of the group.
        states: the optimizer's, by parameter.
    """

    def __init__(self, params: list[Tensor], states: MutableMapping[Tensor, dict[str, Any]]):
        self._params = list(params)
        self.buckets = buckets(params, states)
        self._states = list(states.values())
        self._is_kept = not any(bucket.is_sharded for bucket in self.buckets)
        if self._is_kept:
            self._lack = [p.grad is None for p in params]
            self._places = [*map(Tensor.data_ptr, params)]
            self._dtypes = [bucket.params[0].dtype for bucket in self.buckets]
            indices = {id(p): i for i, p in enumerate(params)}
            self._indices = [[indices[id(p)] for p in bucket.params] for bucket in self.buckets]

    def begin(self, params: list[Tensor], states: list[dict[str, Any]]) -> bool:
        """Begins a step of each bucket; False if other frames have a gradient by now, or they are not where they were.

        Args:
            params: the frames of the group now.
            states: all states of the optimizer.
        """
        if not (self._is_kept and _are_same(self._params, params) and _are_same(self._states, states)):
            return False
        gradients = [*map(gradient_of, params)]
        # What is assigned to `.data` is elsewhere.
        if self._lack != [*map(operator.is_, gradients, _nothing)] or self._places != [*map(Tensor.data_ptr, params)]:
            return False
        if self._dtypes != [bucket.params[0].dtype for bucket in self.buckets]:
            return False
        for bucket, indices in zip(self.buckets, self._indices, strict=True):
            bucket.begin([*map(gradients.__getitem__, indices)])
        return True

    def writes(self) -> dict[int, int]:
        """How often each frame had been written to after the last step, by id."""
        return {key: count for bucket in self.buckets for key, count in bucket.writes().items()}


def _are_same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))

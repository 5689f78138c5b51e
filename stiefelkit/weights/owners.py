"""Ranks that share the mapping of weights: each maps those that it owns, and all get all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from stiefelkit.errors import OptionError, shown
from stiefelkit.numbers import at_least, validate_fields_

__all__ = ["Kind", "Link", "Owners", "Prediction", "predict", "rows_of_ranks"]


_COLLECTIVES = 4
"""Of a step: whether all ranks are ready, the frames, which of them were read, their gradients."""
_PROBE = 1 << 18


@dataclass(frozen=True)
class Kind:
    """Weights of one map and shape.

    Attributes:
        count: how many there are.
        size: bytes of one of them.
        cost: of one beside one of another kind; ranks get equal shares of it.
        seconds: of mapping one more in a stack of them, forward and backward.
        call: seconds of mapping a stack, beside those of its weights.
    """

    count: int
    size: int
    cost: float
    seconds: float
    call: float = 0.0

    def time(self, count: int) -> float:
        """Seconds of mapping some of them together."""
        return self.call + count * self.seconds if count else 0.0


@dataclass(frozen=True)
class Link:
    """The link between ranks: the seconds of an empty collective, and the bytes that a rank receives in a second."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        validate_fields_(self, "Link", latency=at_least(0), bandwidth=at_least(0))


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step's mapping, if each rank maps all and if each maps its share.

    Attributes:
        alone: each maps all weights.
        mapping: the rank with the largest share maps it.
        talking: collectives.
        received: bytes that a rank receives in them.
    """

    alone: float
    mapping: float
    talking: float
    received: int

    @property
    def shared(self) -> float:
        """Seconds when each maps its share."""
        return self.mapping + self.talking


def rows_of_ranks(counts: Sequence[int], costs: Sequence[float], ranks: int) -> list[list[slice]]:
    """Returns which weights each rank owns: for each rank, a slice of each kind.

    All weights stand in one line, kind by kind, which is cut where the cost so far passes equal parts of it: no share
    exceeds its part by more than one weight, and a rank has few kinds.

    >>> rows_of_ranks([3], [1.0], 2)
    [[slice(0, 1, None)], [slice(1, 3, None)]]
    """
    total = math.fsum(count * cost for count, cost in zip(counts, costs, strict=True))
    rows: list[list[slice]] = [[] for _ in range(ranks)]
    before = 0.0
    for count, cost in zip(counts, costs, strict=True):
        owners = [min(ranks - 1, int(ranks * (before + (i + 0.5) * cost) / total)) for i in range(count)]
        cuts = [sum(owner < rank for owner in owners) for rank in range(ranks + 1)]
        for rank in range(ranks):
            rows[rank].append(slice(cuts[rank], cuts[rank + 1]))
        before += count * cost
    return rows


def predict(kinds: Sequence[Kind], ranks: int, link: Link) -> Prediction:
    """Seconds of a step's mapping by each of the two roads; docs/distributed.md has the model."""
    rows = rows_of_ranks([kind.count for kind in kinds], [kind.cost for kind in kinds], ranks)
    shares = [[part.stop - part.start for part in row] for row in rows]
    mapping = max(sum(kind.time(n) for n, kind in zip(share, kinds, strict=True)) for share in shares)
    chunk = max(sum(n * kind.size for n, kind in zip(share, kinds, strict=True)) for share in shares)
    received = 2 * (ranks - 1) * chunk
    alone = sum(kind.time(kind.count) for kind in kinds)
    return Prediction(alone, mapping, _COLLECTIVES * link.latency + received / link.bandwidth, received)


class Owners:
    """The ranks that share the mapping of a model's weights, for `sk.group_(model, owners=...)`.

    To be made by all of them, at the same place of the program: it opens process groups of its own, so that what it
    says does not meet what DDP says.

    Args:
        process_group: the ranks, those of DDP; None for all.
        when: "cheaper" than that each maps all weights, as `group_` measures it once, or "always". What is measured
            differs from run to run, and the two roads differ by rounding: runs to be repeated to the bit take "always".
        link: what joins the ranks; None to measure it, where it matters.

    Raises:
        OptionError: `when` is another word, or torch.distributed has not been set up.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        when: Literal["cheaper", "always"] = "cheaper",
        link: Link | None = None,
    ):
        if when not in ("cheaper", "always"):
            raise OptionError(f'Owners needs when="cheaper" or when="always", got {shown(when)}.')
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError("Owners needs torch.distributed, got none; call init_process_group first.")
        self.when, self.link = when, link
        ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
        self.values = dist.new_group(ranks, use_local_synchronization=ranks is not None)
        self.words: Any = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
        self.rank, self.size = dist.get_rank(self.words), dist.get_world_size(self.words)

    def told(self, word: Any) -> list[Any]:
        """Returns what all ranks say, of any kind."""
        words: list[Any] = [None] * self.size
        dist.all_gather_object(words, word, group=self.words)
        return words

    def told_numbers(self, *numbers: int) -> list[list[int]]:
        """Returns what all ranks say in a few numbers."""
        numbers_of_all = torch.empty(self.size * len(numbers), dtype=torch.int64, device="cpu")
        _gather(numbers_of_all, torch.tensor(numbers, device="cpu"), group=self.words)
        return numbers_of_all.view(self.size, -1).tolist()

    def any_of(self, claims: Tensor) -> Tensor:
        """Returns which claims, a uint8 tensor on the CPU, some rank makes."""
        dist.all_reduce(claims, dist.ReduceOp.MAX, group=self.words)
        return claims

    def gathered(self, x: Tensor) -> Tensor:
        """Vectors of one length of all ranks, one after the other: (size, length)."""
        vectors = x.new_empty(self.size * len(x))
        _gather(vectors, x, group=self.values)
        return vectors.view(self.size, -1)

    def added(self, x: Tensor) -> Tensor:
        """Returns the row of (size, length) that is this rank's, summed over the ranks."""
        row = x.new_empty(x.shape[1])
        _add(row, x.view(-1), group=self.values)
        return row

    def measured_link(self, device: torch.device) -> Link:
        """Returns the link that was given, or what these ranks measure: the slowest of them decides."""
        if self.link is None:
            empty, full = torch.zeros(1, device=device), torch.zeros(_PROBE, device=device)
            latency = seconds_of(lambda: self.gathered(empty), device, 10)
            gathering = seconds_of(lambda: self.gathered(full), device, 5)
            adding = seconds_of(lambda: self.added(full.expand(self.size, -1).contiguous()), device, 5)
            latency, moving = map(max, zip(*self.told((latency, gathering + adding)), strict=True))
            received = 2 * (self.size - 1) * full.nbytes
            self.link = Link(latency, received / max(moving - 2 * latency, 1e-9))
        return self.link


def seconds_of(run: Any, device: torch.device, times: int) -> float:
    """Returns the shortest time of some runs after a first one."""
    taken: list[float] = []
    for _ in range(times + 1):
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


# torch 2.13 has renamed both, and warns of the former names.
_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_add: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)

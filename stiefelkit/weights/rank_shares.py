"""Weights of a model that ranks map in shares: what each maps, what is said, and how gradients come back."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stiefelkit._torch import is_in_backward, is_intercepted, tree_flatten, tree_unflatten
from stiefelkit.contract.param import title
from stiefelkit.errors import OptionError, PeerError
from stiefelkit.weights.group import Backward, Evaluation, Group, Reading, StackOfMaps, omit_unread, structure
from stiefelkit.weights.owners import Kind, Owners, predict, rows_of_ranks, seconds_of

_READY, _ALONE, _FAILED = range(3)
_MARGIN = 1.25
"""Factor for copies and for waiting for the slowest rank, beyond the prediction."""


class _Vector:
    """Frames of one dtype and device on their way: a vector of each rank, all of one length, with a span for each kind.

    `kinds` has shape and dtype of the frames, and `rows` the rows that each rank owns, by the kind's number.
    """

    def __init__(
        self, kinds: dict[int, tuple[tuple[int, ...], torch.dtype]], rows: list[list[slice]], device: torch.device
    ):
        self.kinds, self.rows, self.device = kinds, rows, device
        self.spans: list[dict[int, slice]] = []
        for row in rows:
            start = 0
            self.spans.append({})
            for i, (shape, dtype) in kinds.items():
                stop = start + (row[i].stop - row[i].start) * math.prod(shape) * (2 if dtype.is_complex else 1)
                self.spans[-1][i] = slice(start, stop)
                start = stop
        self.length = max(span.stop for spans in self.spans for span in spans.values())
        self.dtype = next(iter(kinds.values()))[1].to_real()
        self.summed = torch.promote_types(self.dtype, torch.float32)

    def packed(self, stacks: dict[int, Tensor], rank: int) -> Tensor:
        """Returns the frames of one rank."""
        vector = torch.zeros(self.length, dtype=self.dtype, device=self.device)
        for i in self.kinds.keys() & stacks.keys():
            vector[self.spans[rank][i]] = _real(stacks[i]).flatten()
        return vector

    def unpacked(self, vectors: Tensor) -> dict[int, Tensor]:
        """Returns the frames of all ranks, by kind."""
        return {
            i: self._frames(torch.cat([v[spans[i]] for v, spans in zip(vectors, self.spans, strict=True)]), i)
            for i in self.kinds
        }

    def sorted(self, gradients: dict[int, Tensor]) -> Tensor:
        """Gradients of the frames of all ranks, by their owner: (ranks, length)."""
        vectors = torch.zeros(len(self.rows), self.length, dtype=self.summed, device=self.device)
        for vector, spans, rows in zip(vectors, self.spans, self.rows, strict=True):
            for i in self.kinds.keys() & gradients.keys():
                vector[spans[i]] = _real(gradients[i][rows[i]]).flatten()
        return vectors

    def sums(self, vector: Tensor, rank: int) -> dict[int, Tensor]:
        """Returns the gradients of the frames of one rank, by kind."""
        vector = vector.to(self.dtype)
        return {i: self._frames(vector[self.spans[rank][i]], i) for i in self.kinds}

    def _frames(self, entries: Tensor, i: int) -> Tensor:
        shape, dtype = self.kinds[i]
        return torch.view_as_complex(entries.view(-1, *shape, 2)) if dtype.is_complex else entries.view(-1, *shape)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


@dataclass(frozen=True)
class _Layout:
    """The rows of each kind that a rank owns, their maps, and the vectors in which they travel."""

    rows: list[slice]
    maps: dict[int, StackOfMaps]
    vectors: list[_Vector]


@dataclass
class _Share:
    """A rank's share of one kind: its rows, mapped, and the coordinates of the others, row by row."""

    rows: slice
    stacked: Tensor | None
    others: list[tuple[int, Tensor]]
    backward: Backward


class Sharing:
    """Weights of a model, by kind, each kind parted among ranks; those that nobody trains are left to each rank."""

    def __init__(self, groups: Sequence[Group], owners: Owners):
        self.groups, self.owners = groups, owners
        self.idle: frozenset[int] = frozenset()
        self.params = [group.lists[0].param for group in groups]
        self.costs = [math.prod(p.shape) ** (p.traits.cost_exponent / 2) for p in self.params]
        """The relative cost of a weight of each kind: n to the exponent for one of n x n."""
        pairs = zip(groups, self.params, strict=True)
        self.names = [f"{len(g.lists)} of {title(p)} {tuple(p.shape)} {p.dtype} {p.options()}" for g, p in pairs]
        self.signature = zlib.crc32("\n".join(self.names).encode())
        self.layouts: dict[tuple[int, ...], _Layout] = {}

    def pays(self) -> bool:
        """Returns whether shares are to be mapped at all: measured once, by all ranks, which come to one answer."""
        owners = self.owners
        readings = [group.read() for group in self.groups]
        device = next((reading.columns[0][0].device for reading in readings if reading), torch.device("cpu"))
        is_measured = owners.when == "cheaper" and None not in readings
        seconds = [self._seconds(i, reading) for i, reading in enumerate(readings)] if is_measured else []
        told = owners.told((self.names, None in readings, seconds))
        if any(names != self.names for names, _, _ in told):
            raise OptionError(
                "group_ with owners needs the same weights on all ranks, got "
                + "; ".join(f"{', '.join(names) or 'none'} on rank {rank}" for rank, (names, _, _) in enumerate(told))
                + "."
            )
        if any(is_unread for _, is_unread, _ in told):
            raise OptionError(
                "group_ with owners needs coordinates that hold values and are not sharded, all or none of a kind "
                "frozen, got others; load or unfreeze them first, or leave owners out."
            )
        if owners.when == "always" or owners.size == 1 or not self.groups:
            return owners.size > 1 and bool(self.groups)
        slowest = [tuple(map(max, zip(*times, strict=True))) for times in zip(*(t for _, _, t in told), strict=True)]
        kinds = [
            Kind(len(group.lists), math.prod(p.shape) * p.dtype.itemsize, cost, one_more, call)
            for group, p, cost, (one_more, call) in zip(self.groups, self.params, self.costs, slowest, strict=True)
        ]
        prediction = predict(kinds, owners.size, owners.measured_link(device))
        return _MARGIN * prediction.shared < prediction.alone

    def _seconds(self, i: int, reading: Reading | None) -> tuple[float, float]:
        """Returns the seconds of one more weight of a kind, forward and backward, and of a call."""
        group = self.groups[i]
        if reading is None or not any(column[0].requires_grad for column in reading.columns):
            return 0.0, 0.0

        def seconds(count: int) -> float:
            stack_of_maps, some = StackOfMaps(self.params[i]), _rows_of(reading, slice(0, count))

            @torch.enable_grad()
            def run() -> None:
                coordinates, stacked = group.map_rows(stack_of_maps, some)
                torch.autograd.grad(stacked, [c for c in coordinates if c.requires_grad], torch.ones_like(stacked))

            return seconds_of(run, some.columns[0][0].device, 2)

        count = len(group.lists)
        share = -(-count // self.owners.size)
        few, all_of_them = seconds(share), seconds(count)
        if share == count:
            return 0.0, few
        one_more = max(all_of_them - few, 0.0) / (count - share)
        return one_more, max(few - share * one_more, 0.0)

    def evaluate(self) -> Tensor | None:
        """Maps this rank's share, gets the others', and leaves all to be read from; None if each rank has to map all.

        Returns a zero for `joined`; raises PeerError if another rank has failed.
        """
        if is_intercepted() or is_in_backward():
            return None
        exchange, failure, state = None, None, _ALONE
        try:
            readings = self._readings()
            if readings:
                exchange, state = _Exchange(self, readings), _READY
        except Exception as error:
            state, failure = _FAILED, error
        kinds = exchange.readings if exchange else ()
        told = self.owners.told_numbers(state, hash((self.signature, *kinds)))
        if any(other == _FAILED for other, _ in told):
            self._tell(failure)
        if any(numbers != told[0] for numbers in told):
            structure.count += 1  # a rank had frozen others when it grouped them
            return None
        return exchange and exchange.hand_out()

    def _tell(self, failure: Exception | None) -> None:
        """Raises what has failed, here or elsewhere."""
        told = self.owners.told(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        rank = next(rank for rank, sentence in enumerate(told) if sentence is not None)
        raise PeerError(f"group_ needs every rank to map its share of the weights, got from rank {rank} {told[rank]}")

    def _readings(self) -> dict[int, Reading]:
        """Returns what is to be mapped, by kind; nothing if one kind cannot be, which is a matter of each rank then."""
        readings: dict[int, Reading] = {}
        for i, group in enumerate(self.groups):
            if i in self.idle:
                continue
            reading = group.read()
            if reading is None:
                return {}
            if any(column[0].requires_grad for column in reading.columns):
                readings[i] = reading
        return readings

    def layout(self, kinds: tuple[int, ...]) -> _Layout:
        """Returns how the kinds that take part are shared."""
        if kinds not in self.layouts:
            counts = [len(group.lists) if i in kinds else 0 for i, group in enumerate(self.groups)]
            rows = rows_of_ranks(counts, self.costs, self.owners.size)
            alike: dict[tuple[torch.dtype, torch.device], dict[int, tuple[tuple[int, ...], torch.dtype]]] = {}
            for i in kinds:
                param, one = self.params[i], self.groups[i].lists[0]
                device = next(iter(one.coordinates.values())).device
                alike.setdefault((param.dtype.to_real(), device), {})[i] = param.shape, param.dtype
            vectors = [_Vector(part, rows, device) for (_, device), part in alike.items()]
            maps = {i: StackOfMaps(self.params[i]) for i in kinds}
            self.layouts[kinds] = _Layout(rows[self.owners.rank], maps, vectors)
        return self.layouts[kinds]

    def mapped(self, i: int, reading: Reading, layout: _Layout) -> _Share:
        """Returns this rank's weights of one kind, and the coordinates of the others."""
        group, rows, backward = self.groups[i], layout.rows[i], Backward()
        trained = [column for column in reading.columns[: group.size] if column[0].requires_grad]
        others = [(j, column[j]) for column in trained for j in (*range(rows.start), *range(rows.stop, len(column)))]
        if rows.start == rows.stop:
            return _Share(rows, None, others, backward)
        coordinates, stacked = group.map_rows(layout.maps[i], _rows_of(reading, rows))
        omit_unread(coordinates, backward)
        return _Share(rows, stacked, others, backward)


class _Exchange:
    """One forward and backward pass of a sharing."""

    def __init__(self, sharing: Sharing, readings: dict[int, Reading]):
        self.sharing, self.owners, self.readings = sharing, sharing.owners, readings
        layout = sharing.layout(tuple(readings))
        self.vectors = layout.vectors
        self.shares = {i: sharing.mapped(i, reading, layout) for i, reading in readings.items()}
        self.evaluations: dict[int, Evaluation] = {}

    def hand_out(self) -> Tensor:
        """Gathers the frames, and has groups hand them out."""
        inputs = [share.stacked for share in self.shares.values() if share.stacked is not None]
        others = [c for share in self.shares.values() for _, c in share.others]
        token, *stacks = _Gathered.apply(self, *inputs, *others)  # type: ignore[misc]
        for (i, reading), stacked in zip(self.readings.items(), stacks, strict=True):
            group = self.sharing.groups[i]
            self.evaluations[i] = evaluation = group.evaluated(reading, stacked)
            group.opening.evaluations[group] = group.latest = evaluation
        return token

    def gather(self) -> list[Tensor]:
        """Returns the frames of all ranks, kind by kind."""
        frames = {i: share.stacked.detach() for i, share in self.shares.items() if share.stacked is not None}
        stacks: dict[int, Tensor] = {}
        for vector in self.vectors:
            stacks |= vector.unpacked(self.owners.gathered(vector.packed(frames, self.owners.rank)))
        return [stacks[i] for i in self.shares]

    def add(self, stacks: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of this rank's frames, summed over the ranks, and zeros for coordinates of others.

        A weight that no rank has read leaves its coordinates without a gradient, on all of them.
        """
        gradients = {i: g for i, g in zip(self.shares, stacks, strict=True) if g is not None}
        reads = self._reads(gradients)
        sums: dict[int, Tensor] = {}
        for vector in self.vectors:
            sums |= vector.sums(self.owners.added(vector.sorted(gradients)), self.owners.rank)
        frames: list[Tensor | None] = []
        others: list[Tensor | None] = []
        for i, share in self.shares.items():
            self.evaluations[i].backward.is_done = True
            rows = share.rows
            share.backward.unread = frozenset(j - rows.start for j in range(rows.start, rows.stop) if not reads[i][j])
            if share.stacked is not None:
                frames.append(sums[i])
            others += [torch.zeros_like(c) if reads[i][j] else None for j, c in share.others]
        self.sharing.idle |= {i for i, rows in reads.items() if not any(rows)}
        return [*frames, *others]

    def _reads(self, gradients: dict[int, Tensor]) -> dict[int, list[int]]:
        """Returns which weights some rank has read, kind by kind."""
        claims: list[int] = []
        for i, evaluation in self.evaluations.items():
            unread = evaluation.backward.unread
            claims += [i in gradients and j not in unread for j in range(len(evaluation.weights))]
        told = iter(self.owners.any_of(torch.tensor(claims, dtype=torch.uint8, device="cpu")).tolist())
        return {i: [next(told) for _ in evaluation.weights] for i, evaluation in self.evaluations.items()}


class _Gathered(torch.autograd.Function):
    """Stacks of all ranks' frames from this rank's, and a zero that `joined` ties to what the model returns."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return torch.zeros((), device="cpu"), *exchange.gather()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *stacks: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.add(stacks)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return torch.zeros((), device="cpu"), *gradients


def joined(token: Tensor, output: Any) -> Any:
    """Ties frames to what a model returns, so that each backward pass adds their gradients, though it reads none.

    Else a rank whose loss depends on no weight would have the others wait for ever.
    """
    leaves, kind = tree_flatten(output)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        return output
    for i, x in zip(places, _Joined.apply(token, *(leaves[i] for i in places)), strict=True):  # type: ignore[arg-type]
        leaves[i] = x
    return tree_unflatten(leaves, kind)


def _rows_of(reading: Reading, rows: slice) -> Reading:
    return Reading([column[rows] for column in reading.columns], [column[rows] for column in reading.counts])

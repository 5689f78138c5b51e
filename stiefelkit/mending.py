"""Frames and charts that somebody else has written to, as averages of weights do: noticed, and mended or refused."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from stiefelkit._torch import write_count
from stiefelkit.dtypes import working_dtype
from stiefelkit.errors import NotAFrameError, RankError
from stiefelkit.functional import nearest_frame
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.param import OrthogonalParam
from stiefelkit.sharding import is_sharded

__all__ = ["Notes", "frame_tensors", "mend_"]

_MENDED_FROM = 32
"""Rounding limits from which a frame is mended: what optimizers leave in precision "fast" is 30."""


class Notes:
    """Remembers how often each of some tensors of modules had been written to.

    Neither by weak references, with which torch cannot swap tensors, nor by others, which would keep them in memory.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Mapping[str, Tensor | None], str, int, int]] = []

    def take(self, places: Iterable[tuple[Mapping[str, Tensor | None], str]]) -> None:
        """Notes tensors as they are now, each by the dictionary that holds it and its key, and forgets those before."""
        present = [(held, key, t) for held, key in places if (t := held.get(key)) is not None]
        self._noted = [
            (held, key, id(t), write_count(t))
            for held, key, t in present
            if not (t.is_inference() or t.is_meta or is_sharded(t))
        ]

    def written(self, may_stay: Callable[[Tensor], bool]) -> list[Tensor]:
        """Those that were written to since; others in their place, as functional_call puts there, do not count.

        Nor do those that may stay as they are; they are noted anew.
        """
        strange = []
        for i, (held, key, noted, version) in enumerate(self._noted):
            t = held.get(key)
            if t is None or id(t) != noted or write_count(t) == version:
                continue
            if may_stay(t):
                self._noted[i] = held, key, noted, write_count(t)
            else:
                strange.append(t)
        return strange


def frame_tensors(param: OrthogonalParam, coordinates: Mapping[str, Tensor]) -> list[tuple[Tensor, bool]]:
    """Each coordinate and buffer of a map that must stay a frame, and whether it is complex and stored as [Re, Im]."""
    bound = param.manifolds
    tensors = [(c, False) for name, c in coordinates.items() if name in bound] if bound else []
    for part in param.modules():
        if isinstance(part, OrthogonalParam):
            buffers = dict(part.named_buffers(recurse=False))
            tensors += [(buffers[name], part.is_complex) for name in part.frame_buffers if name in buffers]
    return tensors


@torch.no_grad()
def mend_(param: OrthogonalParam, coordinates: Mapping[str, Tensor], written: Iterable[Tensor], weight: str) -> None:
    """Takes frames that were written to, and are frames no more, to their nearest.

    Raises:
        NotAFrameError: the chart's signs or permutations have become something else.
        RankError: a frame has become so dependent that none is nearest.
    """
    keys = {id(t) for t in written}
    for t, packed in frame_tensors(param, coordinates):
        if id(t) in keys:
            w = torch.view_as_complex(t) if packed else t
            error, limit = orthogonality_error(w).max().item(), rounding_limit(w.shape[-1], w.dtype)
            if error > _MENDED_FROM * limit + torch.finfo(w.dtype).eps:
                try:
                    w.copy_(nearest_frame(w.to(working_dtype(w.dtype))))
                except RankError as cause:
                    raise RankError(
                        f"{weight} needs linearly independent columns to be taken to its nearest frame, got others, "
                        "written from outside; sk.reset_ draws a frame."
                    ) from cause
    reason = param.check_chart(param.chart)
    if reason is not None:
        raise NotAFrameError(
            f"{weight} needs {reason}, got others, written from outside; sk.optim.multi_avg_fn averages what may be."
        )

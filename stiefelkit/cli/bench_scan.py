"""`stiefelkit bench scan`."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from stiefelkit.cli.open_options import of_plan
from stiefelkit.cli.races import RowsFile, raced, table_of, three_digits
from stiefelkit.measuring.races.scan_plan import ScanRace

if TYPE_CHECKING:
    from stiefelkit.measuring.races.scan import ScanHeat

__all__ = ["scan"]


@of_plan(ScanRace)
def scan(*, plan: ScanRace, json: RowsFile = None) -> int:
    """Races the scan h_t = act(x_t U^T + h_{t-1} W^T), forward and backward, on this machine.

    Timed is the forward, and the backward to W, U and the bias from a dense dL/dh at every step; "last state" has
    dL/dh_T alone, and does not return the other states (last_only=True). W is given: the map to it is not in here.
    All run in turns in one process, after a warm-up; medians are shown. Time is process CPU time, or that between CUDA
    events on a GPU. Unit: LIMIT, the matrix products that no scan can do without, working in the cache: T of (B, n) by
    (n, n) forward, T backward, and one (n, TB) by (TB, n); complex states count as 2n real numbers.

    The cases, T steps of B sequences: A, T=784, n=170, B=128, m=1; B, T=1020, n=190, B=20, m=10; C, T=200, n=512, B=50,
    m=129; D, complex, T=784, n=116, B=50, m=1. On request, with "scan (factors)", which never forms W: E, complex,
    T=784, n=512, B=50, fourier; F, complex, T=784, n=1024, B=128, givens of two layers; G, T=784, n=256, B=128,
    householder of 32 reflections.

    Drawn: input normal, W a Haar frame, U Glorot-uniform, modReLU's bias U(-0.01, 0), for complex states
    U(-0.01, 0.01), dL/dh normal.

    Peers: the same cell as a loop with autograd, step by step; torch's RNN (tanh, or relu if that is --activation) and
    LSTM, of as many units as a state has real numbers; and the LSTM that the papers match by its number of parameters.

    "ours x" is the time over that of our scan: 2 means that ours is twice as fast.
    """
    from stiefelkit.measuring.races.scan import heats

    return raced(heats, plan, _shown, json)


def _shown(plan: ScanRace, heat: "ScanHeat") -> RenderableType:
    if heat.operation == "training_step":
        return _step_table(plan, heat)
    tables = [_table(plan, heat)]
    if any(row.memory_sequence is not None or row.memory_last_state is not None for row in heat.rows):
        tables.append(_memory_table(plan, heat))
    return Group(*tables)


def _title(plan: ScanRace, heat: "ScanHeat") -> str:
    return f"{heat.case}, {plan.activation}, {plan.dtype}, {plan.device}"


def _limit(heat: "ScanHeat") -> str:
    return f"LIMIT = {three_digits(1e3 * heat.unit)} ms"


def _table(plan: ScanRace, heat: "ScanHeat") -> Table:
    caption = f"{_limit(heat)}; ours x: time over that of our scan"
    table = table_of(_title(plan, heat), caption, ["contender"], ["n", "ms", "/ LIMIT", "ours x"])
    table.min_width = len(_title(plan, heat))
    following = [*heat.is_peer[1:], heat.is_peer[-1]]
    for row, is_peer, after in zip(heat.rows, heat.is_peer, following, strict=True):
        figures = map(three_digits, (1e3 * row.seconds, row.limit_units, row.time_over_ours))
        table.add_row(row.contender, str(row.n), *figures, end_section=is_peer != after)
    return table


def _memory_table(plan: ScanRace, heat: "ScanHeat") -> Table:
    from stiefelkit.measuring.races.recurrences import LOOP

    caption = f"MB above what was there before; / {LOOP}: over that of the same loss"
    columns = ["last state", f"/ {LOOP}", "sequence", f"/ {LOOP}"]
    table = table_of(f"peak memory, {_title(plan, heat)}", caption, ["contender"], columns)
    loop = next((row for row in heat.rows if row.contender == LOOP), None)
    for row in (row for row in heat.rows if row.operation == "sequence"):
        figures: list[float | None] = []
        for loss in ("memory_last_state", "memory_sequence"):
            size, loop_size = getattr(row, loss), getattr(loop, loss, None)
            figures += [None, None] if size is None else [size / 1e6, size / loop_size if loop_size else None]
        table.add_row(row.contender, *map(three_digits, figures))
    return table


def _step_table(plan: ScanRace, heat: "ScanHeat") -> Table:
    whole_step, alone = heat.rows
    title = f"training step of {whole_step.contender}, {heat.case}, {plan.device}"
    table = table_of(title, _limit(heat), ["what"], ["ms", "/ LIMIT", "outside the scan"])
    table.min_width = len(title)
    for row in heat.rows:
        outside = f"{1 - alone.seconds / row.seconds:.1%}" if row is whole_step else "-"
        table.add_row(row.contender, three_digits(1e3 * row.seconds), three_digits(row.limit_units), outside)
    return table

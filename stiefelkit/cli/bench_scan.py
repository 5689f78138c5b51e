"""`stiefelkit bench scan`."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from stiefelkit.cli.open_options import of_plan
from stiefelkit.cli.races import RowsFile, raced, table_of, three_digits
from stiefelkit.measuring.races.plan import ScanRace

if TYPE_CHECKING:
    from stiefelkit.measuring.races.field import Race

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
    from stiefelkit.measuring.races.scan import races

    return raced(races, plan, _shown, json)


def _shown(plan: ScanRace, race: "Race") -> RenderableType:
    if race.operation == "training_step":
        return _step_table(plan, race)
    tables = [_table(plan, race)]
    if any(row["memory_sequence"] is not None or row["memory_last_state"] is not None for row in race.rows):
        tables.append(_memory_table(plan, race))
    return Group(*tables)


def _title(plan: ScanRace, race: "Race") -> str:
    return f"{race.subject}, {plan.activation}, {plan.dtype}, {plan.device}"


def _limit(race: "Race") -> str:
    return f"LIMIT = {three_digits(1e3 * race.unit)} ms"


def _table(plan: ScanRace, race: "Race") -> Table:
    caption = f"{_limit(race)}; ours x: time over that of our scan"
    table = table_of(_title(plan, race), caption, ["contender"], ["n", "ms", "/ LIMIT", "ours x"])
    table.min_width = len(_title(plan, race))
    for row, after in zip(race.rows, [*race.rows[1:], race.rows[-1]], strict=True):
        figures = map(three_digits, (1e3 * row["seconds"], row["limit_units"], row["time_over_ours"]))
        table.add_row(row.contender, str(row["n"]), *figures, end_section=row.is_peer != after.is_peer)
    return table


def _memory_table(plan: ScanRace, race: "Race") -> Table:
    from stiefelkit.measuring.races.recurrences import LOOP

    caption = f"MB above what was there before; / {LOOP}: over that of the same loss"
    columns = ["last state", f"/ {LOOP}", "sequence", f"/ {LOOP}"]
    table = table_of(f"peak memory, {_title(plan, race)}", caption, ["contender"], columns)
    loop = next((row for row in race.rows if row.contender == LOOP), None)
    for row in (row for row in race.rows if row["operation"] == "sequence"):
        figures: list[float | None] = []
        for loss in ("memory_last_state", "memory_sequence"):
            size, loop_size = row[loss], loop and loop[loss]
            figures += [None, None] if size is None else [size / 1e6, size / loop_size if loop_size else None]
        table.add_row(row.contender, *map(three_digits, figures))
    return table


def _step_table(plan: ScanRace, race: "Race") -> Table:
    whole_step, alone = race.rows
    title = f"training step of {whole_step.contender}, {race.subject}, {plan.device}"
    table = table_of(title, _limit(race), ["what"], ["ms", "/ LIMIT", "outside the scan"])
    table.min_width = len(title)
    for row in race.rows:
        outside = f"{1 - alone['seconds'] / row['seconds']:.1%}" if row is whole_step else "-"
        table.add_row(row.contender, three_digits(1e3 * row["seconds"]), three_digits(row["limit_units"]), outside)
    return table

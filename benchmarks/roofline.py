"""What a scan on a GPU can take at least, and what each layout is predicted to take: arithmetic, no measurement.

A step of a recurrence takes three things: multiplications, of which a multiprocessor does 128 in a clock; the way of
the new state to every thread that multiplies by it, which the next step waits for; and instructions that are none of
these. A limit counts the first two, at their least; a prediction counts what the compiled programs hold.

    python -m benchmarks.roofline --machines H100,H200
"""

import argparse
import math
from dataclasses import dataclass

from stiefelkit.scan.engines.launch import LAYOUTS, Layout, choose
from stiefelkit.scan.engines.planes import AHEAD, most_chunks

SHARED, BARRIER, SHUFFLE, CACHE, DEPENDENT = 30, 30, 30, 250, 4
"""Clocks: to shared memory or from it, across a barrier, between neighbours, to the GPU's cache, of an instruction."""
MEMORY, DOUBLE = 600, 8
"""Clocks from the GPU's memory, and of an instruction in float64."""
ACTIVATION = 8
"""Instructions of an activation that wait for each other."""
LANES, SCHEDULERS, REGISTERS, WARPS = 128, 4, 65536, 64
"""Of a multiprocessor: multiplications in a clock, warps that issue in one, registers, the most warps."""
TILE = 16
"""Sequences of a program of "tiles"."""


@dataclass(frozen=True)
class Cost:
    """What a compiled program holds at most, for compute capabilities from 8.0 on.

    Args:
        registers: of a thread.
        instructions: of a step.
        barriers: of a step.
        words: that a thread reads from shared memory in a step, of four bytes.
    """

    registers: int
    instructions: int
    barriers: int
    words: int


COSTS = {
    ("rows", "real", 32): (Cost(64, 70, 1, 32), Cost(64, 70, 1, 32)),
    ("rows", "real", 64): (Cost(72, 85, 2, 16), Cost(72, 90, 2, 16)),
    ("rows", "real", 96): (Cost(128, 155, 4, 25), Cost(128, 165, 4, 25)),
    ("rows", "real", 128): (Cost(120, 125, 2, 32), Cost(128, 125, 2, 32)),
    ("rows", "real", 192): (Cost(224, 235, 4, 49), Cost(232, 245, 4, 49)),
    ("groups", "real", 256): (Cost(128, 300, 9, 66), Cost(128, 365, 9, 66)),
    ("groups", "real", 512): (Cost(176, 860, 9, 258), Cost(200, 1035, 9, 258)),
    ("rows", "complex", 32): (Cost(96, 220, 1, 66), Cost(96, 225, 1, 66)),
    ("rows", "complex", 64): (Cost(152, 220, 2, 64), Cost(152, 225, 2, 64)),
    ("rows", "complex", 128): (Cost(224, 410, 2, 64), Cost(232, 415, 2, 64)),
    ("groups", "complex", 256): (Cost(240, 1050, 25, 274), Cost(232, 1180, 25, 274)),
    ("gates", "gated", 32): (Cost(64, 140, 2, 8), Cost(80, 255, 10, 26)),
    ("gates", "gated", 64): (Cost(96, 170, 2, 16), Cost(128, 290, 10, 50)),
    ("gates", "gated", 128): (Cost(255, 405, 2, 32), Cost(255, 535, 10, 101)),
}
"""What the programs of a layout hold, forward and back, for modReLU; those of "tiles" are not counted this way."""


def held(layout: Layout, way: str) -> Cost | None:
    """Returns what the program of a layout holds, "forward" or "back"; None if that is not counted."""
    both = COSTS.get((layout.program, layout.states, layout.widest))
    return both[way == "back"] if both else None


@dataclass(frozen=True)
class Machine:
    """A GPU.

    Args:
        name: of it.
        multiprocessors: how many.
        clock: in GHz.
        bandwidth: of its memory, in TB/s.
    """

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float


@dataclass(frozen=True)
class Case:
    """A scan.

    Args:
        name: of it.
        steps: T.
        batch: B.
        units: n.
        states: "real", "complex" or "gated".
    """

    name: str
    steps: int
    batch: int
    units: int
    states: str = "real"

    @property
    def products(self) -> int:
        """Multiplications of a step of one sequence."""
        return self.units**2 * {"real": 1, "complex": 4, "gated": 3}[self.states]

    @property
    def numbers(self) -> int:
        """Real numbers that a step of one sequence has to read and write."""
        return self.units * {"real": 2, "complex": 4, "gated": 4}[self.states]


MACHINES = {
    "H100": Machine("H100 SXM", 132, 1.755, 3.35),
    "H200": Machine("H200", 132, 1.755, 4.8),
    "A100": Machine("A100", 108, 1.41, 2.0),
}
CASES = {
    "A": Case("A", 784, 128, 170),
    "B": Case("B", 1020, 20, 190),
    "C": Case("C", 200, 50, 512),
    "D": Case("D", 784, 50, 116, "complex"),
}
ROTATIONS = [Case("", 784, 50, 128), Case("", 4096, 8, 128), Case("", 16384, 2, 128)]
EXCHANGE = 2 * SHARED + BARRIER + 2 * SHUFFLE + ACTIVATION * DEPENDENT
"""From the last product of a step to the first of the next, within a multiprocessor: partial sums of neighbours, the
activation, the state written, a barrier, the state read."""
MEETING = 3 * CACHE
"""The same between multiprocessors, besides: written, counted, and read."""


def arithmetic(case: Case, machine: Machine) -> float:
    """Microseconds of the multiplications of a whole scan, if all multiprocessors did nothing else."""
    clocks = case.steps * case.batch * case.products / (LANES * machine.multiprocessors)
    return clocks / machine.clock / 1e3


def traffic(case: Case, machine: Machine) -> float:
    """Microseconds of the inputs and states of a whole scan, to memory and from it."""
    return case.steps * case.batch * case.numbers * 4 / machine.bandwidth / 1e6


def limit(case: Case, machine: Machine) -> float:
    """Microseconds that a whole scan takes at least: the least over how many multiprocessors share a sequence."""

    def step(shared_by: int) -> float:
        busy = min(machine.multiprocessors, case.batch * shared_by)
        return case.batch * case.products / (LANES * busy) + EXCHANGE + (MEETING if shared_by > 1 else 0)

    clocks = case.steps * min(step(1 << k) for k in range(5))
    return max(clocks / machine.clock / 1e3, traffic(case, machine))


def predicted(case: Case, machine: Machine, layout: Layout, way: str = "forward") -> float:
    """Microseconds of a whole scan in a layout, forward or back, from what its program holds."""
    cost = held(layout, way)
    width = case.units * (2 if case.states == "complex" else 1)
    if cost is None:
        step, rounds = _tiles(width), math.ceil(case.batch / TILE / machine.multiprocessors)
        clocks = rounds * step
    elif layout.program == "groups":
        groups = machine.multiprocessors // math.ceil(width / layout.columns)
        rounds = math.ceil(math.ceil(case.batch / layout.rows) / groups)
        clocks = rounds * (_work(cost, layout, 1) + _wait(cost) + MEETING)
    else:
        # Programs beside each other on a multiprocessor fill each other's gaps.
        beside = max(1, min(WARPS // layout.warps, REGISTERS // (32 * layout.warps * cost.registers)))
        rounds, rest = divmod(math.ceil(case.batch / machine.multiprocessors), beside)
        alone = _work(cost, layout, 1) + _wait(cost)
        clocks = sum(max(alone, _work(cost, layout, count)) for count in [beside] * rounds + [rest] * (rest > 0))
    return max(case.steps * clocks / machine.clock / 1e3, traffic(case, machine))


def _work(cost: Cost, layout: Layout, count: int) -> float:
    """Clocks in which so many programs of a multiprocessor issue a step, or read their states from shared memory."""
    issued = cost.instructions * max(math.ceil(layout.warps / SCHEDULERS), count * layout.warps / SCHEDULERS)
    return max(issued, count * layout.warps * cost.words)


def _wait(cost: Cost) -> int:
    """Clocks of a step in which a program alone issues nothing."""
    return EXCHANGE + (cost.barriers - 1) * BARRIER


def _tiles(width: int) -> float:
    """Clocks of a step of 16 sequences, whose operands come from shared memory in about twice as long again."""
    padded = 64 * math.ceil(width / 64)
    return 2.5 * TILE * padded**2 / LANES + EXCHANGE


def best(case: Case, machine: Machine) -> Layout:
    """The layout that is predicted to be fastest, forward and back."""
    fitting = [layout for layout in LAYOUTS if layout.states == case.states and case.units <= layout.widest]
    return min(fitting, key=lambda layout: sum(predicted(case, machine, layout, way) for way in ("forward", "back")))


PERSISTENT, STANDARD, STANDARD_BACK = "1 to 4", "8 to 12", "12 to 18"
"""Guesses of a step of cuDNN's in microseconds: kernels that keep the matrix on the chip, and those that do not."""
WIDEST_PERSISTENT = {"RNN": (384, 256), "LSTM": (192, 128)}
"""Up to which n torch takes the former, unpacked in float32, forward and back."""


def cudnn(kind: str, units: int) -> str:
    """Guessed microseconds of a step forward and back."""
    forward, back = WIDEST_PERSISTENT[kind]
    return f"{PERSISTENT if units <= forward else STANDARD} / {PERSISTENT if units <= back else STANDARD_BACK}"


def cases(machine: Machine) -> list[str]:
    """The table of a machine, a line a case."""
    lines = [
        "| case | multiplications, µs | memory, µs | limit, µs | program | forward, µs | × limit | back, µs | × limit "
        "| a step, limit / forward / back | cuDNN's RNN | LSTM |",
        "|" + "---|" * 12,
    ]
    for case in CASES.values():
        layout = choose(case.states, case.units, case.batch, machine.multiprocessors)
        least = limit(case, machine)
        times = {way: predicted(case, machine, layout, way) for way in ("forward", "back")}
        each = " / ".join(f"{time / case.steps:.2f}" for time in (least, *times.values()))
        ways = " | ".join(f"{time:.0f} | {time / least:.1f}" for time in times.values())
        n = case.units * (1 + (case.states == "complex"))
        lines.append(
            f"| {case.name}: T {case.steps}, B {case.batch}, n {case.units}{' complex' if n > case.units else ''} "
            f"| {arithmetic(case, machine):.0f} | {traffic(case, machine):.0f} | {least:.0f} | {layout.program} "
            f"| {ways} | {each} | {cudnn('RNN', n)} | {cudnn('LSTM', n)} |"
        )
    return lines


def rotated(case: Case, machine: Machine) -> tuple[float, int]:
    """Microseconds of the scan of rotations, forward, and in how many chunks.

    Each step of a chunk waits for an input that was requested `AHEAD` steps before, takes three instructions one after
    the other and two barriers; two chunks or more read the inputs twice.
    """
    chunks = most_chunks(case.steps, case.batch * case.units // 2, machine.multiprocessors)
    passes = 1 + (chunks > 1)
    clocks = passes * math.ceil(case.steps / chunks) * (MEMORY / AHEAD + 3 * DOUBLE + 2 * BARRIER)
    return max(clocks / machine.clock / 1e3, traffic(case, machine) * (passes + 1) / 2), chunks


def rotations(machine: Machine) -> list[str]:
    """The table of linear recurrences beside nonlinear ones of the same size, forward."""
    lines = [
        "| case | rotations: limit, µs | chunks | predicted, µs | OrthogonalRNN: limit, µs | predicted, µs "
        "| ratio of limits | of predictions |",
        "|" + "---|" * 8,
    ]
    for case in ROTATIONS:
        layout = choose(case.states, case.units, case.batch, machine.multiprocessors)
        least, (ours, chunks) = traffic(case, machine), rotated(case, machine)
        others = limit(case, machine), predicted(case, machine, layout)
        lines.append(
            f"| T {case.steps}, B {case.batch}, n {case.units} | {least:.0f} | {chunks} | {ours:.0f} | {others[0]:.0f} "
            f"| {others[1]:.0f} | {others[0] / least:.0f} | {others[1] / ours:.0f} |"
        )
    return lines


def layouts() -> list[str]:
    """The table of layouts."""
    lines = [
        "| states | n up to | sequences a multiprocessor up to | program | warps | registers | instructions a step "
        "| barriers a step |",
        "|" + "---|" * 8,
    ]
    for layout in LAYOUTS:
        most = "" if layout.most == float("inf") else f"{layout.most:g}"
        start = f"| {layout.states} | {layout.widest} | {most} | {layout.program} | {layout.warps} "
        forward, back = held(layout, "forward"), held(layout, "back")
        if forward is None or back is None:
            lines.append(f"{start}| | | |")
            continue
        for name in ("registers", "instructions", "barriers"):
            start += f"| {getattr(forward, name)} / {getattr(back, name)} "
        lines.append(f"{start}|")
    return lines


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default="H100,H200", help=f"of {', '.join(MACHINES)}")
    print("\n".join(layouts()))
    for name in parser.parse_args().machines.split(","):
        print(f"\n{MACHINES[name].name}:\n")
        print("\n".join(cases(MACHINES[name])))
        print()
        print("\n".join(rotations(MACHINES[name])))


if __name__ == "__main__":
    main()

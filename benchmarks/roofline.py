"""Prints what the scan can take at least on a GPU, and what its programs are predicted to take: no measurement."""

import argparse

from stiefelkit.scan.kernels.layouts import LAYOUTS, choose
from stiefelkit.scan.kernels.roofline import CASES, MACHINES, Machine, arithmetic, limit, predicted, traffic

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
        if layout.forward is None or layout.back is None:
            lines.append(f"{start}| | | |")
            continue
        for name in ("registers", "instructions", "barriers"):
            start += f"| {getattr(layout.forward, name)} / {getattr(layout.back, name)} "
        lines.append(f"{start}|")
    return lines


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", default="H100,H200", help=f"of {', '.join(MACHINES)}")
    print("\n".join(layouts()))
    for name in parser.parse_args().machines.split(","):
        print(f"\n{MACHINES[name].name}:\n")
        print("\n".join(cases(MACHINES[name])))


if __name__ == "__main__":
    main()

"""Random lives of random models, for so many seconds or cases, each beside a plain float64 twin.

    python -m benchmarks.fuzz --seconds 3600 --seed 0
    python -m benchmarks.fuzz --case 1234

prints each failure with the line that repeats it and its smallest form, then counts; ends with 1 if there was one.
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict

import torch

from benchmarks.fuzz.plan import draw
from benchmarks.fuzz.run import carry_out, shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=None, help="stop after so many; 60 unless --cases is given")
    parser.add_argument("--cases", type=int, default=None, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones count on")
    parser.add_argument("--case", help="one case: a seed, or the JSON that a failure prints")
    parser.add_argument("--trace", action="store_true", help="show where a failure was raised")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case is not None:
        outcome = carry_out(draw(int(options.case)) if options.case.isdigit() else json.loads(options.case))
        print(outcome.trace if outcome.failure and options.trace else outcome.failure or "nothing is wrong")
        return outcome.failure is not None
    seconds = 60.0 if options.seconds is None and options.cases is None else options.seconds
    start, seed, failures = time.monotonic(), options.seed, 0
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    while (seconds is None or time.monotonic() - start < seconds) and seed - options.seed != options.cases:
        case = draw(seed)
        outcome = carry_out(case)
        for title, found in outcome.counts.items():
            counts[title] += found
        if outcome.failure is not None:
            failures += 1
            print(f"FAILURE {outcome.failure}\n  python -m benchmarks.fuzz --case {seed}", flush=True)
            print(f"  python -m benchmarks.fuzz --case '{json.dumps(shrink(case))}'", flush=True)
        seed += 1
    print(f"\n{seed - options.seed} lives from seed {options.seed}, {failures} failures")
    for title, found in counts.items():
        print(f"{title}: {found.total()}")
        for key, count in found.most_common():
            print(f"  {count:7} {key}")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())

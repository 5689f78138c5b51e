"""Laws, drift and times on a GPU by one command.

    python -m benchmarks.gpu                            # under nine minutes on one data-centre GPU
    python -m benchmarks.gpu --parts laws,drift         # some of the parts
    python -m benchmarks.gpu --dry-run --device cpu     # all of them in small steps, minutes on two cores
    python -m benchmarks.gpu --smoke --device cpu       # in seconds

needs torch and this checkout, and no network; peers that are not installed are left out, and said to be. OUT/gpu.json
is rewritten after every cell, OUT/gpu.html at the end; `stiefelkit report --from OUT/gpu.json` draws the page again.
Ends with 1 if a law is broken or a part fails.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.gpu.driver import measure
from benchmarks.gpu.parts import PARTS
from stiefelkit.training.files import write_atomically

__all__ = ["main"]


def main(words: list[str] | None = None) -> int:
    """Reads the command line, measures, and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu with --dry-run or --smoke")
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas; all by default")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the figures and of the page")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--dry-run", action="store_const", const="dry", dest="scale", help="tiny sizes, few steps")
    form.add_argument("--smoke", action="store_const", const="smoke", dest="scale", help="a glance at every part")
    asked = parser.parse_args(words)
    scale, names = asked.scale or "full", asked.parts.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"No part is named {unknown[0]!r}; there are {', '.join(PARTS)}.")
    is_cuda = torch.device(asked.device).type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        parser.error("There is no CUDA device; --dry-run --device cpu goes the same way without one.")
    if not is_cuda and scale == "full":
        parser.error(f"Times of a GPU need a CUDA device, got {asked.device}; add --dry-run.")
    asked.out.mkdir(parents=True, exist_ok=True)
    form_words = {"full": "", "dry": " --dry-run", "smoke": " --smoke"}[scale]
    command = f"python -m benchmarks.gpu{form_words} --device {asked.device}"
    record = measure(names, scale, asked.device, asked.out / "gpu.json", command, lambda line: print(line, flush=True))
    for part, reasons in record.left_out.items():
        for what, reason in reasons.items():
            print(f"left out of {part}: {what}: {reason}")
    try:
        from stiefelkit.measuring.report.page import record_page
    except ModuleNotFoundError as error:
        print(f"No page: {error.name} is not installed; stiefelkit report --from draws it elsewhere.")
    else:
        write_atomically(asked.out / "gpu.html", record_page(record).encode())
        print(f"Page: {asked.out / 'gpu.html'}")
    print(f"Data: {asked.out / 'gpu.json'}")
    for line in record.broken:
        print(f"BROKEN {line}")
    return 1 if record.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Compiles the Triton programs of the scan for GPUs that need not be there, and reads what the machine code holds."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.functional._kernels.launch import programs
from stiefelkit.scan import find_activation
from stiefelkit.scan.engines.triton import PACKAGE, KernelLayout, program_constants

TYPES = {"starts": "*i64", "lengths": "*i64", "sizes": "*i64", "slope": "fp32", "counters": "*i32"}
TYPES |= dict.fromkeys(["steps", "batch", "first", "last"], "i32")


@dataclass(frozen=True)
class Cost:
    """What a compiled program holds at most: registers of a thread; of a step instructions, barriers and words read."""

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
}
"""What the programs of a layout hold, forward and back, for modReLU; those of "tiles" are not bounded."""


@dataclass(frozen=True)
class Machinery:
    """What is in a compiled program: resources of it, and instructions of its loop over the steps."""

    registers: int
    stack: int
    shared: int
    step: list[str]
    everything: list[str]

    def count(self, *operations: str) -> int:
        return sum(line.split(".")[0] in operations for line in self.step)


def compiled(
    layout: KernelLayout, way: str, activation: str, units: int, capability: int = 90, packed: bool = False
) -> Any:
    """A program of a layout for GPUs of a compute capability."""
    is_complex = layout.states == "complex"
    act = find_activation(activation, is_complex)
    fixed = program_constants(layout, units * (1 + is_complex), units, act)
    options = {key: fixed.pop(key) for key in ("num_warps", "enable_fp_fusion")}
    fixed |= {"PACKED": packed, "REVERSE": packed}
    program = getattr(programs(PACKAGE, False), f"{layout.program}_{way}")
    is_there = {"bias": act.bias_inside, "saved": act.saved is not None}
    fixed |= {arg: None for arg in program.arg_names if not is_there.get(arg, True)}
    types = TYPES | {"saved": "*i8" if activation in ("abs", "oplu") else "*fp32"}
    return built(program, fixed, types, capability, **options)


def built(program: Any, fixed: dict[str, Any], types: dict[str, Any], capability: int, **options: Any) -> Any:
    """A program with fixed arguments and types of others, which are arrays of float32 if they are not named."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {arg: "constexpr" if arg in fixed else types.get(arg, "*fp32") for arg in program.arg_names}
    places = {arg: (i,) for i, arg in enumerate(program.arg_names)}
    aligned = {places[arg]: [["tt.divisibility", 16]] for arg, kind in signature.items() if kind[0] == "*"}
    constants = {places[arg]: value for arg, value in fixed.items() if arg in places}
    source = ASTSource(program, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def machinery(program: Any, folder: Path) -> Machinery:
    """Reads a compiled program by the tools that come with triton."""
    from triton import knobs

    path = folder / "program.cubin"
    path.write_bytes(program.asm["cubin"])

    def shown(option: str) -> str:
        command = [knobs.nvidia.cuobjdump.path, option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage, listing = shown("-res-usage"), shown("-sass")
    # After an instruction, some versions of cuobjdump list what it waits for: &req={1} ?trans6.
    instruction = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([^;&?]*?)\s*(?:[&?][^;]*)?;"
    lines = [(int(at, 16), text) for at, text in re.findall(instruction, listing)]
    loops = []
    for at, text in lines:
        target = re.search(r"\b0x([0-9a-f]+)$", text)
        if text.startswith("BRA") and target and int(target[1], 16) < at:
            loops.append([body for place, body in lines if int(target[1], 16) <= place <= at])

    def products(loop: list[str]) -> tuple[int, int]:
        return sum(line.startswith("FFMA") for line in loop), -len(loop)

    def number(name: str) -> int:
        return int(re.findall(rf"\b{name}:(\d+)", usage)[-1])

    step = max(loops, key=products, default=[])
    everything = [text for _, text in lines]
    return Machinery(number("REG"), number("STACK"), program.metadata.shared, step, everything)


def cost(program: Machinery) -> Cost:
    """What the table of layouts says of a program."""
    reads = [line.split()[0].split(".") for line in program.step if line.startswith("LDS")]
    words = sum(4 if "128" in read else 2 if "64" in read else 1 for read in reads)
    return Cost(program.registers, len(program.step), program.count("BAR"), words)


def is_without_spills(program: Machinery) -> bool:
    spills = ("LDL", "STL")
    return program.stack == 0 and not any(line.split(".")[0] in spills for line in program.everything)


def is_exact(program: Machinery) -> bool:
    """Whether no product is taken by tensor cores."""
    return not any(re.match(r"[A-Z]*MMA\b", line) or "TF32" in line for line in program.everything)

"""What the compilers made of a kernel: registers, spills, and the widths of its loads and stores.

NVIDIA's disassembler comes inside the Triton wheel; AMD's compiler leaves the assembly text.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from triton import knobs

from .machine_loops import flights_of_whole_blocks, inner_loops, read_sass


@dataclass
class MachineCode:
    """Of one kernel. Widths are in bits of one lane's access to global memory and count instructions.

    `stack_bytes` is memory of each lane's own, `spills` the instructions that use it (on AMD: the registers spilled),
    and `spills_in_loops` those of them in loops that contain no other (NVIDIA only).
    Atomics, and loads and stores with an order, do not count. `bytes_in_flight` has what one lane has on its way from
    memory at once, for each loop over whole blocks (NVIDIA only).
    """

    registers: int
    stack_bytes: int
    spills: int
    spills_in_loops: int = 0
    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)
    bytes_in_flight: list[int] = field(default_factory=list)


def read_cubin(cubin: bytes) -> MachineCode:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, sass = _cuobjdump("-res-usage", path), _cuobjdump("-sass", path)
    functions = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    if len(functions) != 1:
        raise ValueError(f"one kernel is wanted, the cubin has {[f[0] for f in functions]}")
    instructions = read_sass(sass)
    loops = inner_loops(instructions)
    return MachineCode(
        registers=int(functions[0][1]),
        stack_bytes=int(functions[0][2]),
        spills=sum(instruction.is_spill for instruction in instructions),
        spills_in_loops=sum(instruction.is_spill for loop in loops for instruction in loop),
        loads=Counter(8 * instruction.bytes for instruction in instructions if instruction.is_load),
        stores=Counter(8 * instruction.bytes for instruction in instructions if instruction.is_store),
        bytes_in_flight=flights_of_whole_blocks(loops),
    )


def _cuobjdump(option: str, path: Path) -> str:
    tool = knobs.nvidia.cuobjdump.path
    env = os.environ | {"PATH": f"{Path(tool).parent}{os.pathsep}{os.environ['PATH']}"}  # it calls nvdisasm
    return subprocess.run([tool, option, str(path)], env=env, capture_output=True, text=True, check=True).stdout


def read_amdgcn(assembly: str) -> MachineCode:
    kernels = re.findall(r"^\s*\.vgpr_count:\s*(\d+)", assembly, re.M)
    if len(kernels) != 1:
        raise ValueError(f"one kernel is wanted, the assembly has {len(kernels)}")
    code = MachineCode(
        registers=int(kernels[0]) + _amd_number(assembly, "agpr_count"),
        stack_bytes=_amd_number(assembly, "private_segment_fixed_size"),
        spills=_amd_number(assembly, "vgpr_spill_count") + _amd_number(assembly, "sgpr_spill_count"),
    )
    for line in re.findall(r"^\s+([a-z]\w+(?:\s[^\n;]*)?)", assembly, re.M):
        _count_amd(code, line)
    return code


def _amd_number(assembly: str, name: str) -> int:
    return int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1])


AMD_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "byte": 8}


def _count_amd(code: MachineCode, line: str) -> None:
    opcode = line.split()[0]
    access = re.match(r"(?:global|buffer|flat)_(load|store)_[us]?(dwordx[234]|dword|short|byte)", opcode)
    if access and not re.search(r"\bsc[01]\b", line):  # else past the caches: with an order
        (code.loads if access[1] == "load" else code.stores)[AMD_WIDTHS[access[2]]] += 1

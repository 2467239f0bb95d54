"""Empty CUDA libraries, so that a CUDA build of torch runs on the CPU without gigabytes of packages.

Such a build is linked against libraries that it needs for GPUs only. Each of them gets a stand-in, whose functions
return "no device is there". For trying versions of torch on x86-64.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

CUDA_LIBRARY = re.compile(r"^lib(cu|nv|nccl)")
CUDA_FUNCTION = re.compile(
    r"^(__cuda|cu[A-Z]|cu(da|blas|dnn|fft|file|pti|rand|solver|sparse)|nccl|nv(rtc|tx|shmem|JitLink|perf))"
)
NO_DEVICE = 100  # cudaErrorNoDevice, and CUDA_ERROR_NO_DEVICE


def install(libraries: Path) -> list[str]:
    """Puts stand-ins into torch's folder of libraries, and returns their names: none for a CPU build of torch."""
    files = sorted(libraries.glob("*.so*"))
    needed = {name for path in files for name in _needed(path)} - {path.name for path in files}
    missing = sorted(name for name in needed if CUDA_LIBRARY.search(name))
    if missing:
        names = {name for path in files for name in _undefined(path)}
        # In a library of their own: the loader insists on versions of those that are in the one where it expects them.
        functions = libraries / "libcuda_stand_in.so"
        _build(functions, "\n".join(_function(name) for name in sorted(names) if CUDA_FUNCTION.search(name)))
        for name in missing:
            _build(libraries / name, "", "-Wl,--no-as-needed", str(functions))
    return missing


def _needed(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            if isinstance(section, DynamicSection):
                yield from (tag.needed for tag in section.iter_tags("DT_NEEDED"))


def _undefined(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym")
        if symbols is not None:
            yield from (symbol.name for symbol in symbols.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF")


def _function(name: str) -> str:
    return f".globl {name}\n.type {name}, @function\n{name}:"


def _build(path: Path, labels: str, *linked: str) -> None:
    code = f'.text\n{labels}\nmovl ${NO_DEVICE}, %eax\nret\n.section .note.GNU-stack,"",@progbits\n'
    options = ["-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-Wl,-rpath,$ORIGIN", "-o", str(path)]
    command = ["cc", *options, "-x", "assembler", "-", "-x", "none", *linked]
    subprocess.run(command, input=code, text=True, check=True)

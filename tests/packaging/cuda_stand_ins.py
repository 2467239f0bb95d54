"""Empty CUDA libraries, so that a CUDA build of torch runs on the CPU without gigabytes of packages.

Such a build is linked against libraries that it needs for GPUs only. Each of them gets a stand-in, whose functions
return "no device is there". For trying versions of torch, of this machine or of another one that CC compiles for.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

CUDA_LIBRARY = re.compile(r"^lib(cu|nv|nccl)")
CUDA_FUNCTION = re.compile(
    r"^(__cuda|cu[A-Z]|cu(da|blas|dnn|fft|file|pti|rand|solver|sparse)|nccl|nv(rtc|tx|shmem|JitLink|perf))"
)
NO_DEVICE = 100  # cudaErrorNoDevice, and CUDA_ERROR_NO_DEVICE
RETURN = {"EM_X86_64": f"movl ${NO_DEVICE}, %eax\nret", "EM_AARCH64": f"mov w0, #{NO_DEVICE}\nret"}


def install(libraries: Path) -> list[str]:
    """Puts stand-ins into torch's folder of libraries, and returns their names: none for a CPU build of torch."""
    files = sorted(libraries.glob("*.so*"))
    needed = {name for path in files for name in _needed(path)} - {path.name for path in files}
    missing = sorted(name for name in needed if CUDA_LIBRARY.search(name))
    if missing:
        names = {name for path in files for name in _undefined(path)}
        # In a library of their own: the loader insists on versions of those that are in the one where it expects them.
        functions = libraries / "libcuda_stand_in.so"
        labels = [_function(name) for name in sorted(names) if CUDA_FUNCTION.search(name)]
        _build(functions, "\n".join([*labels, RETURN[_machine(files[0])]]))
        for name in missing:
            _build(libraries / name, "", "-Wl,--no-as-needed", str(functions))
    return missing


def _machine(path: Path) -> str:
    with path.open("rb") as file:
        return str(ELFFile(file)["e_machine"])


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
    return f".globl {name}\n.type {name}, %function\n{name}:"


def _build(path: Path, instructions: str, *linked: str) -> None:
    code = f'.text\n{instructions}\n.section .note.GNU-stack,"",%progbits\n'
    options = ["-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-Wl,-rpath,$ORIGIN", "-o", str(path)]
    command = [os.environ.get("CC", "cc"), *options, "-x", "assembler", "-", "-x", "none", *linked]
    subprocess.run(command, input=code, text=True, check=True)


if __name__ == "__main__":
    print("\n".join(install(Path(sys.argv[1]))))

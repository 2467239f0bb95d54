"""Builds the C++ kernels against PyTorch's stable ABI; everything else is in pyproject.toml."""

import os
import re
import shlex
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info
from setuptools.errors import BaseError, CCompilerError

REPOSITORY = "https://github.com/swd-fused/swd_fused"
NO_CPP = os.environ.get("SWD_FUSED_NO_CPP", "0") not in ("", "0")
OLDEST_TORCH = (2, 10)
TORCH_FIRST = """\
  Run `pip install torch` in the environment that this is for, then install again. For CPUs alone, 0.2 GB instead of
  2.6: `pip install torch --index-url https://download.pytorch.org/whl/cpu`. uv and `python -m build` find torch if that
  environment is activated, or if setuptools is there too and they are told --no-build-isolation or --no-isolation.
"""
COMPILER_FIRST = """\
  Install a C++20 compiler and Python's headers (on Debian and Ubuntu: `apt install g++ python3-dev`), or choose another
  compiler by CXX=..., then install again.
"""
OPT_OUT = "  SWD_FUSED_NO_CPP=1 in the environment installs without kernels: slower on CPUs, the same on GPUs."


def torch_directories() -> Iterator[Path]:
    """Yields the folders of installed torches, of which only headers and libraries are needed.

    Builds are isolated from the environment that they are for. pip uses its interpreter, whose site-packages are known;
    uv and `python -m build` use a new interpreter, and leave the environment on the PATH if it is activated. uv also
    takes the nearest .venv from where it was called. With the stable ABI any torch from 2.10 on serves, that of another
    Python too.

    A build requirement would always find one, by downloading gigabytes of CUDA packages for a few headers.
    """
    own = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), site.getusersitepackages()]
    activated = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    on_path = [Path(place).parent for place in os.environ.get("PATH", "").split(os.pathsep)]
    called_from, here = Path(os.environ.get("PWD", "")).absolute(), Path().absolute()
    nearest = [folder / ".venv" for start in (called_from, here) for folder in (start, *start.parents)]
    prefixes = [*filter(None, activated), *on_path, *nearest, sys.base_prefix]
    others = (path for prefix in prefixes for path in Path(prefix).glob("lib*/python3*/*-packages"))
    folders = (Path(place, "torch").absolute() for place in chain(own, others))
    return (folder for folder in folders if (folder / "version.py").is_file())


def version_of(torch: Path) -> str:
    """Returns a torch's version without importing it, which another Python could not."""
    found = re.search(r"__version__ = ['\"](.+?)['\"]", (torch / "version.py").read_text(encoding="utf-8"))
    return found.group(1) if found else "of no known version"


def is_new_enough(torch: Path) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version_of(torch))
    return numbers is not None and tuple(map(int, numbers.groups())) >= OLDEST_TORCH


def why_no_torch() -> str:
    wanted = ".".join(map(str, OLDEST_TORCH))
    for torch in torch_directories():
        return f"torch {version_of(torch)} in {torch} is older than {wanted}"
    return "no torch was found to build them against"


def cxx() -> str:
    """Returns the C++ compiler that setuptools will call."""
    return shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[0]


def refuse_without_torch_or_compiler() -> None:
    if next(filter(is_new_enough, torch_directories()), None) is None:
        fail(why_no_torch(), TORCH_FIRST)
    if shutil.which(cxx()) is None:
        fail(f"there is no C++ compiler {cxx()}", COMPILER_FIRST)


def fail(reason: str, remedy: str) -> NoReturn:
    raise SystemExit(f"swd_fused: the C++ kernels were not built: {reason}.\n{remedy}{OPT_OUT}")


def extension(torch: Path | None) -> Extension:
    """Returns the kernels, as one extension file for torch 2.10 and Python 3.10 and all later versions of both."""
    return Extension(
        "swd_fused._C",
        sorted(str(path) for path in Path("csrc/cpu").glob("*.cpp")),
        depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
        include_dirs=[str(torch / "include")] if torch else [],
        library_dirs=[str(torch / "lib")] if torch else [],
        libraries=["torch_cpu", "c10"],
        define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000"), ("Py_LIMITED_API", "0x030a0000")],
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            # Together they let the compiler vectorise square roots and selections.
            "-fno-math-errno",
            "-fno-trapping-math",
            "-Wno-psabi",
        ],
        py_limited_api=True,
        optional=NO_CPP,
    )


def contraction(source: str) -> str:
    """Returns whether multiply may be fused with add: in the vectorised loops.

    What is around them is compiled for every x86-64, which has no such instruction, and for every aarch64, which has:
    fused there, the schedule would be rounded otherwise.
    """
    return f"-ffp-contract={'fast' if 'blocks' in Path(source).name else 'off'}"


class BuildKernels(build_ext):
    """Builds the kernels, or fails with the remedy: nobody sees what a build that succeeds prints."""

    def build_extensions(self) -> None:
        """Compiles all files at once: one after the other they took half of the time of an installation."""
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], extra_postargs: list[str], **options: object) -> list[str]:
            def compiled(source: str) -> list[str]:
                return compile_in_turn([source], extra_postargs=[*extra_postargs, contraction(source)], **options)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [path for paths in pool.map(compiled, sources) for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        if NO_CPP:
            self.remove(self.get_ext_fullpath(ext.name))
            return
        refuse_without_torch_or_compiler()
        work = f"{len(ext.sources)} files in {os.cpu_count()} threads, 60 seconds of work in all"
        print(f"swd_fused: {cxx()} compiles {work}", flush=True)
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, OSError):
            fail(f"{cxx()} failed, with the messages above", COMPILER_FIRST)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for ext in self.extensions:
            name = self.get_ext_filename(self.get_ext_fullname(ext.name))
            if not Path(self.build_lib, name).exists():
                self.remove(name)

    def remove(self, path: str) -> None:
        """Removes what an earlier build has left, which does not belong to these sources."""
        Path(path).unlink(missing_ok=True)


class Metadata(dist_info):
    """Describes the package to installers, unless it cannot be built.

    Installers read the requirements from the metadata, fetch them, and build last: they would download 2.6 GB of torch
    and its CUDA packages before the build fails for want of torch. `egg_info` refuses nothing, since source
    distributions are made without torch.
    """

    def run(self) -> None:
        if not NO_CPP:
            refuse_without_torch_or_compiler()
        super().run()


class TaggedWheel(bdist_wheel):
    """Names a wheel by what is in it: cp310-abi3 with kernels, py3-none-any without."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()

    def run(self) -> None:
        self.run_command("build_ext")
        if NO_CPP:
            self.distribution.ext_modules = []
            self.root_is_pure = True
            self.py_limited_api = False
        super().run()


def readme_for_an_index() -> str:
    """Returns the README with absolute links, as a package index has neither the pictures nor the pages."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?://)", rf"\1{REPOSITORY}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?://|#)", rf"\1{REPOSITORY}/blob/main/", text)


setup(
    ext_modules=[extension(next(filter(is_new_enough, torch_directories()), None))],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": TaggedWheel, "dist_info": Metadata},
    long_description=readme_for_an_index(),
    long_description_content_type="text/markdown",
)

"""Builds the C++ kernels against PyTorch's stable ABI; everything else is in pyproject.toml."""

import os
import re
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

REPOSITORY = "https://github.com/swd-fused/swd_fused"
REQUIRE_CPP = os.environ.get("SWD_FUSED_REQUIRE_CPP", "0") not in ("", "0")
HOW_TO_BUILD = (
    "To build them, activate an environment with torch, have a C++ compiler and install again; or put setuptools there "
    "too and pass --no-build-isolation to pip, uv pip or python -m build."
)


def torch_directory() -> Path | None:
    """Returns the folder of an installed torch, of which only headers and libraries are needed, or None.

    Builds are isolated from the environment that they are for. pip uses its interpreter, whose site-packages are known;
    uv and `python -m build` use a new interpreter, and leave the environment on the PATH if it is activated. With the
    stable ABI any torch from 2.10 on serves, that of another Python too.

    A build requirement would always find one, by downloading gigabytes of CUDA packages for a few headers.
    """
    own = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    activated = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    on_path = [Path(place).parent for place in os.environ.get("PATH", "").split(os.pathsep)]
    prefixes = [*filter(None, activated), *on_path, ".venv", sys.base_prefix]
    others = (path for prefix in prefixes for path in Path(prefix).glob("lib/python3*/site-packages"))
    found = (Path(place, "torch").absolute() for place in chain(own, others))
    return next((path for path in found if (path / "include" / "torch" / "csrc" / "stable").is_dir()), None)


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
            # Together they let the compiler vectorise square roots and selections, and fuse multiply with add.
            "-fno-math-errno",
            "-fno-trapping-math",
            "-ffp-contract=fast",
            "-Wno-psabi",
        ],
        py_limited_api=True,
        optional=True,
    )


class BuildKernels(build_ext):
    """Builds the kernels, or says why it cannot: without them the package runs on its plain PyTorch backend."""

    def build_extensions(self) -> None:
        """Compiles all files at once: one after the other they took half of the time of an installation."""
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        try:
            if not ext.include_dirs:
                raise BaseError("no installed torch was found to build them against")
            super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as error:
            self.remove(self.get_ext_fullpath(ext.name))
            self.go_on_without(str(error).rstrip("."))

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for ext in self.extensions:
            name = self.get_ext_filename(self.get_ext_fullname(ext.name))
            if not Path(self.build_lib, name).exists():
                self.remove(name)

    def remove(self, path: str) -> None:
        """Removes what an earlier build has left, which does not belong to these sources."""
        Path(path).unlink(missing_ok=True)

    def go_on_without(self, reason: str) -> None:
        if REQUIRE_CPP:
            raise SystemExit(
                f"swd_fused: SWD_FUSED_REQUIRE_CPP is set, but the C++ kernels were not built: {reason}. {HOW_TO_BUILD}"
            )
        self.warn(
            f"the C++ kernels were not built: {reason}. swd_fused will run on its plain PyTorch backend. {HOW_TO_BUILD}"
        )


class TaggedWheel(bdist_wheel):
    """Names a wheel by what is in it: cp310-abi3 with kernels, py3-none-any without."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()

    def run(self) -> None:
        self.run_command("build_ext")
        build = self.get_finalized_command("build_ext")
        if not any(os.path.exists(path) for path in build.get_outputs()):
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
    ext_modules=[extension(torch_directory())],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": TaggedWheel},
    long_description=readme_for_an_index(),
    long_description_content_type="text/markdown",
)

"""Builds the C++ kernels against PyTorch's stable ABI; everything else is in pyproject.toml."""

import glob
import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from wheel.bdist_wheel import bdist_wheel

TORCH = "torch>=2.10"


def torch_directory() -> str | None:
    """Where the installed torch is. pip hides it from an isolated build, but its headers are all that is needed."""
    places = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    found = (os.path.join(place, "torch") for place in places)
    return next(
        (path for path in found if os.path.isdir(os.path.join(path, "include", "torch", "csrc", "stable"))), None
    )


def extension(torch: str) -> Extension:
    return Extension(
        "swd_fused._C",
        sorted(glob.glob("csrc/cpu/*.cpp")),
        depends=[*glob.glob("csrc/*.h"), *glob.glob("csrc/cpu/*.h")],
        include_dirs=[os.path.join(torch, "include")],
        library_dirs=[os.path.join(torch, "lib")],
        libraries=["torch_cpu", "c10"],
        define_macros=[
            ("TORCH_TARGET_VERSION", "0x020a000000000000"),  # one file for torch 2.10 and all later ones
            ("Py_LIMITED_API", "0x030a0000"),  # and for Python 3.10 and all later ones
        ],
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


class BuildOrSay(build_ext):
    """Without a working compiler the package is still whole, on the "torch" backend: say so and go on."""

    def build_extensions(self) -> None:
        """All files at a time: one after the other they took half of the time until the package is installed."""
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def run(self) -> None:
        super().run()
        if not self.inplace:
            for ext in self.extensions:
                if not os.path.exists(self.get_ext_fullpath(ext.name)):
                    self.warn("the C++ kernels were not built: swd_fused will run on its plain PyTorch backend")


class StableAbiWheel(bdist_wheel):
    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()


torch = torch_directory()
setup(
    ext_modules=[extension(torch)] if torch else [],
    # Only a build that finds no torch at all asks for one; it is a dependency of the package in any case.
    setup_requires=[] if torch else [TORCH],
    cmdclass={"build_ext": BuildOrSay, "bdist_wheel": StableAbiWheel},
)

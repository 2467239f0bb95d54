"""Loads the driver when Python starts, before torch can load NVIDIA's, and the rest when `import torch` ends."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from . import driver


class _AfterTorch(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_start(module: ModuleType) -> None:
                execute(module)
                _start()

            spec.loader.exec_module = execute_and_start
        return spec


def prepare() -> None:
    sys.meta_path.insert(0, _AfterTorch())


def _start() -> None:
    from . import kernels, profiler, torch_operations

    driver.connect(launch=kernels.launch, load=kernels.load, function=kernels.function, attribute=kernels.attribute)
    torch_operations.catch()
    profiler.add_launches()
    atexit.register(_finish)


def _finish() -> None:
    """Runs what is still queued: a script that ends without waiting would hide what its last operations did."""
    driver.run_all()
    if driver.errors:
        print(f"[virtual GPU] {len(driver.errors)} operations failed; the first: {driver.errors[0]!r}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

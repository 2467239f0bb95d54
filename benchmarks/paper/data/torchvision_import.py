"""torchvision, which only ImageNet and its ResNet50 need: it must be the one that belongs to the installed torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks.paper.data.folders import DataError


def torchvision_module(name: str, what_for: str) -> Any:
    try:
        import_module("torchvision")
        return import_module(f"torchvision.{name}")
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise DataError(
            f"{what_for} torchvision's, which cannot be imported here ({error}). Install the torchvision that belongs "
            "to your torch, or choose another --task."
        ) from error

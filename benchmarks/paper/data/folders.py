"""Finding data on disk, where nothing is ever downloaded, and the torchvision that ImageNet and its ResNet50 need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


class DataError(Exception):
    """Data are missing or are not what their names say. The message says what to do."""


def find_folder(
    root: Path | None,
    names: Sequence[str],
    files: Sequence[str],
    what: str,
    is_one: Callable[[Path], bool] = Path.is_file,
) -> Path:
    """Returns the first of `root`, `root`/names that has all `files`.

    ImageNet's train is a folder, CIFAR-100's a file, and both may lie in one `root`: `is_one` tells them apart.
    """
    shown = [*files[:2], "..."] if len(files) > 2 else files
    wanted = f"{', '.join(shown)} in it or in its {' or '.join(names)} folder"
    if root is None:
        raise DataError(f"{what} is needed. Name the folder that holds it: --data DIR, with {wanted}.")
    for folder in (root, *(root / name for name in names)):
        if all(is_one(folder / file) for file in files):
            return folder
    raise DataError(f"--data {root} does not hold {what}, wanted {wanted}. Nothing is downloaded here.")


def torchvision_module(name: str, what_for: str) -> Any:
    try:
        import_module("torchvision")
        return import_module(f"torchvision.{name}")
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise DataError(
            f"{what_for} torchvision's, which cannot be imported here ({error}). Install the torchvision that belongs "
            "to your torch, or choose another --task."
        ) from error

"""Finding data on disk. Nothing is ever downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


class DataError(Exception):
    """Data are missing or are not what their names say. The message says what to do."""


def find_folder(
    root: Path | None,
    names: Sequence[str],
    files: Sequence[str],
    what: str,
    is_one: Callable[[Path], bool] = Path.is_file,
) -> Path:
    """The first of `root`, `root`/names that has all `files`.

    ImageNet's train is a folder, CIFAR-100's a file, and both may lie in one `root`: `is_one` tells them apart.
    """
    if root is None:
        raise DataError(f"{what} is needed. Name the folder that holds it: --data DIR, with {wanted(names, files)}.")
    if not root.is_dir():
        raise DataError(f"--data {root} is no folder, wanted one that holds {what}: {wanted(names, files)}.")
    for folder in (root, *(root / name for name in names)):
        if all(is_one(folder / file) for file in files):
            return folder
    raise DataError(f"--data {root} does not hold {what}, wanted {wanted(names, files)}. Nothing is downloaded here.")


def wanted(names: Sequence[str], files: Sequence[str]) -> str:
    shown = [*files[:2], "..."] if len(files) > 2 else files
    return f"{', '.join(shown)} in it or in its {' or '.join(names)} folder"

"""Finding data on disk, where nothing is ever downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class DataError(Exception):
    """Data are missing or are not what their names say. The message says what to do."""


def find_folder(root: Path | None, names: Sequence[str], files: Sequence[str], what: str) -> Path:
    """Returns the first of `root`, `root`/names that has all `files`."""
    shown = [*files[:2], "..."] if len(files) > 2 else files
    wanted = f"{', '.join(shown)} in it or in its {' or '.join(names)} folder"
    if root is None:
        raise DataError(f"{what} is needed. Name the folder that holds it: --data DIR, with {wanted}.")
    for folder in (root, *(root / name for name in names)):
        if all((folder / file).is_file() for file in files):
            return folder
    raise DataError(f"--data {root} does not hold {what}, wanted {wanted}. Nothing is downloaded here.")

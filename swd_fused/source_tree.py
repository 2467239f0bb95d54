"""Tells a source tree from an installed package: a tree's kernels may not be built, and in it Python finds no other."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGE = Path(__file__).parent
ROOT = PACKAGE.parent


def is_source_tree() -> bool:
    return (ROOT / "setup.py").is_file() and (ROOT / "csrc").is_dir()


def path_without_tree() -> list[str]:
    """Returns Python's path as it is in other folders."""
    return [entry for entry in sys.path if Path(entry).resolve() != ROOT.resolve()]


def hidden_package() -> Path | None:
    """Returns the folder of an installed package with kernels that a source tree without them hides, or None."""
    if not is_source_tree() or _has_kernels(PACKAGE):
        return None
    found = PathFinder.find_spec("swd_fused", path_without_tree())
    folders = map(Path, found.submodule_search_locations or []) if found else ()
    return next(filter(_has_kernels, folders), None)


def how_to_get_kernels() -> str:
    """Returns what a user who lacks the C++ kernels can do, as the end of a sentence."""
    hidden = hidden_package()
    if hidden is not None:
        return (
            f"start Python in another folder: {ROOT} is a source tree without kernels, and hides the package in "
            f"{hidden}, which has them. Or run `pip install -e .` in that tree, which builds them there."
        )
    if is_source_tree():
        return f"run `pip install -e .` in {ROOT}, which builds them there; it needs a C++ compiler."
    return "run `pip install .` in a clone of swd_fused, without SWD_FUSED_NO_CPP; it needs a C++ compiler."


def _has_kernels(package: Path) -> bool:
    return any(package.glob("_C.*"))

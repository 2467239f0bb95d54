"""English prose as bytes: Debian's package `anarchism`, 11.7 MB, or any file or folder of texts."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.paper.data import DataError

DEBIAN_FOLDER = Path("/usr/share/doc/anarchism/markdown")
SUFFIXES = (".md", ".md.gz", ".txt", ".txt.gz")
HELD_OUT = 20  # a twentieth each for validation and for the test, from the end


@dataclass(frozen=True)
class Prose:
    """`tokens` are bytes, numbered by which of them occur. `name` tells texts apart."""

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: int


def prose_path(path: Path | None) -> Path:
    path = path or DEBIAN_FOLDER
    if path.exists():
        return path
    raise DataError(
        f"{path} is not there, wanted a text or a folder of texts. Name one with --text, or on Debian and Ubuntu: "
        "apt-get install anarchism"
    )


def read_prose(path: Path | None) -> Prose:
    path = prose_path(path)
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    content = b"\n".join(read(file) for file in files)
    part = len(content) // HELD_OUT
    if part < 1000:
        raise DataError(f"{path} has {len(content)} bytes, wanted a text of at least {1000 * HELD_OUT}.")
    bytes_used, tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).unique(return_inverse=True)
    name = f"{'anarchism' if path == DEBIAN_FOLDER else path.name}, {len(content)} bytes"
    return Prose(name, tokens[: -2 * part], tokens[-2 * part : -part], tokens[-part:], len(bytes_used))


def read(file: Path) -> bytes:
    content = file.read_bytes()
    return gzip.decompress(content) if file.suffix == ".gz" else content

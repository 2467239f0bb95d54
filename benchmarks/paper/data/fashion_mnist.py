"""Fashion-MNIST (Xiao et al., 2017) from its IDX files, gzipped or not: those of Debian's package, or a folder's."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.paper.data.folders import DataError, find_folder
from benchmarks.paper.data.images import Tensors, normalized

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
FOLDERS = ("fashion-mnist", "FashionMNIST/raw")
STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UNSIGNED_BYTES = 8


def fashion_mnist(root: Path | None) -> Tensors:
    folder = fashion_folder(root)
    train_images, train_labels, test_images, test_labels = (read_idx(folder, stem) for stem in STEMS)
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            raise DataError(
                f"{folder} has images of shape {tuple(images.shape)} with labels of shape {tuple(labels.shape)}, "
                "wanted (count, rows, columns) and (count)."
            )
    train, test = normalized(train_images.unsqueeze(1), test_images.unsqueeze(1))
    return Tensors(train, train_labels.long(), test, test_labels.long(), classes=10)


def fashion_folder(root: Path | None) -> Path:
    """What the user names comes first, then Debian's folder."""
    named = [] if root is None else [root, *(root / name for name in FOLDERS)]
    for folder in (*named, DEBIAN_FOLDER):
        if all((folder / stem).is_file() or (folder / f"{stem}.gz").is_file() for stem in STEMS):
            return folder
    what = "Fashion-MNIST (on Debian and Ubuntu: apt-get install dataset-fashion-mnist)"
    return find_folder(root, FOLDERS, [f"{stem}.gz" for stem in STEMS], what)


def read_idx(folder: Path, stem: str) -> Tensor:
    """IDX: two zero bytes, the type, the number of dimensions, each dimension as a big-endian int32, the values."""
    path = folder / f"{stem}.gz"
    try:
        content = gzip.decompress(path.read_bytes()) if path.is_file() else (folder / stem).read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}). Replace it by a whole one.") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTES:
        raise DataError(f"{folder / stem} begins with {content[:4]!r}, wanted an IDX file of unsigned bytes.")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], dtype=">i4").tolist()
    values = np.frombuffer(content[start:], dtype=np.uint8)
    if values.size != math.prod(shape):
        raise DataError(f"{folder / stem} has {values.size} values, its header says {shape}. Replace it.")
    return torch.from_numpy(values.reshape(shape).copy())

"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from a folder, in their binary version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.paper.data.images import Tensors, normalized

PIXELS = 3 * 32 * 32


class DataError(Exception):
    """Data are missing or are not what their names say. The message says what to do."""


@dataclass(frozen=True)
class Cifar:
    name: str
    classes: int
    folder: str
    files: tuple[str, ...]  # the last one holds the test images
    label_bytes: int  # before each image; the last of them is the label


BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR10 = Cifar("CIFAR-10", 10, "cifar-10-batches-bin", BATCHES, 1)
CIFAR100 = Cifar("CIFAR-100", 100, "cifar-100-binary", ("train.bin", "test.bin"), 2)


def cifar(kind: Cifar, root: Path | None, of_each: int | None = None, for_testing: int | None = None) -> Tensors:
    """`of_each` training file and `for_testing`, the first images are taken: by default all."""
    parts = files_of(kind, root)
    counts = [*[of_each] * (len(parts) - 1), for_testing]
    images, labels = [], []
    for (x, y), file, count in zip(parts, kind.files, counts, strict=True):
        if len(x) != len(y) or (len(y) and not 0 <= y.min() <= y.max() < kind.classes):
            raise DataError(
                f"{root}: {file} has {len(x)} images and {len(y)} labels, wanted as many labels from 0 to "
                f"{kind.classes - 1}."
            )
        images.append(torch.from_numpy(x[:count].copy()).view(-1, 3, 32, 32))
        labels.append(torch.from_numpy(y[:count].astype(np.int64)))
    train, test = normalized(torch.cat(images[:-1]), images[-1])
    return Tensors(train, torch.cat(labels[:-1]), test, labels[-1], kind.classes)


def files_of(kind: Cifar, root: Path | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the images and labels of each file."""
    for folder in () if root is None else (root, root / kind.folder):
        paths = [folder / file for file in kind.files]
        if all(path.is_file() for path in paths):
            return [read_binary(path, kind) for path in paths]
    raise DataError(
        f"{kind.name}'s binary version is needed: --data DIR, with {kind.files[0]} and the others in it, or in its "
        f"folder {kind.folder}. Got {root}. Nothing is downloaded here."
    )


def read_binary(path: Path, kind: Cifar) -> tuple[np.ndarray, np.ndarray]:
    values = np.fromfile(path, dtype=np.uint8)
    record = kind.label_bytes + PIXELS
    if values.size == 0 or values.size % record:
        raise DataError(f"{path} has {values.size} bytes, wanted a multiple of {record}. Replace it by a whole one.")
    records = values.reshape(-1, record)
    return records[:, kind.label_bytes :], records[:, kind.label_bytes - 1]

"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from a folder, in either of the two formats that they are given out in."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    folders: tuple[str, str]  # of the Python version and of the binary one
    files: tuple[str, ...]  # of the Python version; the last one holds the test images
    labels: str
    label_bytes: int  # before each binary image; the last of them is the label


BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR10 = Cifar("CIFAR-10", 10, ("cifar-10-batches-py", "cifar-10-batches-bin"), BATCHES, "labels", 1)
CIFAR100 = Cifar("CIFAR-100", 100, ("cifar-100-python", "cifar-100-binary"), ("train", "test"), "fine_labels", 2)


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
    """Returns what the files hold in their order. The binary version comes first where both are there."""
    for suffix, read in ((".bin", read_binary), ("", read_pickle)):
        for folder in () if root is None else (root, *(root / name for name in kind.folders)):
            paths = [folder / f"{file}{suffix}" for file in kind.files]
            if all(path.is_file() for path in paths):
                return [read(path, kind) for path in paths]
    raise DataError(
        f"{kind.name} is needed: --data DIR, with {kind.files[0]} or {kind.files[0]}.bin and the others in it, or in "
        f"its folder {' or '.join(kind.folders)}. Got {root}. Nothing is downloaded here."
    )


def read_binary(path: Path, kind: Cifar) -> tuple[np.ndarray, np.ndarray]:
    values = np.fromfile(path, dtype=np.uint8)
    record = kind.label_bytes + PIXELS
    if values.size == 0 or values.size % record:
        raise DataError(f"{path} has {values.size} bytes, wanted a multiple of {record}. Replace it by a whole one.")
    records = values.reshape(-1, record)
    return records[:, kind.label_bytes :], records[:, kind.label_bytes - 1]


def read_pickle(path: Path, kind: Cifar) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = ArraysOnly(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        images, labels = np.asarray(content["data"], dtype=np.uint8), np.asarray(content[kind.labels])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a batch of {kind.name}'s Python version ({error}).") from error
    if images.ndim != 2 or images.shape[1] != PIXELS:
        raise DataError(f"{path} has images of shape {images.shape}, wanted (count, {PIXELS}).")
    return images, labels


class ArraysOnly(pickle.Unpickler):
    """A pickle can run anything when loaded; CIFAR's need no more than NumPy's arrays."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "encode", "_frombuffer", "scalar"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, wanted arrays only")

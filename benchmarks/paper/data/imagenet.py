"""ImageNet from a folder with train/ and val/, one folder of images for each class in them, read by torchvision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.paper.data.folders import DataError, find_folder
from benchmarks.paper.data.images import Batch
from benchmarks.paper.data.torchvision_import import torchvision_module

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the training images' channels


def imagenet_folder(root: Path | None) -> Path:
    """With all that can be told to be missing without a walk over a million files."""
    folder = find_folder(root, ["imagenet"], ["train", "val"], "ImageNet", Path.is_dir)
    torchvision_datasets()
    torchvision_transforms()
    train, val = (class_names(folder / part) for part in ("train", "val"))
    if not train or train != val:
        raise DataError(
            f"{folder} has {len(train)} classes in train/ and {len(val)} in val/, wanted the same ones, a folder of "
            "images each. The validation images must be sorted into folders of classes."
        )
    return folder


def class_names(part: Path) -> list[str]:
    """Those of folders with something in them."""
    return sorted(entry.name for entry in part.iterdir() if entry.is_dir() and has_something(entry))


def has_something(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return next(entries, None) is not None


def torchvision_datasets() -> Any:
    return torchvision_module("datasets", "the reader of ImageNet's files is")


def torchvision_transforms() -> Any:
    return torchvision_module("transforms", "the reader of ImageNet's files is")


class ImageNet:
    channels = 3
    size = 224

    def __init__(self, root: Path | None, device: torch.device) -> None:
        folder = imagenet_folder(root)
        transforms = torchvision_transforms()
        image_folder = torchvision_datasets().ImageFolder
        to_tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        crop = [transforms.RandomResizedCrop(self.size), transforms.RandomHorizontalFlip()]
        centre = [transforms.Resize(256), transforms.CenterCrop(self.size)]
        try:
            self.augmented = image_folder(folder / "train", transforms.Compose([*crop, *to_tensor]))
            self.plain = image_folder(folder / "train", transforms.Compose([*centre, *to_tensor]))
            self.test = image_folder(folder / "val", transforms.Compose([*centre, *to_tensor]))
        except (FileNotFoundError, RuntimeError) as error:
            raise DataError(f"{folder} is not ImageNet as folders of classes: {error}") from error
        self.classes = len(self.augmented.classes)
        self.device = device

    def train_steps(self, batch_size: int) -> int:
        return max(1, len(self.augmented) // batch_size)

    def train_batches(self, batch_size: int, shuffle: torch.Generator, augment: bool) -> Iterator[Batch]:
        dataset = self.augmented if augment else self.plain
        yield from self._batches(
            dataset, batch_size, shuffle=True, drop_last=len(dataset) > batch_size, generator=shuffle
        )

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        yield from self._batches(self.test, batch_size)

    def _batches(self, dataset: object, batch_size: int, **options: object) -> Iterator[Batch]:
        on_gpu = self.device.type == "cuda"
        workers = min(16, os.cpu_count() or 1) if on_gpu else 0
        loader = torch.utils.data.DataLoader(dataset, batch_size, num_workers=workers, pin_memory=on_gpu, **options)  # type: ignore[arg-type]
        for images, labels in loader:
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

"""ImageNet from a folder with train/ and val/, one folder of images for each class in them, read by torchvision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.paper.data.folders import DataError, find_folder, torchvision_module
from benchmarks.paper.data.images import Batch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the training images' channels
READER = "the reader of ImageNet's files is"


def imagenet_folder(root: Path | None) -> Path:
    """Checks all that can be told to be missing without a walk over a million files."""
    folder = find_folder(root, ["imagenet"], ["train", "val"], "ImageNet", Path.is_dir)
    torchvision_module("datasets", READER)
    parts = folder / "train", folder / "val"
    train, val = ({each.name for each in part.iterdir() if has_something(each)} for part in parts)
    if not train or train != val:
        raise DataError(
            f"{folder} has {len(train)} classes in train/ and {len(val)} in val/, wanted the same ones, a folder of "
            "images each. The validation images must be sorted into folders of classes."
        )
    return folder


def has_something(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return next(entries, None) is not None


class ImageNet:
    channels = 3
    size = 224

    def __init__(self, root: Path | None, device: torch.device) -> None:
        folder = imagenet_folder(root)
        transforms = torchvision_module("transforms", READER)
        image_folder = torchvision_module("datasets", READER).ImageFolder
        to_tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        crop = [transforms.RandomResizedCrop(self.size), transforms.RandomHorizontalFlip()]
        centre = [transforms.Resize(256), transforms.CenterCrop(self.size)]
        self.augmented = image_folder(folder / "train", transforms.Compose([*crop, *to_tensor]))
        self.plain = image_folder(folder / "train", transforms.Compose([*centre, *to_tensor]))
        self.test = image_folder(folder / "val", transforms.Compose([*centre, *to_tensor]))
        self.classes = len(self.augmented.classes)
        self.device = device

    def train_steps(self, batch_size: int) -> int:
        return max(1, len(self.augmented) // batch_size)

    def train_batches(self, batch_size: int, shuffle: torch.Generator, augment: bool) -> Iterator[Batch]:
        dataset = self.augmented if augment else self.plain
        whole_only = len(dataset) > batch_size
        return self._batches(dataset, batch_size, shuffle=True, drop_last=whole_only, generator=shuffle)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        return self._batches(self.test, batch_size)

    def _batches(self, dataset: object, batch_size: int, **options: object) -> Iterator[Batch]:
        on_gpu = self.device.type == "cuda"
        workers = min(16, os.cpu_count() or 1) if on_gpu else 0
        loader = torch.utils.data.DataLoader(dataset, batch_size, num_workers=workers, pin_memory=on_gpu, **options)  # type: ignore[arg-type]
        for images, labels in loader:
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

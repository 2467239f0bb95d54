"""ImageNet from a folder with train/ and val/, one folder of images for each class in them, read by torchvision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.paper.data.folders import DataError, find_folder
from benchmarks.paper.data.images import Batch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the training images' channels


class ImageNet:
    channels = 3
    size = 224

    def __init__(self, root: Path | None, device: torch.device) -> None:
        folder = find_folder(root, ["imagenet"], ["train", "val"], "ImageNet", Path.is_dir)
        try:
            from torchvision import transforms
            from torchvision.datasets import ImageFolder
        except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
            raise DataError(
                f"ImageNet's files are read by torchvision, which cannot be imported here ({error}). Install the "
                "torchvision that belongs to your torch."
            ) from error
        to_tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        crop = [transforms.RandomResizedCrop(self.size), transforms.RandomHorizontalFlip()]
        centre = [transforms.Resize(256), transforms.CenterCrop(self.size)]
        try:
            self.augmented = ImageFolder(folder / "train", transforms.Compose([*crop, *to_tensor]))
            self.plain = ImageFolder(folder / "train", transforms.Compose([*centre, *to_tensor]))
            self.test = ImageFolder(folder / "val", transforms.Compose([*centre, *to_tensor]))
        except (FileNotFoundError, RuntimeError) as error:
            raise DataError(f"{folder} is not ImageNet as folders of classes: {error}") from error
        self.classes = len(self.augmented.classes)
        if self.test.classes != self.augmented.classes:
            raise DataError(
                f"{folder} has {self.classes} classes in train/ and {len(self.test.classes)} in val/, wanted the same. "
                "The validation images must be sorted into folders of classes."
            )
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

"""Images for classification, as tensors on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  torch's own name for it

Batch = tuple[Tensor, Tensor]


@dataclass
class Tensors:
    """Images (count, channels, side, side) as floats, and labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int

    @property
    def channels(self) -> int:
        return self.train_images.shape[1]

    @property
    def size(self) -> int:
        return self.train_images.shape[2]

    def on(self, device: torch.device) -> Tensors:
        def moved(images: Tensor) -> Tensor:
            return images.to(device, memory_format=torch.channels_last)

        return replace(
            self,
            train_images=moved(self.train_images),
            train_labels=self.train_labels.to(device),
            test_images=moved(self.test_images),
            test_labels=self.test_labels.to(device),
        )

    def limited(self, train_images: int) -> Tensors:
        """The first images only, which in these data sets are in no order of their labels. 0 means all."""
        if train_images == 0:
            return self
        return replace(
            self, train_images=self.train_images[:train_images], train_labels=self.train_labels[:train_images]
        )

    def held_out(self, count: int, part: str) -> Tensors:
        """Without the last `count` training images, which take the place of the test images for `part` "validation"."""
        if count == 0:
            if part == "validation":
                raise ValueError("got held_out=0, wanted the number of images to validate on")
            return self
        last = slice(len(self.train_labels) - count, None)
        kept = replace(self, train_images=self.train_images[:-count], train_labels=self.train_labels[:-count])
        if part == "validation":
            return replace(kept, test_images=self.train_images[last], test_labels=self.train_labels[last])
        return kept

    def train_steps(self, batch_size: int) -> int:
        return max(1, len(self.train_labels) // batch_size)

    def train_batches(self, batch_size: int, shuffle: torch.Generator, augment: bool) -> Iterator[Batch]:
        """An epoch in random order. The images left over sit it out: a batch of one has no BatchNorm statistics."""
        order = torch.randperm(len(self.train_labels), generator=shuffle).to(self.train_labels.device)
        for step in range(self.train_steps(batch_size)):
            index = order[step * batch_size : (step + 1) * batch_size]
            images = self.train_images[index]
            yield (flipped_and_cropped(images, shuffle) if augment else images), self.train_labels[index]

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        return zip(self.test_images.split(batch_size), self.test_labels.split(batch_size), strict=True)


def normalized(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes as floats with mean 0 and variance 1 in each channel of the training images."""
    train, test = train.float() / 255, test.float() / 255
    std, mean = torch.std_mean(train, dim=(0, 2, 3), keepdim=True)
    return (train - mean) / std, (test - mean) / std


def flipped_and_cropped(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Each image mirrored or not, and shifted by up to `padding` pixels, with zeros moving in."""
    count, _, height, width = images.shape
    flip = (torch.rand(count, generator=generator) < 0.5).to(images.device)
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    padded = F.pad(images, [padding] * 4)
    top, left = torch.randint(2 * padding + 1, (2, count, 1), generator=generator).to(images.device)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    which = torch.arange(count, device=images.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)

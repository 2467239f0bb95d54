"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch

from benchmarks.paper.data.cifar import CIFAR10, CIFAR100, DataError, cifar
from benchmarks.paper.data.images import Tensors, normalized

__all__ = ["DataError", "check_images", "load_images"]


def digits() -> Tensors:
    """scikit-learn's digits: 1,797 real images of 8 x 8 pixels, of which the last quarter is for testing."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # they come writer by writer
    images, targets = torch.from_numpy(pixels).view(-1, 1, 8, 8)[order] * (255 / 16), torch.from_numpy(labels)[order]
    train, test = normalized(images[:1347], images[1347:])
    return Tensors(train, targets[:1347].long(), test, targets[1347:].long(), classes=10)


def noise_images() -> Tensors:
    """Random images, for trying the experiments out in seconds. Nothing can be learned from them."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(48, 1, 8, 8, generator=generator), torch.randint(3, (48,), generator=generator)
    return Tensors(images[:32], labels[:32], images[32:], labels[32:], classes=3)


IMAGES: dict[str, Callable[[Path | None], Tensors]] = {
    "cifar10": partial(cifar, CIFAR10),
    "cifar10-subset": partial(cifar, CIFAR10, of_each=2000, for_testing=5000),  # for two cores: 10,000 train
    "cifar100": partial(cifar, CIFAR100),
    "digits": lambda root: digits(),
    "noise": lambda root: noise_images(),
}


@lru_cache(maxsize=2)
def load_images(
    name: str, root: Path | None, device: torch.device, limit: int, held_out: int = 0, part: str = "test"
) -> Tensors:
    """With the first `limit` training images, or all for 0, except for those `held_out` for validation.

    Where `part` is "validation" these are what the data give for testing, and the test images are not in them.
    """
    return IMAGES[name](root).held_out(held_out, part).limited(limit).on(device)


def check_images(name: str, root: Path | None) -> None:
    """Raises DataError where they could not be loaded. Keeps nothing: workers load what they need."""
    IMAGES[name](root)

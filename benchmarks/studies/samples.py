"""scikit-learn's digits for several studies, with noise or without."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.paper.data.images import Tensors

TRAIN_SIZE = 1347
NOISE = 1.0


def digits() -> Tensors:
    """scikit-learn's images of 8 by 8 pixels, a quarter of them to test with: the same split whatever the seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        pixels, labels, train_size=TRAIN_SIZE, random_state=0, stratify=labels
    )
    mean, std = train.mean(), train.std()
    train, test = (torch.tensor((part - mean) / std, dtype=torch.float32).view(-1, 1, 8, 8) for part in (train, test))
    return Tensors(train, torch.tensor(train_labels), test, torch.tensor(test_labels), classes=10)


def noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return images + NOISE * torch.randn(images.shape, generator=generator)

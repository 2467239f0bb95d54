"""scikit-learn's digits: 1,797 real images of 8 x 8 pixels, of which the last quarter is for testing."""

from __future__ import annotations

import torch

from benchmarks.paper.data.images import Tensors, normalized

TRAIN_SIZE = 1347


def digits() -> Tensors:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).view(-1, 1, 8, 8) * (255 / 16)
    targets = torch.from_numpy(labels).long()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))  # they come writer by writer
    images, targets = images[order], targets[order]
    train, test = normalized(images[:TRAIN_SIZE], images[TRAIN_SIZE:])
    return Tensors(train, targets[:TRAIN_SIZE], test, targets[TRAIN_SIZE:], classes=10)

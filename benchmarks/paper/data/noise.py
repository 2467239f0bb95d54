"""Random images and a random text, for trying the experiments out in seconds. Nothing can be learned from them."""

from __future__ import annotations

import torch

from benchmarks.paper.data.images import Tensors
from benchmarks.paper.data.text import Text


def noise_images() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(48, 1, 8, 8, generator=generator)
    labels = torch.randint(3, (48,), generator=generator)
    return Tensors(images[:32], labels[:32], images[32:], labels[32:], classes=3)


def noise_text() -> Text:
    tokens = torch.randint(7, (300,), generator=torch.Generator().manual_seed(0))
    return Text(tokens[:200], tokens[200:], vocabulary=7)

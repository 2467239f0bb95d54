"""DenseNet-BC with 121 layers (Huang et al., 2017) for small images: no pooling before the first block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def norm_conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class DenseLayer(nn.Module):
    """Adds `growth` channels to those that it gets, by way of four times as many."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.added = nn.Sequential(norm_conv(inputs, 4 * growth, 1), norm_conv(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.added(x), x], 1)


class DenseNet(nn.Sequential):
    def __init__(self, channels: int, classes: int, blocks: Sequence[int], growth: int) -> None:
        width = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        for block, count in enumerate(blocks):
            for _ in range(count):
                layers.append(DenseLayer(width, growth))
                width += growth
            if block < len(blocks) - 1:
                layers += [norm_conv(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(*layers, nn.Linear(width, classes))


def densenet121(channels: int, classes: int, size: int) -> DenseNet:
    return DenseNet(channels, classes, blocks=(6, 12, 24, 16), growth=32)

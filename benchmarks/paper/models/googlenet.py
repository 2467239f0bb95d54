"""GoogLeNet (Szegedy et al., 2015) as used on CIFAR: BatchNorm, 5 x 5 as two 3 x 3, no auxiliary classifiers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Inception(nn.Module):
    def __init__(self, inputs: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pool: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                conv(inputs, one, 1),
                nn.Sequential(conv(inputs, reduce3, 1), conv(reduce3, three, 3)),
                nn.Sequential(conv(inputs, reduce5, 1), conv(reduce5, five, 3), conv(five, five, 3)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv(inputs, pool, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def googlenet(channels: int, classes: int, size: int) -> nn.Sequential:
    return nn.Sequential(
        conv(channels, 192, 3),
        Inception(192, 64, 96, 128, 16, 32, 32),
        Inception(256, 128, 128, 192, 32, 96, 64),
        nn.MaxPool2d(3, stride=2, padding=1),
        Inception(480, 192, 96, 208, 16, 48, 64),
        Inception(512, 160, 112, 224, 24, 64, 64),
        Inception(512, 128, 128, 256, 24, 64, 64),
        Inception(512, 112, 144, 288, 32, 64, 64),
        Inception(528, 256, 160, 320, 32, 128, 128),
        nn.MaxPool2d(3, stride=2, padding=1),
        Inception(832, 256, 160, 320, 32, 128, 128),
        Inception(832, 384, 192, 384, 48, 128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, classes),
    )

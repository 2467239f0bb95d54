"""VGG (Simonyan and Zisserman, 2014) for small images, with one linear layer: 16 layers, and 6 for two cores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def vgg(channels: int, classes: int, stages: Sequence[Sequence[int]], batch_norm: bool) -> nn.Sequential:
    """Each stage ends by halving the resolution."""
    layers: list[nn.Module] = []
    inputs = channels
    for widths in stages:
        for outputs in widths:
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(outputs))
            layers.append(nn.ReLU(inplace=True))
            inputs = outputs
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    for module in model:
        if isinstance(module, nn.Conv2d):
            # torch's default divides the signal's variance by 6 in each layer, and without BatchNorm nothing mends it.
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return model

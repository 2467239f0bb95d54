"""Residual nets for small images (He et al., 2016): 18 and 34 layers as used on CIFAR, and three for two cores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            conv_norm(inputs, outputs, 3, stride), nn.ReLU(inplace=True), conv_norm(outputs, outputs, 3)
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x), inplace=True)


class ResNet(nn.Sequential):
    """Stages of blocks; each but the first begins by halving the resolution."""

    def __init__(
        self, channels: int, classes: int, widths: Sequence[int], blocks: Sequence[int], stem_stride: int = 1
    ) -> None:
        layers: list[nn.Module] = [conv_norm(channels, widths[0], 3, stem_stride), nn.ReLU(inplace=True)]
        for stage, ((inputs, outputs), count) in enumerate(zip(pairwise([widths[0], *widths]), blocks, strict=True)):
            layers.append(BasicBlock(inputs, outputs, stride=2 if stage else 1))
            layers += [BasicBlock(outputs, outputs, stride=1) for _ in range(count - 1)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))

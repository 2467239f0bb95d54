"""The nets of the paper for small images, and smaller ones for two cores, by name.

They take (channels, classes, size of a side). ResNets (He et al., 2016) have 18 or 34 layers, or 8; VGGs (Simonyan and
Zisserman, 2014) 16 layers with one linear one among them, or 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


# --- By name

Make = Callable[[int, int, int], nn.Module]


def resnet(*blocks: int) -> Make:
    return lambda channels, classes, size: ResNet(channels, classes, (64, 128, 256, 512), blocks)


def small_resnet(width: int) -> Make:
    """8 layers. The first one halves images larger than 16 x 16, which makes an epoch three times as fast."""
    widths, blocks = (width, 2 * width, 4 * width), (1, 1, 1)
    return lambda channels, classes, size: ResNet(channels, classes, widths, blocks, stem_stride=2 if size > 16 else 1)


VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
SMALL = ((8,), (16, 16), (32, 32))

IMAGE_MODELS: dict[str, Make] = {
    "resnet18": resnet(2, 2, 2, 2),
    "resnet34": resnet(3, 4, 6, 3),
    "vgg16": lambda channels, classes, size: vgg(channels, classes, VGG16, batch_norm=False),
    "vgg16-bn": lambda channels, classes, size: vgg(channels, classes, VGG16, batch_norm=True),
    "small-resnet": small_resnet(8),
    "medium-resnet": small_resnet(16),  # 78 thousand parameters, and 1.4 times the small one's time
    "large-resnet": small_resnet(32),  # 0.3 million, and 2.7 times the medium one's time
    "small-vgg": lambda channels, classes, size: vgg(channels, classes, SMALL, batch_norm=False),
    "small-vgg-bn": lambda channels, classes, size: vgg(channels, classes, SMALL, batch_norm=True),
}

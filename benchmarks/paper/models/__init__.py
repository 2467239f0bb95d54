"""Models by name. They take (channels, classes, size of a side)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.paper.models.resnet import ResNet
from benchmarks.paper.models.vgg import vgg

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

"""Models by name. They take (channels, classes, size of a side)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.paper.models.resnet import large_resnet, medium_resnet, resnet18, resnet34, small_resnet
from benchmarks.paper.models.vgg import small_vgg, small_vgg_bn, vgg16, vgg16_bn

IMAGE_MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "vgg16": vgg16,
    "vgg16-bn": vgg16_bn,
    "small-resnet": small_resnet,
    "medium-resnet": medium_resnet,
    "large-resnet": large_resnet,
    "small-vgg": small_vgg,
    "small-vgg-bn": small_vgg_bn,
}

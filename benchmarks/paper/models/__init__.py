"""Models by name. Image models take (channels, classes, size of a side), language models the vocabulary's size."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.paper.data.folders import torchvision_module
from benchmarks.paper.models.densenet import densenet121
from benchmarks.paper.models.googlenet import googlenet
from benchmarks.paper.models.language import LanguageModel, lstm, medium_lstm, small_lstm
from benchmarks.paper.models.resnet import large_resnet, medium_resnet, resnet18, resnet34, small_resnet
from benchmarks.paper.models.vgg import small_vgg, small_vgg_bn, vgg16, vgg16_bn


def resnet50(channels: int, classes: int, size: int) -> nn.Module:
    """For ImageNet, torchvision's."""
    model: nn.Module = torchvision_module("models", "resnet50 is").resnet50(num_classes=classes)
    return model


def check_model(name: str) -> None:
    """Raises DataError where it could not be built here."""
    if IMAGE_MODELS.get(name) is resnet50:
        torchvision_module("models", "resnet50 is")


IMAGE_MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "vgg16": vgg16,
    "vgg16-bn": vgg16_bn,
    "densenet121": densenet121,
    "googlenet": googlenet,
    "small-resnet": small_resnet,
    "medium-resnet": medium_resnet,
    "large-resnet": large_resnet,
    "small-vgg": small_vgg,
    "small-vgg-bn": small_vgg_bn,
}

LANGUAGE_MODELS: dict[str, Callable[[int], LanguageModel]] = {
    "lstm": lstm,
    "small-lstm": small_lstm,
    "medium-lstm": medium_lstm,
}

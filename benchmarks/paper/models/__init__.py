"""Models by name. Image models take (channels, classes, size of a side), language models the vocabulary's size."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.paper.models.densenet import densenet121
from benchmarks.paper.models.googlenet import googlenet
from benchmarks.paper.models.language import LanguageModel, lstm, small_lstm
from benchmarks.paper.models.resnet import resnet18, resnet34, small_resnet
from benchmarks.paper.models.vgg import small_vgg, small_vgg_bn, vgg16, vgg16_bn


def resnet50(channels: int, classes: int, size: int) -> nn.Module:
    """For ImageNet, torchvision's."""
    try:
        from torchvision.models import resnet50 as from_torchvision
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise RuntimeError(
            f"resnet50 is torchvision's, which cannot be imported here ({error}). Install the torchvision that "
            "belongs to your torch, or choose another --task."
        ) from error
    model: nn.Module = from_torchvision(num_classes=classes)
    return model


IMAGE_MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "vgg16": vgg16,
    "vgg16-bn": vgg16_bn,
    "densenet121": densenet121,
    "googlenet": googlenet,
    "small-resnet": small_resnet,
    "small-vgg": small_vgg,
    "small-vgg-bn": small_vgg_bn,
}

LANGUAGE_MODELS: dict[str, Callable[[int], LanguageModel]] = {"lstm": lstm, "small-lstm": small_lstm}

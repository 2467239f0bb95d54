"""What is trained: a small GPT on prose, a small ResNet on CIFAR-10, and a net whose weights all have no scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.paper.data import load_images
from benchmarks.paper.data.images import Batch, flipped_and_cropped
from benchmarks.paper.models.resnet import small_resnet
from benchmarks.small_models import SmallGPT
from benchmarks.studies.samples import digits, noisy, noisy_digits, windows_of
from benchmarks.which_decay.contenders import Group
from benchmarks.which_decay.prose import read_prose
from swd_fused import param_groups

# For stairs: second moments must forget faster than stages last, and with 0.999 they take 1,000 steps.
SHORT_MEMORY = (0.9, 0.99)

HeldOut = Literal["validation", "test"]


class Task(Protocol):
    data: str  # what tells its data from others'
    betas: tuple[float, float]

    def model(self) -> nn.Module: ...

    def groups(self, model: nn.Module) -> list[Group]:
        """The first one has the layers that a norm follows, to which the correction and the predictions apply."""

    def batch(self, generator: torch.Generator) -> Any: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    def held_out_loss(self, model: nn.Module, which: HeldOut) -> float: ...


class ProseGPT:
    """A million parameters, or few to try it out. Predicts bytes; the token embedding is the output layer too."""

    betas = (0.9, 0.99)
    batch_size = 8

    def __init__(self, text: Path | None, quick: bool) -> None:
        self.prose = read_prose(text)
        self.data = self.prose.name
        self.context, self.width, self.layers, self.windows = (8, 32, 1, 8) if quick else (64, 128, 5, 512)

    def model(self) -> nn.Module:
        return SmallGPT(self.prose.vocabulary, self.context, self.width, self.layers)

    def groups(self, model: nn.Module) -> list[Group]:
        return param_groups(model, 1.0, corrected_decay=True)

    def batch(self, generator: torch.Generator) -> Tensor:
        return windows_of(self.prose.train, self.batch_size, self.context, generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model.loss(batch)  # type: ignore[operator]
        return loss

    def held_out_loss(self, model: nn.Module, which: HeldOut) -> float:
        tokens = self.prose.validation if which == "validation" else self.prose.test
        windows = windows_of(tokens, self.windows, self.context, torch.Generator().manual_seed(1))
        losses = [model.loss(part).item() * len(part) for part in windows.split(64)]  # type: ignore[operator]
        return float(sum(losses)) / self.windows


class CifarResNet:
    """20,000 parameters on a subset of CIFAR-10. A tenth of the training images is for validation."""

    betas = (0.9, 0.999)
    batch_size, augment = 32, True

    def __init__(self, data: Path | None) -> None:
        images = load_images("cifar10-subset", data, torch.device("cpu"), 0)
        self.images = images
        self.train_count = len(images.train_labels) - len(images.train_labels) // 10
        self.data = f"CIFAR-10, {self.train_count} training images"

    def model(self) -> nn.Module:
        model = small_resnet(self.images.channels, self.images.classes, self.images.size)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def groups(self, model: nn.Module) -> list[Group]:
        return param_groups(model, 1.0, corrected_decay=True)

    def batch(self, generator: torch.Generator) -> Batch:
        chosen = torch.randint(self.train_count, (self.batch_size,), generator=generator)
        images = self.images.train_images[chosen]
        if self.augment:
            images = flipped_and_cropped(images, generator)
        return images, self.images.train_labels[chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def held_out_loss(self, model: nn.Module, which: HeldOut) -> float:
        if which == "validation":
            images, labels = self.images.train_images[self.train_count :], self.images.train_labels[self.train_count :]
        else:
            images, labels = self.images.test_images, self.images.test_labels
        parts = zip(images.split(500), labels.split(500), strict=True)
        return sum(cross_entropy(model(x), y, reduction="sum").item() for x, y in parts) / len(labels)


class PlainResNet(CifarResNet):
    """The same for stairs: without augmentation, since it is time per step that counts there."""

    betas = SHORT_MEMORY
    augment = False


class ScaleFreeDigits:
    """Digits with noise, which cannot be learnt by heart, and a net in which a norm follows every layer.

    The norms have no parameters of their own, and the last one is on the logits. So no weight has a scale, which is
    what the predictions assume, and the schedule's rms gradient is that of such weights alone.
    """

    betas = SHORT_MEMORY
    batch_size, width = 32, 32
    data = "digits"

    def __init__(self) -> None:
        self.digits = digits()

    def model(self) -> nn.Module:
        sizes = (64, self.width, self.width, 10)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs, affine=False), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def groups(self, model: nn.Module) -> list[Group]:
        return [{"params": list(model.parameters()), "weight_decay": 1.0, "corrected_decay": True}]

    def batch(self, generator: torch.Generator) -> Batch:
        return noisy_digits(self.digits, self.batch_size, generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def held_out_loss(self, model: nn.Module, which: HeldOut) -> float:
        images = noisy(self.digits.test_images, torch.Generator().manual_seed(1))
        return cross_entropy(model(images), self.digits.test_labels).item()


@dataclass(frozen=True)
class Sources:
    """Where data are, and whether models are only to be tried out."""

    text: Path | None = None
    images: Path | None = None
    quick: bool = False


@lru_cache
def task_of(name: str, sources: Sources) -> Task:
    if name == "gpt":
        return ProseGPT(sources.text, sources.quick)
    if name == "digits":
        return ScaleFreeDigits()
    return {"resnet": CifarResNet, "plain resnet": PlainResNet}[name](sources.images)

"""What is trained: a small GPT on prose, a small ResNet on CIFAR-10, and a net whose weights all have no scale."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.paper.data import DataError, load_images
from benchmarks.paper.data.images import Batch, Tensors, flipped_and_cropped
from benchmarks.paper.models import IMAGE_MODELS
from benchmarks.small_models import SmallGPT
from benchmarks.studies.samples import digits, noisy
from benchmarks.which_decay.contenders import Group
from swd_fused import param_groups

# For stairs: second moments must forget faster than stages last, and with 0.999 they take 1,000 steps.
SHORT_MEMORY = (0.9, 0.99)
DEBIAN_FOLDER = Path("/usr/share/doc/anarchism/markdown")
SUFFIXES = (".md", ".md.gz", ".txt", ".txt.gz")


class Task:
    """Tasks also have `model()`, `batch(generator)`, and `held_out("validation" or "test")`, which yields batches."""

    data: str  # what tells its data from others'
    betas = SHORT_MEMORY

    def groups(self, model: nn.Module) -> list[Group]:
        """The first one has the layers that a norm follows, to which the correction and the predictions apply."""
        return param_groups(model, 1.0, corrected_decay=True)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def held_out_loss(self, model: nn.Module, which: str) -> float:
        found = [(len(batch[0]), self.loss(model, batch).item()) for batch in self.held_out(which)]
        return sum(count * loss for count, loss in found) / sum(count for count, _ in found)


class ProseGPT(Task):
    """A million parameters, or few to try it out. Predicts bytes; the token embedding is the output layer too."""

    def __init__(self, text: Path | None, quick: bool) -> None:
        path = text or DEBIAN_FOLDER
        content = prose(path)
        # Bytes, numbered by which of them occur. A twentieth each for validation and for the test, from the end.
        bytes_used, tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).unique(return_inverse=True)
        part = len(content) // 20
        self.tokens = {"train": tokens[: -2 * part], "validation": tokens[-2 * part : -part], "test": tokens[-part:]}
        self.data = f"{'anarchism' if path == DEBIAN_FOLDER else path.name}, {len(content)} bytes"
        self.context, width, layers, self.windows = (8, 32, 1, 8) if quick else (64, 128, 5, 512)
        self.sizes = len(bytes_used), self.context, width, layers

    def model(self) -> nn.Module:
        return SmallGPT(*self.sizes)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return model.loss(*batch)  # type: ignore[no-any-return, operator]

    def batch(self, generator: torch.Generator) -> tuple[Tensor]:
        return (self.stretches("train", 8, generator),)

    def held_out(self, which: str) -> Iterable[tuple[Tensor]]:
        return zip(self.stretches(which, self.windows, torch.Generator().manual_seed(1)).split(64), strict=True)

    def stretches(self, part: str, count: int, generator: torch.Generator) -> Tensor:
        """Random ones, each one token longer than the context, since each token is also a target."""
        starts = torch.randint(len(self.tokens[part]) - self.context, (count, 1), generator=generator)
        return self.tokens[part][starts + torch.arange(self.context + 1)]


def prose(path: Path) -> bytes:
    """Returns a text, or those of a folder one after another."""
    if not path.exists():
        raise DataError(
            f"{path} is not there, wanted a text or a folder of texts. Name one with --text, or on Debian and Ubuntu: "
            "apt-get install anarchism"
        )
    files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES)) if path.is_dir() else [path]
    texts = (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes() for file in files)
    content = b"\n".join(texts)
    if len(content) < 20_000:
        raise DataError(f"{path} has {len(content)} bytes, wanted a text of at least 20,000.")
    return content


class Images(Task):
    images: Tensors

    def seen(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Returns images as training sees them."""
        return images

    def batch(self, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(self.images.train_labels), (32,), generator=generator)
        return self.seen(self.images.train_images[chosen], generator), self.images.train_labels[chosen]


class PlainResNet(Images):
    """20,000 parameters on a subset of CIFAR-10. A tenth of the training images is for validation.

    For stairs it is without augmentation, since it is time per step that counts there.
    """

    def __init__(self, data: Path | None) -> None:
        whole = load_images("cifar10-subset", data, torch.device("cpu"), 0)
        count = len(whole.train_labels) // 10
        self.images, self.validation = whole.held_out(count, "test"), whole.held_out(count, "validation")
        self.data = f"CIFAR-10, {len(self.images.train_labels)} training images"

    def model(self) -> nn.Module:
        model = IMAGE_MODELS["small-resnet"](self.images.channels, self.images.classes, self.images.size)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def held_out(self, which: str) -> Iterable[Batch]:
        return (self.validation if which == "validation" else self.images).test_batches(500)


class CifarResNet(PlainResNet):
    betas = (0.9, 0.999)
    seen = staticmethod(flipped_and_cropped)


class ScaleFreeDigits(Images):
    """Digits with new noise in each batch, so that 1,347 images cannot be learnt by heart, and norms after all layers.

    The norms have no parameters of their own, and the last one is on the logits. So no weight has a scale, which is
    what the predictions assume, and the schedule's rms gradient is that of such weights alone.
    """

    data, seen = "digits", staticmethod(noisy)

    def __init__(self) -> None:
        self.images = digits()

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise((64, 32, 32, 10)):
            layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs, affine=False), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def groups(self, model: nn.Module) -> list[Group]:
        return [{"params": list(model.parameters()), "weight_decay": 1.0, "corrected_decay": True}]

    def held_out(self, which: str) -> Iterable[Batch]:
        yield noisy(self.images.test_images, torch.Generator().manual_seed(1)), self.images.test_labels


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
    return ScaleFreeDigits() if name == "digits" else RESNETS[name](sources.images)


RESNETS = {"resnet": CifarResNet, "plain resnet": PlainResNet}

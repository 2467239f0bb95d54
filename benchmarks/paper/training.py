"""One training run of an image classifier: what it measured in each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from benchmarks.paper.checkpoint import Checkpoint, nothing_kept
from benchmarks.paper.data import ImageData, load_images
from benchmarks.paper.data.images import Batch
from benchmarks.paper.epoch import Epoch
from benchmarks.paper.models import IMAGE_MODELS
from benchmarks.paper.run import Run
from benchmarks.paper.training_loop import train

TEST_BATCH = 500


@dataclass
class Trained:
    epochs: list[Epoch]
    eigenvalues: list[float]


class ImageLesson:
    def __init__(self, run: Run, model: nn.Module, data: ImageData, device: torch.device) -> None:
        self.run = run
        self.model = model
        self.data = data
        self.device = device
        self.shuffle = torch.Generator().manual_seed(run.seed)

    def begin_epoch(self) -> None:
        self.order_of_epoch = self.shuffle.get_state()

    def batches(self) -> Iterator[Batch]:
        return self.data.train_batches(self.run.batch_size, self.shuffle, self.run.augment)

    def loss(self, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def before_step(self) -> None:
        pass

    def test(self, epoch: Epoch) -> None:
        epoch.test_loss, epoch.test_error = tested(self.model, self.data)

    def carried(self) -> dict[str, Any]:
        return {"shuffle": self.order_of_epoch}

    def carry(self, carried: dict[str, Any]) -> None:
        self.order_of_epoch = carried["shuffle"]
        self.shuffle.set_state(self.order_of_epoch)


def data_of(run: Run, root: Path | None, device: torch.device) -> ImageData:
    return load_images(run.data, root, device, run.limit, run.held_out, run.part)


def train_images(
    run: Run,
    root: Path | None,
    device: torch.device,
    after_epoch: Callable[[], None],
    checkpoint: Checkpoint | None = None,
) -> Trained:
    data = data_of(run, root, device)
    model = new_model(run, data, device)
    return Trained(train_model(run, model, data, device, after_epoch, checkpoint), eigenvalues=[])


def new_model(run: Run, data: ImageData, device: torch.device) -> nn.Module:
    torch.manual_seed(run.seed)
    model = IMAGE_MODELS[run.model](data.channels, data.classes, data.size)
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def train_model(
    run: Run,
    model: nn.Module,
    data: ImageData,
    device: torch.device,
    after_epoch: Callable[[], None],
    checkpoint: Checkpoint | None = None,
) -> list[Epoch]:
    lesson = ImageLesson(run, model, data, device)
    return train(run, lesson, data.train_steps(run.batch_size), after_epoch, checkpoint or nothing_kept())


@torch.no_grad()
def tested(model: nn.Module, data: ImageData) -> tuple[float, float]:
    model.eval()
    loss, wrong, count = 0.0, 0, 0
    for images, labels in data.test_batches(TEST_BATCH):
        logits = model(images)
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        wrong += int((logits.argmax(1) != labels).sum())
        count += len(labels)
    return loss / count, wrong / count

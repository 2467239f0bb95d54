"""One training run of an image classifier: what it measured in each epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, MultiStepLR

from benchmarks.paper.data import ImageData, load_images
from benchmarks.paper.models import IMAGE_MODELS
from benchmarks.paper.optimizers import OPTIMIZERS, adamw_weight_decay
from benchmarks.paper.run import Run

TEST_BATCH = 500


@dataclass
class Epoch:
    """Loss and norms are means over the epoch's minibatches, in train mode and without regularization.

    The paper's G is `squared_grad_norm`. What follows it is as the epoch leaves it, NaN where not measured.
    """

    epoch: int
    epoch_lr: float  # as the epoch begins
    train_loss: float
    grad_norm: float
    squared_grad_norm: float
    adamw_weight_decay: float
    weight_norm: float
    test_loss: float = math.nan
    test_error: float = math.nan  # a share


@dataclass
class Trained:
    epochs: list[Epoch]
    eigenvalues: list[float]


class EpochMeans:
    """Sums on the device, read once an epoch."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.count = 0

    def add(self, loss: Tensor, model: nn.Module) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        values = torch.stack([loss.detach(), norm, norm.square()])
        self.sums = values if self.sums is None else self.sums + values
        self.count += 1

    def epoch(self, number: int, lr: float, model: nn.Module, optimizer: Optimizer) -> Epoch:
        assert self.sums is not None
        loss, norm, square = (self.sums / self.count).tolist()
        weight_norm = float(torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()]))
        return Epoch(number, lr, loss, norm, square, adamw_weight_decay(optimizer), weight_norm)


def lr_schedule(run: Run, optimizer: Optimizer, steps: int) -> LRScheduler:
    """To be stepped after each minibatch."""
    if run.cosine:
        first, longer = run.cosine
        return CosineAnnealingWarmRestarts(optimizer, first * steps, longer)
    if run.milestones:
        return MultiStepLR(optimizer, [epoch * steps for epoch in run.milestones], gamma=0.1)
    return LambdaLR(optimizer, lambda step: 1.0)


def train_images(run: Run, root: Path | None, device: torch.device, after_epoch: Callable[[], None]) -> Trained:
    data = load_images(run.data, root, device, run.limit)
    return Trained(train_model(run, new_model(run, data, device), data, after_epoch), eigenvalues=[])


def new_model(run: Run, data: ImageData, device: torch.device) -> nn.Module:
    torch.manual_seed(run.seed)
    model = IMAGE_MODELS[run.model](data.channels, data.classes, data.size)
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def train_model(run: Run, model: nn.Module, data: ImageData, after_epoch: Callable[[], None]) -> list[Epoch]:
    optimizer = OPTIMIZERS[run.optimizer].build(model.parameters(), run.lr, run.weight_decay)
    schedule = lr_schedule(run, optimizer, data.train_steps(run.batch_size))
    shuffle = torch.Generator().manual_seed(run.seed)
    epochs: list[Epoch] = []
    for number in range(1, run.epochs + 1):
        lr = optimizer.param_groups[0]["lr"]
        model.train()
        means = EpochMeans()
        for images, labels in data.train_batches(run.batch_size, shuffle, run.augment):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            means.add(loss, model)
            optimizer.step()
            schedule.step()
        epoch = means.epoch(number, lr, model, optimizer)
        if number % run.evaluate_every == 0 or number == run.epochs:
            epoch.test_loss, epoch.test_error = tested(model, data)
        epochs.append(epoch)
        after_epoch()
    return epochs


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

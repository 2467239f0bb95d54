"""The loop that all training runs share. It goes on from a checkpoint as if it had never been interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, MultiStepLR

from benchmarks.paper.checkpoint import Checkpoint, restore_random
from benchmarks.paper.epoch import Epoch, EpochMeans
from benchmarks.paper.optimizers import OPTIMIZERS
from benchmarks.paper.run import Run


class Lesson(Protocol):
    """What is trained on what."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    def begin_epoch(self) -> None: ...

    def batches(self) -> Iterator[Any]:
        """Those of one epoch."""

    def loss(self, batch: Any) -> Tensor: ...

    def before_step(self) -> None:
        """With the gradients there and measured."""

    def test(self, epoch: Epoch) -> None:
        """Fills in what testing tells."""

    def carried(self) -> dict[str, Any]:
        """What else the rest of the epoch depends on."""

    def carry(self, carried: dict[str, Any]) -> None:
        """After it, and as many batches as have been trained on, the rest of the epoch is the same."""


def train(run: Run, lesson: Lesson, steps: int, after_epoch: Callable[[], None], checkpoint: Checkpoint) -> list[Epoch]:
    """`steps` is how many an epoch has."""
    model = lesson.model
    optimizer = OPTIMIZERS[run.optimizer].build(model.parameters(), run.lr, run.weight_decay)
    schedule = lr_schedule(run, optimizer, steps)
    epochs: list[Epoch] = []
    found = checkpoint.load()
    if found is not None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        epochs = [Epoch(**epoch) for epoch in found["epochs"]]
        for _ in epochs:
            after_epoch()

    for number in range(len(epochs) + 1, run.epochs + 1):
        lesson.begin_epoch()
        if found is None:
            means, batches = EpochMeans(optimizer.param_groups[0]["lr"]), lesson.batches()
        else:
            lesson.carry(found["carried"])
            means, batches = EpochMeans.of(found["means"], lesson.device), lesson.batches()
            for _ in range(means.count):
                next(batches)
            restore_random(found["random"])
            found = None
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            loss = lesson.loss(batch)
            loss.backward()
            means.add(loss, model)
            lesson.before_step()
            optimizer.step()
            means.add_decay(optimizer)
            schedule.step()
            if checkpoint.is_due():
                states = {"model": model, "optimizer": optimizer, "schedule": schedule, "means": means}
                content: dict[str, Any] = {name: part.state_dict() for name, part in states.items()}
                content |= {"epochs": [asdict(epoch) for epoch in epochs], "carried": lesson.carried()}
                checkpoint.save(content)
        epoch = means.epoch(number, model)
        if number % run.evaluate_every == 0 or number == run.epochs:
            lesson.test(epoch)
        epochs.append(epoch)
        after_epoch()
    return epochs


def lr_schedule(run: Run, optimizer: Optimizer, steps: int) -> LRScheduler:
    """To be stepped after each minibatch."""
    if run.cosine:
        first, longer = run.cosine
        return CosineAnnealingWarmRestarts(optimizer, first * steps, longer)
    if run.milestones:
        return MultiStepLR(optimizer, [epoch * steps for epoch in run.milestones], gamma=0.1)
    return LambdaLR(optimizer, lambda step: 1.0)

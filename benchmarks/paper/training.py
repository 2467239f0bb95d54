"""Trains an image classifier, and measures it in each epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  torch's own name for it
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, MultiStepLR

from benchmarks.paper.data import load_images
from benchmarks.paper.data.images import Batch, Tensors
from benchmarks.paper.models import IMAGE_MODELS
from benchmarks.paper.optimizers import OPTIMIZERS, adamw_weight_decay
from benchmarks.paper.run import Run
from benchmarks.studies.training import Lesson, Point, train

TEST_BATCH = 500


class ImageLesson(Lesson):
    def __init__(self, run: Run, data: Tensors, device: torch.device) -> None:
        torch.manual_seed(run.seed)
        model = IMAGE_MODELS[run.model](data.channels, data.classes, data.size)
        model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = OPTIMIZERS[run.optimizer].build(model.parameters(), run.lr, run.weight_decay)
        steps = data.train_steps(run.batch_size)
        super().__init__(model, optimizer, lr_schedule(run, optimizer, steps), [steps] * run.epochs)
        self.run, self.data = run, data
        self.generator.manual_seed(run.seed)

    def batches(self) -> Iterator[Batch]:
        return self.data.train_batches(self.run.batch_size, self.generator, self.run.augment)

    def loss(self, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def weight_decay(self) -> float:
        return adamw_weight_decay(self.optimizer)

    def point(self, is_last: bool) -> Point:
        epoch = self.steps // self.windows[0]
        point = {"epoch": epoch, **super().point(is_last), "test_loss": math.nan, "test_error": math.nan}
        self.model.eval()
        return point | (self.tested() if is_last or epoch % self.run.evaluate_every == 0 else {})

    @torch.no_grad()
    def tested(self) -> Point:
        """Returns the mean loss and the share of errors, and keeps which images were classified correctly."""
        correct, loss = [], 0.0
        for images, labels in self.data.test_batches(TEST_BATCH):
            logits = self.model(images)
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            correct.append(logits.argmax(1) == labels)
        self.correct = torch.cat(correct).cpu().numpy()
        return {"test_loss": loss / len(self.correct), "test_error": 1 - float(self.correct.mean())}


def lr_schedule(run: Run, optimizer: Optimizer, steps: int) -> LRScheduler:
    if run.cosine:
        first, longer = run.cosine
        return CosineAnnealingWarmRestarts(optimizer, first * steps, longer)
    if run.milestones:
        return MultiStepLR(optimizer, [epoch * steps for epoch in run.milestones], gamma=0.1)
    return LambdaLR(optimizer, lambda step: 1.0)


def lesson_of(run: Run, root: Path | None, device: torch.device) -> ImageLesson:
    return ImageLesson(run, load_images(run.data, root, device, run.limit, run.held_out, run.part), device)


def trained(run: Run, root: Path | None, device: str) -> dict[str, Any]:
    return {"run": asdict(run), "points": train(lesson_of(run, root, torch.device(device)))}

"""Trains an image classifier or a language model, and measures it in each epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, MultiStepLR

from benchmarks.paper.data import DataError, Text, check_images, load_images, load_text
from benchmarks.paper.data.images import Batch, Tensors
from benchmarks.paper.models import IMAGE_MODELS, LANGUAGE_MODELS
from benchmarks.paper.models.language import LanguageModel
from benchmarks.paper.optimizers import OPTIMIZERS, adamw_weight_decay
from benchmarks.paper.run import Run
from benchmarks.studies.checkpoint import Checkpoint
from benchmarks.studies.training import Lesson, Point, train

TEST_BATCH = 500
BPTT = 35
MAX_GRAD_NORM = 1.0
TEST_COLUMNS = 10


class PaperLesson(Lesson):
    def __init__(self, run: Run, model: nn.Module, steps: int) -> None:
        """`steps` is how many an epoch has."""
        optimizer = OPTIMIZERS[run.optimizer].build(model.parameters(), run.lr, run.weight_decay)
        super().__init__(model, optimizer, lr_schedule(run, optimizer, steps), [steps] * run.epochs)
        self.run = run
        self.generator.manual_seed(run.seed)

    def weight_decay(self) -> float:
        return adamw_weight_decay(self.optimizer)

    def point(self, is_last: bool) -> Point:
        epoch = self.steps // self.windows[0]
        point = {"epoch": epoch, **super().point(is_last), "test_loss": math.nan, "test_error": math.nan}
        self.model.eval()
        return point | (self.tested() if is_last or epoch % self.run.evaluate_every == 0 else {})

    def tested(self) -> Point:
        raise NotImplementedError


class ImageLesson(PaperLesson):
    def __init__(self, run: Run, data: Tensors, device: torch.device) -> None:
        torch.manual_seed(run.seed)
        model = IMAGE_MODELS[run.model](data.channels, data.classes, data.size)
        model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        super().__init__(run, model, data.train_steps(run.batch_size))
        self.data = data

    def batches(self) -> Iterator[Batch]:
        return self.data.train_batches(self.run.batch_size, self.generator, self.run.augment)

    def loss(self, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

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


class LanguageLesson(PaperLesson):
    """The hidden state is carried from one stretch of text to the next."""

    def __init__(self, run: Run, data: Text, device: torch.device) -> None:
        self.text, self.test_text = both_parts(run, data)
        torch.manual_seed(run.seed)
        model = LANGUAGE_MODELS[run.model](data.vocabulary).to(device)
        super().__init__(run, model, len(list(stretches(self.text))))
        self.model: LanguageModel

    def begin_window(self) -> None:
        super().begin_window()
        self.hidden = self.model.no_hidden(self.run.batch_size, self.text.device)

    def batches(self) -> Iterator[Batch]:
        return stretches(self.text)

    def loss(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        logits, (h, c) = self.model(tokens, self.hidden)
        self.hidden = (h.detach(), c.detach())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def take_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        super().take_step()

    @torch.no_grad()
    def tested(self) -> Point:
        """Returns the mean loss of a word; the perplexity is its exponential."""
        hidden = self.model.no_hidden(self.test_text.shape[1], self.test_text.device)
        loss, count = 0.0, 0
        for tokens, targets in stretches(self.test_text):
            logits, hidden = self.model(tokens, hidden)
            loss += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            count += targets.numel()
        return {"test_loss": loss / count}


def in_columns(tokens: Tensor, columns: int, what: str) -> Tensor:
    """Cuts a text into pieces of equal length, side by side: (time, column)."""
    length = len(tokens) // columns
    if length < 2:
        raise DataError(
            f"{what} has {len(tokens)} words, too short for {columns} columns of at least 2, wanted {2 * columns} "
            "words or more. Replace it by the whole text."
        )
    return tokens[: length * columns].view(columns, length).t().contiguous()


def both_parts(run: Run, data: Text) -> tuple[Tensor, Tensor]:
    """Returns the text for training and the one for testing, in columns."""
    return (
        in_columns(data.train, run.batch_size, f"the training part of {run.data}"),
        in_columns(data.test, TEST_COLUMNS, f"the {run.part} part of {run.data}"),
    )


def stretches(text: Tensor) -> Iterator[Batch]:
    """Yields up to BPTT rows at a time, and for each the row that follows it."""
    for start in range(0, len(text) - 1, BPTT):
        end = min(start + BPTT, len(text) - 1)
        yield text[start:end], text[start + 1 : end + 1]


def lr_schedule(run: Run, optimizer: Optimizer, steps: int) -> LRScheduler:
    if run.cosine:
        first, longer = run.cosine
        return CosineAnnealingWarmRestarts(optimizer, first * steps, longer)
    if run.milestones:
        return MultiStepLR(optimizer, [epoch * steps for epoch in run.milestones], gamma=0.1)
    return LambdaLR(optimizer, lambda step: 1.0)


def lesson_of(run: Run, root: Path | None, device: torch.device) -> ImageLesson | LanguageLesson:
    given = (run.data, root, device, run.limit, run.held_out, run.part)
    if run.model in LANGUAGE_MODELS:
        return LanguageLesson(run, load_text(*given), device)
    return ImageLesson(run, load_images(*given), device)


def trained(run: Run, checkpoint: Checkpoint, root: Path | None, device: str) -> dict[str, Any]:
    lesson = lesson_of(run, root, torch.device(device))
    points = train(lesson, checkpoint)
    return {"run": asdict(run), "points": points}


def check_needs(runs: list[Run], root: Path | None) -> None:
    """Looks for all that runs need before the first of them is trained, which may take days.

    Reads each data set once. Raises DataError for the first that is missing or broken.
    """
    for name in dict.fromkeys(run.data for run in runs if run.model not in LANGUAGE_MODELS):
        check_images(name, root)
    of_text = [run for run in runs if run.model in LANGUAGE_MODELS]
    for run in {(run.data, run.limit, run.held_out, run.part, run.batch_size): run for run in of_text}.values():
        both_parts(run, load_text(run.data, root, torch.device("cpu"), run.limit, run.held_out, run.part))

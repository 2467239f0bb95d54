"""One training run of a language model. Its hidden state is carried from one stretch of text to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from benchmarks.paper.checkpoint import Checkpoint, nothing_kept
from benchmarks.paper.data import DataError, Text, load_text
from benchmarks.paper.data.images import Batch
from benchmarks.paper.epoch import Epoch
from benchmarks.paper.models import LANGUAGE_MODELS
from benchmarks.paper.models.language import LanguageModel
from benchmarks.paper.run import Run
from benchmarks.paper.training import Trained
from benchmarks.paper.training_loop import train

BPTT = 35
MAX_GRAD_NORM = 1.0
TEST_COLUMNS = 10


def in_columns(tokens: Tensor, columns: int, what: str) -> Tensor:
    """(time, column): the text cut into as many pieces of equal length, side by side."""
    length = len(tokens) // columns
    if length < 2:
        raise DataError(
            f"{what} has {len(tokens)} words, too short for {columns} columns of at least 2, wanted {2 * columns} "
            "words or more. Replace it by the whole text."
        )
    return tokens[: length * columns].view(columns, length).t().contiguous()


def both_parts(run: Run, data: Text) -> tuple[Tensor, Tensor]:
    """For training and for testing, in columns."""
    return (
        in_columns(data.train, run.batch_size, f"the training part of {run.data}"),
        in_columns(data.test, TEST_COLUMNS, f"the {run.part} part of {run.data}"),
    )


def stretches(text: Tensor) -> Iterator[Batch]:
    """Up to BPTT rows, and for each the row that follows it."""
    for start in range(0, len(text) - 1, BPTT):
        end = min(start + BPTT, len(text) - 1)
        yield text[start:end], text[start + 1 : end + 1]


class LanguageLesson:
    def __init__(self, run: Run, model: LanguageModel, data: Text, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.batch_size = run.batch_size
        self.text, self.test_text = both_parts(run, data)

    def begin_epoch(self) -> None:
        self.hidden = self.model.no_hidden(self.batch_size, self.device)

    def batches(self) -> Iterator[Batch]:
        return stretches(self.text)

    def loss(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        logits, (h, c) = self.model(tokens, self.hidden)
        self.hidden = (h.detach(), c.detach())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def before_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)

    def test(self, epoch: Epoch) -> None:
        epoch.test_loss = tested(self.model, self.test_text)

    def carried(self) -> dict[str, Any]:
        return {"hidden": list(self.hidden)}

    def carry(self, carried: dict[str, Any]) -> None:
        h, c = carried["hidden"]
        self.hidden = (h.to(self.device), c.to(self.device))


def text_of(run: Run, root: Path | None, device: torch.device) -> Text:
    return load_text(run.data, root, device, run.limit, run.held_out, run.part)


def train_language(
    run: Run,
    root: Path | None,
    device: torch.device,
    after_epoch: Callable[[], None],
    checkpoint: Checkpoint | None = None,
) -> Trained:
    data = text_of(run, root, device)
    torch.manual_seed(run.seed)
    model = LANGUAGE_MODELS[run.model](data.vocabulary).to(device)
    lesson = LanguageLesson(run, model, data, device)
    steps = len(list(stretches(lesson.text)))
    return Trained(train(run, lesson, steps, after_epoch, checkpoint or nothing_kept()), eigenvalues=[])


@torch.no_grad()
def tested(model: LanguageModel, text: Tensor) -> float:
    """Mean loss of a word; the perplexity is its exponential."""
    model.eval()
    hidden = model.no_hidden(text.shape[1], text.device)
    loss, count = 0.0, 0
    for tokens, targets in stretches(text):
        logits, hidden = model(tokens, hidden)
        loss += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        count += targets.numel()
    return loss / count

"""One training run of a language model. Its hidden state is carried from one stretch of text to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from benchmarks.paper.data import DataError, Text, load_text
from benchmarks.paper.models import LANGUAGE_MODELS
from benchmarks.paper.models.language import LanguageModel
from benchmarks.paper.optimizers import OPTIMIZERS
from benchmarks.paper.run import Run
from benchmarks.paper.training import Epoch, EpochMeans, Trained, lr_schedule

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
        in_columns(data.test, TEST_COLUMNS, f"the test part of {run.data}"),
    )


def stretches(text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Up to BPTT rows, and for each the row that follows it."""
    for start in range(0, len(text) - 1, BPTT):
        end = min(start + BPTT, len(text) - 1)
        yield text[start:end], text[start + 1 : end + 1]


def train_language(run: Run, root: Path | None, device: torch.device, after_epoch: Callable[[], None]) -> Trained:
    data = load_text(run.data, root, device, run.limit)
    torch.manual_seed(run.seed)
    model = LANGUAGE_MODELS[run.model](data.vocabulary).to(device)
    optimizer = OPTIMIZERS[run.optimizer].build(model.parameters(), run.lr, run.weight_decay)
    text, test_text = both_parts(run, data)
    schedule = lr_schedule(run, optimizer, steps=len(list(stretches(text))))
    epochs: list[Epoch] = []
    for number in range(1, run.epochs + 1):
        lr = optimizer.param_groups[0]["lr"]
        model.train()
        means = EpochMeans()
        hidden = model.no_hidden(run.batch_size, device)
        for tokens, targets in stretches(text):
            optimizer.zero_grad()
            logits, (h, c) = model(tokens, hidden)
            hidden = (h.detach(), c.detach())
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            means.add(loss, model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
        epoch = means.epoch(number, lr, model, optimizer)
        if number % run.evaluate_every == 0 or number == run.epochs:
            epoch.test_loss = tested(model, test_text)
        epochs.append(epoch)
        after_epoch()
    return Trained(epochs, eigenvalues=[])


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

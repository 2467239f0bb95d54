"""Trains one run and measures it: a row for the CSV file."""

from __future__ import annotations

import hashlib
import math
import subprocess
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from benchmarks.adams_or_adamw.plan import Planned
from benchmarks.adams_or_adamw.rows import packed
from benchmarks.conditions import OtherLoad, conditions
from benchmarks.paper.checkpoint import nothing_kept
from benchmarks.paper.data.images import ImageData, Tensors
from benchmarks.paper.epoch import Epoch
from benchmarks.paper.task import Task
from benchmarks.paper.training import TEST_BATCH, ImageLesson, data_of, new_model
from benchmarks.paper.training_loop import train

CPU = torch.device("cpu")


class PerImageLesson(ImageLesson):
    """Keeps which images were classified correctly."""

    correct: np.ndarray

    def test(self, epoch: Epoch) -> None:
        self.correct, epoch.test_loss = classified(self.model, self.data)
        epoch.test_error = 1 - float(self.correct.mean())


@torch.no_grad()
def classified(model: nn.Module, data: ImageData) -> tuple[np.ndarray, float]:
    """Which images were classified correctly, and the mean loss."""
    model.eval()
    correct, loss = [], 0.0
    for images, labels in data.test_batches(TEST_BATCH):
        logits = model(images)
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        correct.append(logits.argmax(1) == labels)
    whole = torch.cat(correct).numpy()
    return whole, loss / len(whole)


def trained(planned: Planned, task: Task, root: Path | None) -> dict[str, object]:
    other_load, wall, cpu = OtherLoad(), time.perf_counter(), time.process_time()
    run = planned.run(task)
    data = data_of(run, root, CPU)
    assert isinstance(data, Tensors)
    lesson = PerImageLesson(run, new_model(run, data, CPU), data, CPU)
    epochs = train(run, lesson, data.train_steps(run.batch_size), lambda: None, nothing_kept())
    last = epochs[-1]
    measured = {
        "error": last.test_error,
        "train_loss": last.train_loss,
        "loss": last.test_loss,
        "grad_norm": last.grad_norm,
        "total_decay": math.fsum(epoch.summed_decay for epoch in epochs),
        "final_decay": last.adamw_weight_decay,
        "weight_norm": last.weight_norm,
    }
    return {
        "arm": planned.arm,
        "role": planned.role,
        "contender": planned.contender,
        "weight_decay": f"{planned.weight_decay:g}",
        "seed": planned.seed,
        "epochs": run.epochs,
        "batch_size": run.batch_size,
        "train_images": len(data.train_labels),
        "images": len(lesson.correct),
        **{name: f"{value:.6g}" for name, value in measured.items()},
        "cpu_seconds": f"{time.process_time() - cpu:.1f}",
        "wall_seconds": f"{time.perf_counter() - wall:.1f}",
        **conditions(other_load),
        "commit": commit(),
        "data": digest(data),
        "correct": packed(lesson.correct),
    }


def digest(data: Tensors) -> str:
    """Of the images that a run trains on and is tested on."""
    whole = hashlib.sha256()
    for values in (data.train_images, data.train_labels, data.test_images, data.test_labels):
        whole.update(values.contiguous().numpy().tobytes())
    return whole.hexdigest()[:12]


@lru_cache
def commit() -> str:
    """Of the code that runs, or nothing where it is no checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

"""Trains one run and measures it: a row for the CSV file."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.adams_or_adamw.plan import Planned
from benchmarks.conditions import commit
from benchmarks.paper.data.images import Tensors
from benchmarks.paper.training import lesson_of
from benchmarks.studies.training import train

FIELDS = (
    *("arm", "role", "contender", "weight_decay", "seed", "epochs", "batch_size", "train_images", "images"),
    *("error", "train_loss", "loss", "grad_norm", "total_decay", "final_decay", "weight_norm"),
    *("cpu_seconds", "wall_seconds", "threads", "device", "cpu", "cores", "other_load", "huge_pages"),
    *("torch", "swd_fused", "commit", "python", "date", "data", "correct"),
)


def trained(planned: Planned, root: Path | None) -> dict[str, object]:
    cpu, wall = time.process_time(), time.monotonic()
    lesson = lesson_of(planned.run, root, torch.device("cpu"))
    points = train(lesson)
    last = points[-1]
    measured = {
        "error": last["test_error"],
        "train_loss": last["train_loss"],
        "loss": last["test_loss"],
        "grad_norm": last["grad_norm"],
        "total_decay": math.fsum(point["summed_decay"] for point in points),
        "final_decay": last["adamw_weight_decay"],
        "weight_norm": last["weight_norm"],
    }
    return {
        "arm": planned.arm,
        "role": planned.role,
        "contender": planned.contender,
        "weight_decay": f"{planned.weight_decay:g}",
        "seed": planned.seed,
        "epochs": planned.run.epochs,
        "batch_size": planned.run.batch_size,
        "train_images": len(lesson.data.train_labels),
        "images": len(lesson.correct),
        **{name: f"{value:.6g}" for name, value in measured.items()},
        "cpu_seconds": f"{time.process_time() - cpu:.1f}",
        "wall_seconds": f"{time.monotonic() - wall:.1f}",
        "commit": commit(),
        "data": digest(lesson.data),
        "correct": packed(lesson.correct),
    }


def packed(correct: np.ndarray) -> str:
    """The test images that were classified correctly, as bits."""
    return base64.b64encode(np.packbits(correct.astype(np.uint8)).tobytes()).decode()


def unpacked(text: str, count: int) -> np.ndarray:
    """Booleans."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)


def digest(data: Tensors) -> str:
    """Of the images that a run trains on and is tested on."""
    whole = hashlib.sha256()
    for values in (data.train_images, data.train_labels, data.test_images, data.test_labels):
        whole.update(values.contiguous().numpy().tobytes())
    return whole.hexdigest()[:12]

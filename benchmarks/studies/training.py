"""The loop of all training runs. A run is a sequence of windows, such as epochs, and measures something in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

Point = dict[str, Any]


class Lesson:
    """A model in training. Studies say what its batches and its loss are, and add what else they measure."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, lr_schedule: LRScheduler, windows: Sequence[int]
    ) -> None:
        """`lr_schedule` is stepped after each step; `windows` has the steps of each window."""
        self.model, self.optimizer, self.lr_schedule, self.windows = model, optimizer, lr_schedule, windows
        self.steps = 0
        self.generator = torch.Generator()

    def batches(self) -> Iterator[Any]:
        """Yields at least those of one window. Random numbers come from `self.generator`."""
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def weight_decay(self) -> float:
        """Returns the decay of the step just taken, in AdamW's terms."""
        raise NotImplementedError

    def begin_window(self) -> None:
        self.sums: Tensor | None = None  # on the device, read once a window
        self.window_steps = 0
        self.first_lr = float(self.optimizer.param_groups[0]["lr"])
        self.decay, self.summed_decay = float("nan"), 0.0

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        values = torch.stack(self.measured(loss))
        self.sums = values if self.sums is None else self.sums + values
        self.take_step()
        self.decay = self.weight_decay()
        self.summed_decay += float(self.optimizer.param_groups[0]["lr"]) * self.decay
        self.lr_schedule.step()
        self.window_steps += 1
        self.steps += 1

    def measured(self, loss: Tensor) -> list[Tensor]:
        """Returns what is averaged over a window, before the step: loss, gradient norm and its square come first."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return [loss.detach(), norm, norm.square()]

    def take_step(self) -> None:
        self.optimizer.step()

    def means(self) -> list[float]:
        assert self.sums is not None
        values: list[float] = (self.sums / self.window_steps).tolist()
        return values

    def point(self, is_last: bool) -> Point:
        """Returns what the window has measured. `grad_norm` is a mean, in train mode and without regularization."""
        loss, norm, square = self.means()[:3]
        return {
            "step": self.steps,
            "steps": self.window_steps,
            "current_lr": self.first_lr,
            "train_loss": loss,
            "grad_norm": norm,
            "squared_grad_norm": square,
            "adamw_weight_decay": self.decay,
            "weight_norm": float(torch.nn.utils.get_total_norm([p.detach() for p in self.model.parameters()])),
            "summed_decay": self.summed_decay,
        }


def train(lesson: Lesson) -> list[Point]:
    points: list[Point] = []
    for steps in lesson.windows:
        lesson.begin_window()
        lesson.model.train()
        for batch in islice(lesson.batches(), steps):
            lesson.step(batch)
        points.append(lesson.point(len(points) + 1 == len(lesson.windows)))
    return points

"""One training run. All contenders of a seed start from the same weights and see the same batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.training import Lesson, Point, lr_of_steps, train
from benchmarks.which_decay.contenders import BY_NAME
from benchmarks.which_decay.parts import Run
from benchmarks.which_decay.tasks import Sources, Task, task_of


class DecayLesson(Lesson):
    """ "Normed" are the layers that a norm follows, whose norms are measured apart.

    `summed_decay` is the share that decay took from weights; cautious decay took it from some of them only.
    """

    def __init__(self, run: Run, task: Task) -> None:
        torch.manual_seed(run.seed)
        model, schedule = task.model(), run.schedule
        groups = task.groups(model)
        self.task = task
        self.normed = [param[1] if isinstance(param, tuple) else param for param in groups[0]["params"]]
        optimizer = BY_NAME[run.contender].build(groups, schedule.lr, run.decay, task.betas, schedule.warm_up)
        lrs = lr_of_steps(optimizer, lambda step: schedule.at(step) / schedule.lr, schedule.steps)
        super().__init__(model, optimizer, lrs, run.lengths)
        self.generator.manual_seed(run.seed)

    def batches(self) -> Iterator[Any]:
        while True:
            yield self.task.batch(self.generator)

    def loss(self, batch: Any) -> Tensor:
        return self.task.loss(self.model, batch)

    def weight_decay(self) -> float:
        decays: list[float] = self.optimizer.effective_weight_decay()  # type: ignore[attr-defined]
        return decays[0]

    def measured(self, loss: Tensor) -> list[Tensor]:
        return [*super().measured(loss), squared_norm([param.grad for param in self.normed])]

    def point(self, is_last: bool) -> Point:
        point = {
            **super().point(is_last),
            "normed_grad_norm": math.sqrt(self.means()[3]),
            "normed_weight_norm": math.sqrt(squared_norm([param.detach() for param in self.normed]).item()),
        }
        if is_last:
            self.model.eval()
            with torch.no_grad():
                for part in ("validation", "test"):
                    point[f"{part}_loss"] = self.task.held_out_loss(self.model, part)
        return point


def squared_norm(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square().sum()


def trained(run: Run, sources: Sources) -> dict[str, Any]:
    lesson = DecayLesson(run, task_of(run.task, sources))
    points = train(lesson)
    count = sum(param.numel() for param in lesson.model.parameters())
    normed = sum(param.numel() for param in lesson.normed)
    return {"run": asdict(run), "points": points, "parameters": count, "normed_parameters": normed}

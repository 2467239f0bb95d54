"""One training run. All contenders of a seed start from the same weights and see the same batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.studies.training import Lesson, Point, train
from benchmarks.which_decay.contenders import BY_NAME
from benchmarks.which_decay.runs import Run
from benchmarks.which_decay.tasks import Sources, Task, task_of


class DecayLesson(Lesson):
    """ "Normed" are the layers that a norm follows, whose norms are measured apart.

    `summed_decay` is the share that decay took from weights; cautious decay took it from some of them only.
    """

    def __init__(self, run: Run, task: Task) -> None:
        torch.manual_seed(run.seed)
        model, schedule, self.task = task.model(), run.schedule, task
        groups = task.groups(model)
        self.normed = [param[1] if isinstance(param, tuple) else param for param in groups[0]["params"]]
        optimizer = BY_NAME[run.contender].build(groups, schedule.lr, run.decay, task.betas, schedule.warm_up)
        lrs = LambdaLR(optimizer, lambda done: schedule.at(min(done + 1, schedule.steps)) / schedule.lr)
        super().__init__(model, optimizer, lrs, run.windows)
        self.generator.manual_seed(run.seed)

    def batches(self) -> Iterator[Any]:
        while True:
            yield self.task.batch(self.generator)

    def loss(self, batch: Any) -> Tensor:
        return self.task.loss(self.model, batch)

    def weight_decay(self) -> float:
        return float(self.optimizer.effective_weight_decay()[0])  # type: ignore[attr-defined]

    def measured(self, loss: Tensor) -> list[Tensor]:
        return [*super().measured(loss), squared_norm([param.grad for param in self.normed])]

    @torch.no_grad()
    def point(self, is_last: bool) -> Point:
        norms = {"normed_grad_norm": self.means()[3], "normed_weight_norm": squared_norm(self.normed).item()}
        point = super().point(is_last) | {name: math.sqrt(square) for name, square in norms.items()}
        if is_last:
            self.model.eval()
            point |= {f"{part}_loss": self.task.held_out_loss(self.model, part) for part in ("validation", "test")}
        return point


def squared_norm(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square().sum()


def trained(run: Run, sources: Sources) -> dict[str, Any]:
    lesson = DecayLesson(run, task_of(run.task, sources))
    points = train(lesson)
    whole, normed = (sum(p.numel() for p in params) for params in (lesson.model.parameters(), lesson.normed))
    return {"run": asdict(run), "points": points, "parameters": whole, "normed_parameters": normed}

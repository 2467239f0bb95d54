"""One training run. It goes on from a checkpoint as if it had never been interrupted."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from benchmarks.which_decay.contenders import by_name
from benchmarks.which_decay.run import Checkpoint, Point, Run, Trained
from benchmarks.which_decay.tasks import Task
from swd_fused import FusedAdamS


class Window:
    """Sums over the steps of a point."""

    NAMES = ("steps", "loss", "grad_sq", "normed_grad_sq", "shrink")

    def __init__(self) -> None:
        self.sums = dict.fromkeys(self.NAMES, 0.0)

    def add(self, loss: float, optimizer: FusedAdamS, normed: Sequence[Tensor]) -> None:
        """After a step: it leaves gradients as they were."""
        lr = optimizer.param_groups[0]["lr"]
        grads = [param.grad for param in normed]
        added = (
            1.0,
            loss,
            float(optimizer.grad_norm) ** 2,
            sum_of_squares(grads),
            lr * optimizer.effective_weight_decay()[0],
        )
        for name, value in zip(self.NAMES, added, strict=True):
            self.sums[name] += value

    def point(self, step: int, lr: float, model: nn.Module, normed: Sequence[Tensor]) -> Point:
        count = self.sums["steps"]
        return Point(
            step=step,
            steps=int(count),
            lr=lr,
            train_loss=self.sums["loss"] / count,
            grad_norm=math.sqrt(self.sums["grad_sq"] / count),
            normed_grad_norm=math.sqrt(self.sums["normed_grad_sq"] / count),
            weight_norm=math.sqrt(sum_of_squares([param.detach() for param in model.parameters()])),
            normed_weight_norm=math.sqrt(sum_of_squares([param.detach() for param in normed])),
            shrink=self.sums["shrink"],
        )


def sum_of_squares(tensors: Sequence[Tensor | None]) -> float:
    return float(torch.stack(torch._foreach_norm(tensors)).square().sum())


def train(run: Run, task: Task, checkpoint: Checkpoint, after_steps: Callable[[int], None]) -> Trained:
    """`after_steps` is told how many steps have been taken since it was last called."""
    start, schedule = time.perf_counter(), run.schedule
    torch.manual_seed(run.seed)
    model = task.model()
    groups = task.groups(model)
    normed = [param for _, param in named(groups[0]["params"])]
    optimizer = by_name(run.contender).build(groups, schedule.lr, run.decay, task.betas, schedule.warm_up)
    generator = torch.Generator().manual_seed(run.seed)
    window, points, first, seconds, said = Window(), list[Point](), 1, 0.0, list[str]()
    found = checkpoint.load()
    if found is not None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        generator.set_state(found["generator"])
        points = [Point(**point) for point in found["points"]]
        first, seconds, said = found["step"] + 1, found["seconds"], found["warnings"]
        after_steps(found["step"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(first, schedule.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = schedule.at(step)
            optimizer.zero_grad()
            loss = task.loss(model, generator)
            loss.backward()
            optimizer.step()
            window.add(loss.item(), optimizer, normed)
            if step % run.every == 0 or schedule.ends_stage(step):
                points.append(window.point(step, schedule.at(step), model, normed))
                after_steps(points[-1].steps)
                window = Window()
                # Between points only, where there are no sums to save.
                checkpoint.save_if_due(
                    lambda step=step: {  # type: ignore[misc]
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "generator": generator.get_state(),
                        "points": [asdict(point) for point in points],
                        "step": step,
                        "seconds": seconds + time.perf_counter() - start,
                        "warnings": said + [str(warning.message) for warning in caught],
                    }
                )
    model.eval()
    with torch.no_grad():
        return Trained(
            points,
            parameters=sum(param.numel() for param in model.parameters()),
            normed_parameters=sum(param.numel() for param in normed),
            validation_loss=task.held_out_loss(model, "validation"),
            test_loss=task.held_out_loss(model, "test"),
            seconds=round(seconds + time.perf_counter() - start, 2),
            warnings=said + [str(warning.message) for warning in caught],
        )


def named(params: Sequence[Tensor | tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [param if isinstance(param, tuple) else ("", param) for param in params]

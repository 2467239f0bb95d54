"""Times `optimizer.step()` inside training loops: new gradients and a learning-rate scheduler in each step, and caches
as cold as a forward and a backward pass leave them. Hot loops over `step` alone flatter whoever keeps more from step to
step. Each step is compared with its peer's, alone and as a part of the whole training step, in which forward and
backward take as long for all: their difference would be smaller than their noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.arguments import positive
from benchmarks.conditions import conditions, write_rows
from benchmarks.other_load import OtherLoad, warn_of_other_load
from benchmarks.small_models import SmallGPT, SmallResNet
from benchmarks.timing import WARM_UP_ROUNDS, Quartiles, interleaved_order
from swd_fused import FusedAdamS

STEPS_IN_A_ROW = 5  # of which the first, which finds the caches as another contender left them, is not counted
MAX_GRAD_NORM = 1.0
CLIPPED_PEER = "clip_grad_norm_ + AdamW fused"
LEAST_REPEATS = 5

Row = dict[str, Any]


Loss = Callable[[], Tensor]


def squared(model: nn.Module, batch: Callable[[], Tensor]) -> tuple[nn.Module, Loss]:
    return model, lambda: model(batch()).square().mean()


def mlp() -> tuple[nn.Module, Loss]:
    layers = [nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6)]
    return squared(nn.Sequential(*layers), lambda: torch.randn(64, 17))


def cnn() -> tuple[nn.Module, Loss]:
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10)]
    return squared(nn.Sequential(*layers), lambda: torch.randn(64, 1, 8, 8))


def gpt() -> tuple[nn.Module, Loss]:
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(192, 6, 768, **options) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(512, 192), *blocks, nn.Linear(192, 512))
    return squared(model, lambda: torch.randint(0, 512, (8, 64)))


def resnet() -> tuple[nn.Module, Loss]:
    model, generator = SmallResNet(), torch.Generator().manual_seed(0)
    return model, lambda: model.loss(model.batch(32, generator))


def large_gpt() -> tuple[nn.Module, Loss]:
    """With few tokens for its size, 512: a larger batch would hide the optimizer."""
    model, generator = SmallGPT(vocabulary=8192, width=512, layers=8), torch.Generator().manual_seed(0)
    return model, lambda: model.loss(model.batch(4, generator))


MODELS = {"MLP": mlp, "CNN": cnn, "ResNet": resnet, "GPT": gpt, "large GPT": large_gpt}


@dataclass(frozen=True)
class Contender:
    name: str
    build: Callable[[Iterable[Tensor]], Optimizer]
    peer: str
    clips_before: bool = False


CONTENDERS = (
    Contender("AdamW fused", lambda params: AdamW(params, fused=True), "AdamW fused"),
    Contender("exact", FusedAdamS, "AdamW fused"),
    Contender("lagged", lambda params: FusedAdamS(params, schedule="lagged"), "AdamW fused"),
    Contender(CLIPPED_PEER, lambda params: AdamW(params, fused=True), CLIPPED_PEER, clips_before=True),
    Contender(
        "exact with clipping",
        lambda params: FusedAdamS(params, max_grad_norm=MAX_GRAD_NORM),
        CLIPPED_PEER,
    ),
)


class Loop:
    """A model in training."""

    def __init__(self, contender: Contender, make: Callable[[], tuple[nn.Module, Loss]]) -> None:
        torch.manual_seed(0)
        self._model, self._loss = make()
        self._clips_before = contender.clips_before
        self._optimizer = contender.build(list(self._model.parameters()))
        self._scheduler = CosineAnnealingLR(self._optimizer, 10**6)
        self.size = sum(param.numel() for param in self._model.parameters())

    def seconds(self) -> tuple[float, float]:
        """Takes a training step and returns how long forward with backward took, and how long the optimizer."""
        self._optimizer.zero_grad()
        start = perf_counter()
        self._loss().backward()
        before = perf_counter()
        if self._clips_before:
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        end = perf_counter()
        self._scheduler.step()
        return before - start, end - before


def measure(name: str, repeats: int, budget: float, threads: int, progress: Progress) -> list[Row]:
    torch.set_num_threads(threads)
    loops = {contender.name: Loop(contender, MODELS[name]) for contender in CONTENDERS}
    times: dict[str, list[float]] = {contender.name: [] for contender in CONTENDERS}
    forward_backward: list[float] = []
    task = progress.add_task(f"{name}, {threads} threads", total=repeats + WARM_UP_ROUNDS)
    other_load = OtherLoad()
    begin = perf_counter()
    for repetition in range(-WARM_UP_ROUNDS, repeats):
        if repetition >= LEAST_REPEATS and perf_counter() - begin > budget:
            repeats = repetition
            progress.update(task, completed=repeats + WARM_UP_ROUNDS, total=repeats + WARM_UP_ROUNDS)
            break
        for contender in interleaved_order(CONTENDERS, repetition):
            seconds = [loops[contender.name].seconds() for _ in range(STEPS_IN_A_ROW)]
            if repetition >= 0:
                times[contender.name] += [optimizer for _, optimizer in seconds[1:]]
                forward_backward += [other for other, _ in seconds[1:]]
        progress.advance(task)
    found = {contender: Quartiles.of(values) for contender, values in times.items()}
    rest = Quartiles.of(forward_backward).median
    shared = conditions(other_load)
    result = []
    for contender in CONTENDERS:
        own, peer = found[contender.name], found[contender.peer].median
        result.append(
            {
                "model": name,
                "parameters": loops[contender.name].size,
                "contender": contender.name,
                "repeats": repeats,
                "median_s": own.median,
                "q1_s": own.q1,
                "q3_s": own.q3,
                "forward_backward_s": rest,
                "peer": contender.peer,
                "ratio": own.median / peer,
                "whole_ratio": (rest + own.median) / (rest + peer),
                **shared,
            }
        )
    return result


def table(rows: Sequence[Row]) -> Table:
    result = Table(
        title="Time of a step in training loops relative to its peer, alone and with forward and backward",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for heading in ("model", "threads", "AdamW fused", "exact", "lagged", "exact with clipping"):
        result.add_column(heading, no_wrap=True)
    for first in rows[:: len(CONTENDERS)]:
        same = [row for row in rows if (row["model"], row["threads"]) == (first["model"], first["threads"])]
        by_name = {row["contender"]: row for row in same}
        named = [by_name[name] for name in ("exact", "lagged", "exact with clipping")]
        figures = [f"{row['ratio']:.2f}, {100 * (row['whole_ratio'] - 1):+.2f}%" for row in named]
        model = f"{first['model']}, {first['parameters']:,}"
        times = f"{1e3 * first['median_s']:.3g} of {1e3 * (first['forward_backward_s'] + first['median_s']):.3g} ms"
        result.add_row(model, str(first["threads"]), times, *figures)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_loops", description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument("--threads", type=positive, action="append", help="default: 1 and 2")
    parser.add_argument("--repeats", type=positive, default=41, help="rounds of each model; default: %(default)s")
    parser.add_argument(
        "--budget",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help=f"for the rounds of one model, of which there are fewer then, but {LEAST_REPEATS}; default: %(default)s",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/training_loops"), metavar="DIR", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True) as progress:
        for threads in options.threads or (1, 2):
            for model in options.model or MODELS:
                rows += measure(model, options.repeats, options.budget, threads, progress)
    console.print(table(rows))
    warn_of_other_load(console, max(row["other_load"] or 0.0 for row in rows))
    csv_path = options.out / "training_loops.csv"
    write_rows(csv_path, rows)
    console.print(f"Wrote {csv_path}", soft_wrap=True)


if __name__ == "__main__":
    main()

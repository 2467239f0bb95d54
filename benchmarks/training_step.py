"""A whole training step: the optimizer's share of it, and what AdamS adds to it over AdamW.

Every optimizer trains its own copy of the model on the same random batches, and they take turns. Forward with backward
is timed apart from the optimizer, since the difference between two optimizers is smaller than the noise of the former:

    added = (optimizer - AdamW) / (forward and backward + AdamW)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.conditions import conditions, write_rows
from benchmarks.contenders import CLIPPED_PEER, CONTENDERS, PEER, Contender, Step
from benchmarks.other_load import OtherLoad, warn_of_other_load
from benchmarks.small_models import SmallGPT, SmallResNet
from benchmarks.timing import WARM_UP_ROUNDS, Quartiles, interleaved_order, milliseconds, timed

Row = dict[str, Any]

COMPARED = (PEER, "FusedAdamS exact (cpu)", CLIPPED_PEER, "FusedAdamS exact + clip (cpu)")


@dataclass(frozen=True)
class Workload:
    build: Callable[[], SmallGPT | SmallResNet]
    batch_size: int


WORKLOADS = {
    "small-gpt": Workload(SmallGPT, batch_size=8),
    "small-resnet": Workload(SmallResNet, batch_size=32),
}


class Trainee:
    """One optimizer with its copy of the model, and the seconds that its steps took."""

    def __init__(self, contender: Contender, model: SmallGPT | SmallResNet) -> None:
        self.contender = contender
        self.model = model
        self.step: Step = contender.build(list(model.parameters()))
        self.forward_backward_seconds: list[float] = []
        self.optimizer_seconds: list[float] = []

    def train(self, batch: Any) -> None:
        self.model.zero_grad()
        self.forward_backward_seconds.append(timed(lambda: self.model.loss(batch).backward()))
        self.optimizer_seconds.append(timed(self.step))

    def forget_warm_up(self) -> None:
        self.forward_backward_seconds.clear()
        self.optimizer_seconds.clear()


def measure(name: str, workload: Workload, repeats: int, progress: Progress) -> list[Row]:
    torch.manual_seed(0)
    model = workload.build()
    generator = torch.Generator().manual_seed(1)
    trainees = [Trainee(c, deepcopy(model)) for c in CONTENDERS if c.name in COMPARED]
    task = progress.add_task(name, total=repeats + WARM_UP_ROUNDS)
    other_load = OtherLoad()
    for repetition in range(-WARM_UP_ROUNDS, repeats):
        if repetition == 0:
            for trainee in trainees:
                trainee.forget_warm_up()
        batch = model.batch(workload.batch_size, generator)
        for trainee in interleaved_order(trainees, repetition):
            trainee.train(batch)
        progress.advance(task)
    return rows(name, workload, model, trainees, repeats, conditions(other_load))


def rows(
    name: str,
    workload: Workload,
    model: SmallGPT | SmallResNet,
    trainees: Sequence[Trainee],
    repeats: int,
    shared: dict[str, object],
) -> list[Row]:
    parameters = list(model.parameters())
    by_name = {trainee.contender.name: trainee for trainee in trainees}
    forward_backward = Quartiles.of([s for trainee in trainees for s in trainee.forward_backward_seconds])
    result = []
    for trainee in trainees:
        peer = by_name[trainee.contender.peer]
        optimizer, peer_median = Quartiles.of(trainee.optimizer_seconds), Quartiles.of(peer.optimizer_seconds).median
        whole = forward_backward.median + peer_median
        # Both optimizers of a repetition ran within moments of each other, so their difference is steadier than either.
        pairs = zip(trainee.optimizer_seconds, peer.optimizer_seconds, strict=True)
        paired = Quartiles.of([(own - other) / whole for own, other in pairs])
        result.append(
            {
                "model": name,
                "contender": trainee.contender.name,
                "peer": trainee.contender.peer,
                "elements": sum(parameter.numel() for parameter in parameters),
                "tensors": len(parameters),
                "dtype": str(parameters[0].dtype).removeprefix("torch."),
                "batch_size": workload.batch_size,
                "repeats": repeats,
                "forward_backward_median_s": forward_backward.median,
                "forward_backward_q1_s": forward_backward.q1,
                "forward_backward_q3_s": forward_backward.q3,
                "optimizer_median_s": optimizer.median,
                "optimizer_q1_s": optimizer.q1,
                "optimizer_q3_s": optimizer.q3,
                "optimizer_share": optimizer.median / (forward_backward.median + optimizer.median),
                "added": (optimizer.median - peer_median) / whole,
                "added_q1": paired.q1,
                "added_q3": paired.q3,
                **shared,
            }
        )
    return result


def table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    forward_backward = " - ".join(milliseconds(first[f"forward_backward_{q}_s"]) for q in ("q1", "q3"))
    title = (
        f"{first['model']}: {first['elements']:,} parameters in {first['tensors']} tensors, batches of "
        f"{first['batch_size']}, {first['repeats']} repeats\nforward and backward "
        f"{milliseconds(first['forward_backward_median_s'])} ms, quartiles {forward_backward}"
    )
    caption = "added: to the whole step, over AdamW fused, clipped over AdamW fused + clip_grad_norm_"
    result = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    result.pad_edge, result.collapse_padding = False, True
    result.add_column("optimizer", no_wrap=True)
    for heading in ("ms", "quartiles", "share", "added %", "quartiles"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        median, q1, q3 = (milliseconds(row[f"optimizer_{key}_s"]) for key in ("median", "q1", "q3"))
        added = tuple(f"{100 * row[key]:+.2f}" for key in ("added", "added_q1", "added_q3"))
        columns = ("", "") if row["contender"] == row["peer"] else (added[0], f"{added[1]}, {added[2]}")
        result.add_row(row["contender"], median, f"{q1} - {q3}", f"{row['optimizer_share']:.1%}", *columns)
    return result


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.training_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--model", action="append", choices=list(WORKLOADS), help="repeatable; default: all")
    result.add_argument("--repeats", type=positive, default=40, help="default: %(default)s")
    result.add_argument("--threads", type=positive, default=2, help="default: %(default)s")
    out = Path("results/training_step")
    result.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: %(default)s")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    result: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for name in options.model or WORKLOADS:
            model_rows = measure(name, WORKLOADS[name], options.repeats, progress)
            progress.console.print(table(model_rows))
            warn_of_other_load(console, model_rows[0]["other_load"])
            result += model_rows
    csv_path = options.out / "training_step.csv"
    write_rows(csv_path, result)
    console.print(f"Wrote {csv_path}", soft_wrap=True)


if __name__ == "__main__":
    main()

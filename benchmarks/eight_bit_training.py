"""Training with moments in 8 bits: a small convolutional net and a small GPT, with FusedAdamS and with its peers.

All contenders of a seed start from the same weights and see the same batches, with the same hyper-parameters. Each is
compared with its own float32 reference: FusedAdamS's kinds with FusedAdamS, the packages, which have AdamW only, with
torch's AdamW at a constant weight decay of about the same size. The second moments that are stored are compared with
float32 ones that get the gradients of the same run. One more run in float32, from weights that are moved by a
millionth, shows how far runs part that differ by rounding alone.

Takes about 25 minutes on two cores. Needs scikit-learn; peers take part where they are installed:
pip install bitsandbytes torchao
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from benchmarks.conditions import OtherLoad, conditions, positive, read_rows, write_rows
from benchmarks.eight_bit_contenders import BETAS, CONTENDERS, Contender, Optimizer, by_name
from benchmarks.eight_bit_findings import Row, findings, markdown, table, verdict
from benchmarks.eight_bit_tasks import TASKS, task_of

Run = tuple[str, str, int, int]  # task, contender, seed, steps

LAST = 50  # steps over which the final training loss is averaged
WARM_UP = 40
LAST_LR = 0.05  # of the largest, at the end of a cosine


def lr_at(step: int, steps: int, largest: float) -> float:
    cosine = (1 + math.cos(math.pi * (step - 1) / steps)) / 2
    return largest * min(1.0, step / WARM_UP) * (LAST_LR + (1 - LAST_LR) * cosine)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, which is compiled
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


@dataclass
class Watch:
    """Follows a run: float32 second moments from the same gradients, and the largest update."""

    contender: Contender
    optimizer: Optimizer
    params: list[Tensor]
    weight_decay: float  # AdamW's

    def __post_init__(self) -> None:
        self.shadow = [torch.zeros_like(param) for param in self.params]
        self.numel = sum(param.numel() for param in self.params)
        self.largest_update = 0.0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        before = [param.detach().clone() for param in self.params]
        grads = [param.grad for param in self.params]
        torch._foreach_mul_(self.shadow, BETAS[1])
        torch._foreach_addcmul_(self.shadow, grads, grads, value=1 - BETAS[1])
        self.optimizer.step()
        scheduled = hasattr(self.optimizer, "effective_weight_decay")
        decay = self.optimizer.effective_weight_decay()[0] if scheduled else self.weight_decay
        torch._foreach_mul_(before, 1 - lr * decay)
        moved = max(norm.item() for norm in torch._foreach_norm(torch._foreach_sub(before, self.params), math.inf))
        self.largest_update = max(self.largest_update, moved / lr)

    @torch.no_grad()
    def deviations(self, step: int) -> tuple[float, float]:
        """Returns how much larger than in float32 the sum of the stored second moments is, and the schedule's mean.

        AdamW has no schedule: there the mean is that of what is stored.
        """
        shadow = sum(moment.sum(dtype=torch.float64).item() for moment in self.shadow)
        stored = (self.contender.second_moment(self.optimizer, param) for param in self.params)
        of_sum = sum(moment.sum(dtype=torch.float64).item() for moment in stored) / shadow - 1
        if not hasattr(self.optimizer, "exp_avg_sq_mean"):
            return of_sum, of_sum
        return of_sum, float(self.optimizer.exp_avg_sq_mean) * (1 - BETAS[1] ** step) * self.numel / shadow - 1


def run(task_name: str, contender_name: str, seed: int, steps: int, every: int) -> tuple[Row, list[Row]]:
    """Trains once. Returns the run's row, and its curves."""
    other_load = OtherLoad()
    task, contender = task_of(task_name), by_name(contender_name)
    torch.manual_seed(seed)
    model = task.model()
    params = list(model.parameters())
    if contender.move_start:
        with torch.no_grad():
            for param in params:
                param.mul_(1 + contender.move_start * torch.randn_like(param))
    watch = Watch(contender, contender.build(params, task.decays), list(params), task.decays[1])
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    curves: list[Row] = []
    own = {"task": task_name, "contender": contender_name, "seed": seed}
    for step in range(1, steps + 1):
        lr = lr_at(step, steps, task.lr)
        set_lr(watch.optimizer, lr)
        model.zero_grad()
        loss = task.loss(model, generator)
        loss.backward()
        watch.step(lr)
        losses.append(loss.item())
        if step % every == 0 or step == steps:
            of_sum, of_mean = watch.deviations(step)
            mean_loss = fmean(losses[-every:])
            curves.append({**own, "step": step, "train_loss": mean_loss, "sum_of_v": of_sum, "mean_of_v": of_mean})
    model.eval()
    with torch.no_grad():
        held_out_loss, held_out_accuracy = task.held_out(model)
    row = {
        **own,
        "steps": steps,
        "parameters": watch.numel,
        "train_loss": fmean(losses[-LAST:]),
        "held_out_loss": held_out_loss,
        "held_out_accuracy": held_out_accuracy,
        "sum_of_v": curves[-1]["sum_of_v"],
        "mean_of_v_rms": math.sqrt(fmean(point["mean_of_v"] ** 2 for point in curves)),
        "largest_update": watch.largest_update,
        "lr": task.lr,
        "adams_weight_decay": task.decays[0],
        "adamw_weight_decay": task.decays[1],
        **conditions(other_load),
    }
    return row, curves


def start_worker(threads: int) -> None:
    warnings.simplefilter("ignore")  # what peers and the compiler have to say
    os.environ.setdefault("TORCH_LOGS", "-all")
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Store:
    """The two CSV files. Each run is written when it ends, so that what was interrupted can be continued."""

    path: Path

    @property
    def curves_path(self) -> Path:
        return self.path.with_name(self.path.stem + "_curves.csv")

    def read(self) -> dict[Run, tuple[Row, list[Row]]]:
        if not self.path.exists():
            return {}
        curves = read_rows(self.curves_path)
        return {
            run_of(row): (dict(row), [dict(point) for point in curves if run_of(point)[:3] == run_of(row)[:3]])
            for row in read_rows(self.path)
        }

    def write(self, runs: Iterable[tuple[Row, list[Row]]]) -> list[Row]:
        """Sorts by task, contender and seed, whichever came first. Returns the rows."""
        names = [contender.name for contender in CONTENDERS]
        in_order = sorted(runs, key=lambda r: (r[0]["task"], names.index(r[0]["contender"]), int(r[0]["seed"])))
        rows = [row for row, _ in in_order]
        write_rows(self.path, rows)
        write_rows(self.curves_path, [point for _, curves in in_order for point in curves])
        return rows


def run_of(row: Mapping[str, Any]) -> Run:
    return row["task"], row["contender"], int(row["seed"]), int(row.get("steps", 0))


def run_all(
    runs: Sequence[Run],
    store: Store,
    kept: dict[Run, tuple[Row, list[Row]]],
    options: argparse.Namespace,
    console: Console,
) -> list[Row]:
    """Runs in processes of their own, since the models are too small for several threads each."""
    wanted = {key[:3] for key in runs}
    results = {key: pair for key, pair in kept.items() if key in runs or key[:3] not in wanted}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool = ProcessPoolExecutor(
        options.jobs, multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(options.threads,)
    )
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress, pool:
        missing = [key for key in runs if key not in results]
        bar = progress.add_task("runs", total=len(runs), completed=len(runs) - len(missing))
        futures = {pool.submit(run, *key, options.every): key for key in missing}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            store.write(results.values())
            progress.advance(bar)
    return store.write(results.values())


# --- The command


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.eight_bit_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--task", action="append", choices=list(TASKS), help="repeatable; default: all")
    result.add_argument(
        "--contender",
        action="append",
        metavar="TEXT",
        help="those with TEXT in their name, and their references; repeatable. Default: all but other ways to round "
        'the codes, which --contender "codes of 8bit" brings',
    )
    result.add_argument("--seeds", type=positive, default=3, help="default: %(default)s")
    result.add_argument("--steps", type=positive, help="default: 1500 for the cnn, 1000 for the gpt")
    result.add_argument("--every", type=positive, default=25, help="steps between points of curves, default: 25")
    result.add_argument("--jobs", type=positive, default=2, help="runs at a time, default: %(default)s")
    result.add_argument("--threads", type=positive, default=1, help="of each run, default: %(default)s")
    result.add_argument("--keep", action="store_true", help="all runs that DIR has, and make only what is missing")
    result.add_argument("--quick", action="store_true", help="a few steps of each, to see that it works")
    result.add_argument(
        "--out", type=Path, default=Path("results/eight_bit_training"), metavar="DIR", help="default: %(default)s"
    )
    return result


def selected(texts: Sequence[str] | None) -> list[Contender]:
    chosen = [c for c in CONTENDERS if (c.by_default if not texts else any(text in c.name for text in texts))]
    if not chosen:
        raise ValueError(f"No contender's name contains {' or '.join(texts or ())}.")
    needed = {c.name for c in chosen} | {c.reference for c in chosen}
    return [c for c in CONTENDERS if c.name in needed]


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    try:
        contenders = selected(options.contender)
    except ValueError as error:
        command.error(str(error))
    console = Console(width=None if sys.stdout.isatty() else 160)
    for contender in contenders:
        if not contender.installed:
            console.print(f"Without {contender.name}. To compare: pip install {contender.package}", soft_wrap=True)
    tasks = options.task or list(TASKS)
    runs = [
        (task, c.name, seed, TASKS[task].quick_steps if options.quick else options.steps or TASKS[task].steps)
        for task in tasks
        for seed in range(options.seeds)
        for c in contenders
        if c.installed
    ]
    store = Store(options.out / "eight_bit_training.csv")
    rows = run_all(runs, store, store.read() if options.keep else {}, options, console)
    found = list(findings(rows))
    for task in tasks:
        console.print(table(task, found, rows))
    for line in (
        "sum of v: what is stored against float32 for the same gradients, after the last step",
        "spread: standard deviation of the reference's loss over its seeds; differences are of means",
    ):
        console.print(line, highlight=False)
    for finding in found:
        if finding.contender != finding.reference:
            console.print(verdict(finding), soft_wrap=True, highlight=False)
    (options.out / "eight_bit_training.md").write_text(markdown(rows))
    from benchmarks.plot_eight_bit_training import plot

    console.print(f"Wrote {store.path}, {store.curves_path} and {plot(store.path)}", soft_wrap=True)


if __name__ == "__main__":
    main()

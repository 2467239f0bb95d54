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
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.arguments import positive
from benchmarks.conditions import conditions, read_rows, write_rows
from benchmarks.eight_bit_contenders import BETAS, CONTENDERS, Contender, Decays, Optimizer, by_name
from benchmarks.other_load import OtherLoad
from benchmarks.small_models import SmallGPT

Row = dict[str, Any]
Run = tuple[str, str, int, int]  # task, contender, seed, steps

LAST = 50  # steps over which the final training loss is averaged
WARM_UP = 40
LAST_LR = 0.05  # of the largest, at the end of a cosine


class Task(Protocol):
    steps: int
    quick_steps: int
    lr: float
    decays: Decays

    def model(self) -> nn.Module: ...

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor: ...

    def held_out(self, model: nn.Module) -> tuple[float, float]:
        """Returns loss and accuracy."""


class NoisyDigits:
    """scikit-learn's digits with noise added to each batch, so that 1,347 images cannot be learnt by heart."""

    steps, quick_steps = 1500, 6
    lr, batch_size, noise = 1e-3, 64, 1.0
    decays = (5e-4, 0.12)

    def __init__(self) -> None:
        from benchmarks.demo import digits

        self.data = digits()

    def model(self) -> nn.Module:
        from benchmarks.demo import convolutional_net

        return convolutional_net()

    def noisy(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return images + self.noise * torch.randn(images.shape, generator=generator)

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(self.data.train_labels), (self.batch_size,), generator=generator)
        images = self.noisy(self.data.train_images[chosen], generator)
        return cross_entropy(model(images), self.data.train_labels[chosen])

    def held_out(self, model: nn.Module) -> tuple[float, float]:
        labels = self.data.test_labels.repeat(8)
        images = self.noisy(self.data.test_images.repeat(8, 1, 1, 1), torch.Generator().manual_seed(1))
        logits = model(images)
        return cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()


class Characters:
    """The characters of Python's standard library, of which the last tenth is held out."""

    steps, quick_steps = 1000, 4
    lr, batch_size, context = 2e-3, 8, 64
    decays = (3e-5, 0.025)
    most = 4_000_000

    def __init__(self) -> None:
        text = "".join(
            path.read_text(encoding="utf-8", errors="ignore")
            for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        )
        printable = bytes(
            code for code in text[: self.most].encode("ascii", "ignore") if code == 10 or 32 <= code < 127
        )
        codes, tokens = torch.frombuffer(bytearray(printable), dtype=torch.uint8).unique(return_inverse=True)
        self.vocabulary = len(codes)
        held_out = len(tokens) // 10
        self.train_tokens, self.held_out_tokens = tokens[:-held_out], tokens[-held_out:]

    def model(self) -> nn.Module:
        return SmallGPT(self.vocabulary, self.context, width=144, layers=4)

    def batch(self, tokens: Tensor, size: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(tokens) - self.context, (size, 1), generator=generator)
        return tokens[starts + torch.arange(self.context + 1)]

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        loss: Tensor = model.loss(self.batch(self.train_tokens, self.batch_size, generator))  # type: ignore[operator]
        return loss

    def held_out(self, model: nn.Module) -> tuple[float, float]:
        tokens = self.batch(self.held_out_tokens, 256, torch.Generator().manual_seed(1))
        logits = model.logits(tokens[:, :-1])  # type: ignore[operator]
        accuracy = (logits.argmax(-1) == tokens[:, 1:]).double().mean()
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item(), accuracy.item()


TASKS: dict[str, type[Task]] = {"cnn": NoisyDigits, "gpt": Characters}


@lru_cache
def task_of(name: str) -> Task:
    return TASKS[name]()


# --- A run


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
    results = {key: kept[key] for key in runs if key in kept}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool = ProcessPoolExecutor(
        options.jobs, multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(options.threads,)
    )
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress, pool:
        bar = progress.add_task("runs", total=len(runs), completed=len(results))
        futures = {pool.submit(run, *key, options.every): key for key in runs if key not in results}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            store.write(results.values())
            progress.advance(bar)
    return store.write(results.values())


# --- What was found


@dataclass(frozen=True)
class Finding:
    """A contender in a task, over its seeds. `difference` is from the reference's run of the same seed."""

    task: str
    contender: str
    reference: str
    train_loss: tuple[float, float]
    difference: tuple[float, float]
    held_out_loss: tuple[float, float]
    held_out_difference: tuple[float, float]
    accuracy: float
    sum_of_v: float
    mean_of_v_rms: float
    largest_update: float
    spread: float
    held_out_spread: float

    @property
    def no_worse(self) -> bool:
        """Whether no loss is higher than the reference's by more than the reference's seeds deviate."""
        return self.difference[0] <= self.spread and self.held_out_difference[0] <= self.held_out_spread


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def findings(rows: Sequence[Row]) -> Iterator[Finding]:
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        for name in dict.fromkeys(row["contender"] for row in of_task):
            reference = by_name(name).reference
            own, others = ({int(r["seed"]): r for r in of_task if r["contender"] == n} for n in (name, reference))

            def values(column: str, runs: dict[int, Row]) -> list[float]:
                return [float(runs[seed][column]) for seed in sorted(runs)]

            def differences(column: str, own: dict[int, Row] = own, others: dict[int, Row] = others) -> list[float]:
                return [float(own[seed][column]) - float(others[seed][column]) for seed in sorted(own)]

            yield Finding(
                task,
                name,
                reference,
                mean_and_deviation(values("train_loss", own)),
                mean_and_deviation(differences("train_loss")),
                mean_and_deviation(values("held_out_loss", own)),
                mean_and_deviation(differences("held_out_loss")),
                fmean(values("held_out_accuracy", own)),
                fmean(values("sum_of_v", own)),
                math.sqrt(fmean(value**2 for value in values("mean_of_v_rms", own))),
                max(values("largest_update", own)),
                mean_and_deviation(values("train_loss", others))[1],
                mean_and_deviation(values("held_out_loss", others))[1],
            )


def compared(difference: float, spread: float) -> str:
    if abs(difference) <= spread:
        return "within the spread"
    return "lower by more than the spread" if difference < 0 else "HIGHER by more than the spread"


def verdict(finding: Finding) -> str:
    if not finding.spread:
        return f"{finding.task}: {finding.contender} is not judged: one seed has no spread."
    losses = (
        ("training", finding.difference[0], finding.spread),
        ("held-out", finding.held_out_difference[0], finding.held_out_spread),
    )
    said = (f"{kind} loss {value:+.4f}, {compared(value, spread)} of {spread:.4f}" for kind, value, spread in losses)
    judged = "no worse" if finding.no_worse else "WORSE"
    return f"{finding.task}: {finding.contender} is {judged} than {finding.reference}: {'; '.join(said)}"


HEADINGS = (
    "train loss",
    "difference",
    "held-out loss",
    "accuracy",
    "sum of v",
    "mean of v, rms",
    "largest update / lr",
)


def cells(finding: Finding) -> list[str]:
    is_reference = finding.contender == finding.reference
    return [
        "{:.4f} ± {:.4f}".format(*finding.train_loss),
        "" if is_reference else "{:+.4f} ± {:.4f}".format(*finding.difference),
        "{:.4f} ± {:.4f}".format(*finding.held_out_loss),
        f"{finding.accuracy:.2%}",
        f"{finding.sum_of_v:+.2%}",
        f"{finding.mean_of_v_rms:.2%}",
        f"{finding.largest_update:,.1f}" if finding.largest_update < 100 else f"{finding.largest_update:,.0f}",
    ]


def table(task: str, found: Sequence[Finding], rows: Sequence[Row]) -> Table:
    first = next(row for row in rows if row["task"] == task)
    seeds = len({row["seed"] for row in rows})
    title = f"{task}: {int(first['parameters']):,} parameters, {first['steps']} steps, {seeds} seeds (mean ± deviation)"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    result.add_column("contender", no_wrap=True)
    for heading in HEADINGS:
        result.add_column(heading, justify="right")
    for finding in found:
        if finding.task == task:
            result.add_row(finding.contender, *cells(finding))
    return result


def markdown(rows: Sequence[Row]) -> str:
    """Returns the tables as the documentation has them."""
    lines: list[str] = []
    found = list(findings(rows))
    for task in dict.fromkeys(finding.task for finding in found):
        lines += [f"| {task} | " + " | ".join(HEADINGS) + " |", "|---|" + "---|" * len(HEADINGS)]
        lines += [f"| {each.contender} | " + " | ".join(cells(each)) + " |" for each in found if each.task == task]
        lines.append("")
    return "\n".join(lines)


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
    result.add_argument("--keep", action="store_true", help="runs that DIR has already, and make only what is missing")
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
    console = Console()
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

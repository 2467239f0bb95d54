"""A small convolutional net on scikit-learn's digits, trained by FusedAdamS and by AdamW side by side.

Both start from the same weights and see the same batches. Each batch steps both, in alternating order, so that
whatever else the machine does meets both step times alike. Settings are the paper's: lr 1e-3, divided by 10 at 40%
and at 80% of training (epochs 80 and 160 of 200 on CIFAR-10), and weight decay 5e-4 for AdamS.

Decay by itself changes the training loss and the gradient norm, so the two are compared at equal total decay: AdamW's
default is what FusedAdamS decays over 30 epochs, in AdamW's terms. The paper's own choice for AdamW, 5e-4 / lr = 0.5,
decays 2.6 times as much in so short a run. The table shows how much each decayed.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import MultiStepLR

from benchmarks.demo_plot import draw
from swd_fused import FusedAdamS, __version__

LR = 1e-3
ADAMS_WEIGHT_DECAY = 5e-4
ADAMW_WEIGHT_DECAY = 0.19  # as much in total as FusedAdamS's over the default 30 epochs
MILESTONES = (0.4, 0.8)
TRAIN_SIZE = 1347


@dataclass(frozen=True)
class Digits:
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(self, batch_size: int, shuffle: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole batches only: BatchNorm over the few images left would make gradients several times as large."""
        order = torch.randperm(len(self.train_labels), generator=shuffle)
        whole = len(order) // batch_size * batch_size
        for indices in order[:whole].split(batch_size):
            yield self.train_images[indices], self.train_labels[indices]


def digits() -> Digits:
    """Images of 8 by 8 pixels, a quarter of them to test with: the same split whatever the seed of the run."""
    pixels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        pixels, labels, train_size=TRAIN_SIZE, random_state=0, stratify=labels
    )
    mean, std = train.mean(), train.std()

    def images(pixels: Any) -> Tensor:
        return torch.tensor((pixels - mean) / std, dtype=torch.float32).reshape(-1, 1, 8, 8)

    return Digits(images(train), torch.tensor(train_labels), images(test), torch.tensor(test_labels))


def convolutional_net() -> nn.Sequential:
    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *convolution(1, 32),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        *convolution(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def parameter_count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@dataclass(frozen=True)
class Step:
    """A row of the CSV, before the conditions of the run are added."""

    optimizer: str
    step: int
    epoch: int
    lr: float
    train_loss: float
    grad_norm: float
    rms_grad: float
    weight_decay: float
    step_us: float


@dataclass
class Run:
    """One model in training. `weight_decay` is in AdamW's terms for both, so that the two can be compared.

    `rms_grad` is the root of the mean second moment after bias correction, which FusedAdamS divides its decay by.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rms_grad: Callable[[], float]
    weight_decay: Callable[[], float]
    steps: list[Step] = field(default_factory=list)

    def take_step(self, step: int, epoch: int, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(images), labels)
        loss.backward()
        start = time.perf_counter()
        self.optimizer.step()
        step_us = (time.perf_counter() - start) * 1e6
        # After the step, so that no optimizer finds gradients that were just read into the cache for this.
        grad_norm = nn.utils.get_total_norm([param.grad for param in self.model.parameters() if param.grad is not None])
        lr = self.optimizer.param_groups[0]["lr"]
        decay = self.weight_decay()
        self.steps.append(
            Step(self.name, step, epoch, lr, loss.item(), grad_norm.item(), self.rms_grad(), decay, step_us)
        )

    def mean_weight_decay(self) -> float:
        """The constant weight decay that with the same learning rates would have decayed as much in total."""
        return sum(step.lr * step.weight_decay for step in self.steps) / sum(step.lr for step in self.steps)

    def last_epoch(self) -> list[Step]:
        return [step for step in self.steps if step.epoch == self.steps[-1].epoch]

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        self.model.eval()
        return (self.model(images).argmax(1) == labels).double().mean().item()


def rms_of_second_moments(optimizer: torch.optim.AdamW) -> float:
    """Computes for AdamW what FusedAdamS knows, by its definition."""
    beta2 = optimizer.param_groups[0]["betas"][1]
    states = optimizer.state.values()
    total = sum(float(state["exp_avg_sq"].sum(dtype=torch.float64) / (1 - beta2 ** state["step"])) for state in states)
    return math.sqrt(total / sum(state["exp_avg_sq"].numel() for state in states))


def same_start(seed: int, adamw_weight_decay: float) -> tuple[Run, Run]:
    torch.manual_seed(seed)
    model = convolutional_net()
    twin = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=adamw_weight_decay, fused=True)
    adams = FusedAdamS(twin.parameters(), lr=LR, weight_decay=ADAMS_WEIGHT_DECAY)
    return (
        Run(
            "AdamW",
            model,
            adamw,
            rms_grad=lambda: rms_of_second_moments(adamw),
            weight_decay=lambda: adamw.param_groups[0]["weight_decay"],
        ),
        Run(
            "FusedAdamS",
            twin,
            adams,
            rms_grad=lambda: math.sqrt(adams.exp_avg_sq_mean),
            weight_decay=lambda: adams.effective_weight_decay()[0],
        ),
    )


def train(runs: Sequence[Run], data: Digits, epochs: int, batch_size: int, seed: int, console: Console) -> None:
    total = epochs * (len(data.train_labels) // batch_size)
    milestones = [max(1, round(share * total)) for share in MILESTONES]
    lr_schedules = [MultiStepLR(run.optimizer, milestones, gamma=0.1) for run in runs]
    shuffle = torch.Generator().manual_seed(seed)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=total)
        step = 0
        for epoch in range(1, epochs + 1):
            progress.update(bar, description=f"epoch {epoch} of {epochs}")
            for images, labels in data.batches(batch_size, shuffle):
                step += 1
                for run in runs if step % 2 else reversed(runs):
                    run.take_step(step, epoch, images, labels)
                for lr_schedule in lr_schedules:
                    lr_schedule.step()
                progress.advance(bar)


def results_table(adamw: Run, adams: Run, data: Digits) -> Table:
    images = len(data.test_labels)
    table = Table(
        title=f"scikit-learn digits, {adamw.steps[-1].epoch} epochs",
        caption="Weight decay: mean over the run, weighted by lr, in AdamW's terms. Compare loss\n"
        "and gradient norm only where it is equal: less decay lowers both by itself.\n"
        "Loss, gradient norm: mean over the last epoch's minibatches, in train mode.\n"
        f"Test: {images} images, {1 / images:.2%} each. Time: median of optimizer.step(), one thread;\n"
        f"with {parameter_count(adams.model):,} parameters most of it is the cost of the call.",
        caption_justify="left",
    )
    table.add_column("optimizer", no_wrap=True)
    for heading in ("weight decay", "train loss", "gradient norm", "test accuracy", "step time", "ratio"):
        table.add_column(heading, justify="right")
    adamw_us = median(step.step_us for step in adamw.steps)
    for run in (adamw, adams):
        last = run.last_epoch()
        step_us = median(step.step_us for step in run.steps)
        table.add_row(
            run.name,
            f"{run.mean_weight_decay():.2f}",
            f"{fmean(step.train_loss for step in last):.2e}",
            f"{fmean(step.grad_norm for step in last):.2e}",
            f"{run.accuracy(data.test_images, data.test_labels):.2%}",
            f"{step_us:.0f} µs",
            f"{step_us / adamw_us:.2f}",
        )
    return table


def write_csv(path: Path, runs: Sequence[Run], conditions: dict[str, Any]) -> None:
    rows = [{**asdict(step), **conditions} for run in runs for step in run.steps]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


@contextmanager
def one_thread() -> Iterator[None]:
    """A second thread gains nothing at this size, and made a run 14 times as long when its core was busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def between(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {value}, wanted {least} to {most}")
        return value

    return number


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Trains a small convolutional net on scikit-learn's digits with FusedAdamS and with AdamW side by "
        "side, and writes each step to a CSV file. The picture shows what FusedAdamS's schedule does.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # 1260 steps: the running average of squared gradients spans 1000, and a run within that is all warm-up.
    parser.add_argument(
        "--epochs", type=between(1, 10_000), default=30, help=f"passes over the {TRAIN_SIZE} training images"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the order of the images")
    parser.add_argument("--batch-size", type=between(2, TRAIN_SIZE), default=32, help="images in a step")
    parser.add_argument(
        "--adamw-weight-decay",
        type=float,
        default=ADAMW_WEIGHT_DECAY,
        help="as much in total as FusedAdamS's, over 30 epochs; the paper's is 0.5",
    )
    parser.add_argument("--out", type=Path, default=Path("results/demo"), metavar="DIR", help="where to write")
    return parser.parse_args(argv)


@one_thread()
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    data = digits()
    adamw, adams = same_start(args.seed, args.adamw_weight_decay)
    train((adamw, adams), data, args.epochs, args.batch_size, args.seed, console)
    console.print(results_table(adamw, adams, data))

    conditions = {
        "seed": args.seed,
        "batch_size": args.batch_size,
        "parameters": parameter_count(adams.model),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "swd_fused": __version__,
    }
    steps_path, picture_path = args.out / "steps.csv", args.out / "demo.png"
    write_csv(steps_path, (adamw, adams), conditions)
    draw(steps_path, picture_path)
    console.print(f"Every step: {steps_path}", f"The picture: {picture_path}", sep="\n", soft_wrap=True)


if __name__ == "__main__":
    main()

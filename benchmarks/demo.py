"""A small convolutional net on scikit-learn's digits, trained by FusedAdamS and by AdamW side by side.

Both start from the same weights and see the same batches. Each batch steps both, in alternating order, so that
whatever else the machine does meets both step times alike. Settings are the paper's: lr 1e-3, divided by 10 at 40%
and at 80% of training, and weight decay 5e-4 for AdamS.

Decay by itself changes the training loss and the gradient norm, so the two are compared at equal total decay: AdamW's
is what FusedAdamS decays over 30 epochs, in AdamW's terms. The paper's own choice for AdamW, 5e-4 / lr = 0.5, decays
2.6 times as much in so short a run. The table shows how much each decayed, and the picture what the schedule does.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import MultiStepLR

from benchmarks.conditions import OtherLoad, conditions, positive, write_rows
from benchmarks.drawing import GREY, PALETTE, save, tidy
from benchmarks.paper.optimizers import adamw_weight_decay
from benchmarks.step_times.harness import table
from benchmarks.studies.rows import Row, chosen
from benchmarks.studies.runner import command
from benchmarks.studies.samples import digits
from swd_fused import FusedAdamS

LR, BATCH_SIZE = 1e-3, 32
ADAMS, ADAMW = "FusedAdamS", "AdamW"
ADAMS_WEIGHT_DECAY = 5e-4
ADAMW_WEIGHT_DECAY = 0.19  # as much in total as FusedAdamS's over the default 30 epochs
MILESTONES = (0.4, 0.8)


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def convolutional_net() -> nn.Sequential:
    layers = [*convolution(1, 32), nn.MaxPool2d(2), *convolution(32, 64), *convolution(64, 128)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def trained(seed: int, epochs: int) -> tuple[list[Row], dict[str, float]]:
    """Returns every step of both, and their test accuracies. `weight_decay` is in AdamW's terms.

    `rms_grad` is the root of the mean second moment after bias correction, which FusedAdamS divides its decay by.
    """
    torch.manual_seed(seed)
    data, shuffle = digits(), torch.Generator().manual_seed(seed)
    model = convolutional_net()
    twin = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=ADAMW_WEIGHT_DECAY, fused=True)
    adams = FusedAdamS(twin.parameters(), lr=LR, weight_decay=ADAMS_WEIGHT_DECAY)
    sides = {ADAMW: (model, adamw), ADAMS: (twin, adams)}
    milestones = [max(1, round(share * epochs * data.train_steps(BATCH_SIZE))) for share in MILESTONES]
    schedules = [MultiStepLR(optimizer, milestones, gamma=0.1) for _, optimizer in sides.values()]
    rows: list[Row] = []
    for epoch in range(1, epochs + 1):
        for batch in data.train_batches(BATCH_SIZE, shuffle, augment=False):
            step = len(rows) // 2 + 1
            own = {"step": step, "epoch": epoch}
            names = list(sides) if step % 2 else reversed(sides)
            rows += [{"optimizer": name, **own, **trained_step(*sides[name], *batch)} for name in names]
            for schedule in schedules:
                schedule.step()
    with torch.no_grad():
        tested = {name: model.eval()(data.test_images).argmax(1) for name, (model, _) in sides.items()}
    return rows, {name: (found == data.test_labels).double().mean().item() for name, found in tested.items()}


def trained_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Row:
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()
    start = time.perf_counter()
    optimizer.step()
    step_us = (time.perf_counter() - start) * 1e6
    # After the step, so that no optimizer finds gradients that were just read into the cache for this.
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    return {
        "lr": optimizer.param_groups[0]["lr"],
        "train_loss": loss.item(),
        "grad_norm": norm.item(),
        "rms_grad": math.sqrt(optimizer.exp_avg_sq_mean) if isinstance(optimizer, FusedAdamS) else math.nan,
        "weight_decay": adamw_weight_decay(optimizer),
        "step_us": step_us,
    }


CAPTION = """\
Weight decay: mean over the run, weighted by lr, in AdamW's terms. Compare loss
and gradient norm only where it is equal: less decay lowers both by itself.
Loss, gradient norm: mean over the last epoch's minibatches, in train mode.
Test: 450 images, 0.22% each. Time: median of optimizer.step(), one thread;
with 94,186 parameters most of it is the cost of the call."""
HEADINGS = ("optimizer", "weight decay", "train loss", "gradient norm", "test accuracy", "step time", "ratio")


def cells(rows: Sequence[Row], accuracies: Mapping[str, float]) -> Iterator[list[str]]:
    times = {name: median(row["step_us"] for row in chosen(rows, optimizer=name)) for name in accuracies}
    for name, step_us in times.items():
        own = chosen(rows, optimizer=name)
        last = chosen(own, epoch=own[-1]["epoch"])
        means = (f"{fmean(row[column] for row in last):.2e}" for column in ("train_loss", "grad_norm"))
        decay, accuracy = f"{mean_weight_decay(own):.2f}", f"{accuracies[name]:.2%}"
        yield [name, decay, *means, accuracy, f"{step_us:.0f} µs", f"{step_us / times[ADAMW]:.2f}"]


def mean_weight_decay(rows: Sequence[Row]) -> float:
    """The constant weight decay that with the same learning rates would have decayed as much in total."""
    return sum(row["lr"] * row["weight_decay"] for row in rows) / sum(row["lr"] for row in rows)


def draw(rows: Sequence[Row], picture: Path) -> Path:
    """What FusedAdamS's schedule does, and not who trains better: gradients, and the weight decay that follows."""
    names = ("step", "lr", "rms_grad", "weight_decay")
    steps, lrs, rms, decays = (np.array([row[name] for row in rows]) for name in names)
    epochs = steps * rows[-1]["epoch"] / steps[-1]
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    gradients, decay = figure.subplots(2, sharex=True)
    gradients.plot(epochs, rms, color=PALETTE["blue"], linewidth=2, label="running average,\nwhich divides the decay")
    gradients.set(yscale="log", ylabel="rms gradient")
    constant = mean_weight_decay(rows)
    decay.plot(epochs, decays, color=PALETTE["blue"], linewidth=2, label="AdamS")
    label = f"AdamW with the same\ntotal decay ({constant:.2g})"
    decay.axhline(constant, color=PALETTE["red"], linewidth=2, label=label)
    decay.set(xlim=(0, epochs[-1]), ylim=(0, None), xlabel="epoch", ylabel="weight decay,\nin AdamW's terms")
    for axis in (gradients, decay):
        for epoch in epochs[np.flatnonzero(np.diff(lrs))]:  # where lr is divided by 10
            axis.axvline(epoch, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
        tidy(axis)
        # To the right of the panel: within it there is no place that the curves of all runs leave free.
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=1.4, fontsize=9)
    note = "A small convolutional net on scikit-learn's digits: python -m benchmarks.demo. Dotted: lr / 10."
    return save(figure, picture, note, "AdamS: the weight decay grows as the gradients shrink")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # 1260 steps: the running average of squared gradients spans 1000, and a run within that is all warm-up.
    parser.add_argument("--epochs", type=positive, default=30, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of images; default: 0")
    parser.add_argument("--out", type=Path, default=Path("results/demo"), metavar="DIR", help="default: %(default)s")
    args = parser.parse_args(argv)
    load, threads = OtherLoad(), torch.get_num_threads()
    # A second one gains nothing at this size, and made a run 14 times as long when it was busy.
    torch.set_num_threads(1)
    try:
        with command("demo") as console:
            console.print(f"Training for {args.epochs} epochs, which takes a few minutes.")
            rows, accuracies = trained(args.seed, args.epochs)
            steps = args.out / "steps.csv"
            write_rows(steps, [{**row, "seed": args.seed, **conditions(load)} for row in rows])
            console.print(
                table(f"scikit-learn digits, {args.epochs} epochs", HEADINGS, list(cells(rows, accuracies)), CAPTION)
            )
            picture = draw(chosen(rows, optimizer=ADAMS), args.out / "demo.png")
            console.print(f"Every step: {steps}", f"The picture: {picture}", sep="\n", soft_wrap=True)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()

"""What a bad batch does to a training run, as it is and with FusedAdamW's `outliers`.

A small ResNet on CIFAR-10 (--data), or else on scikit-learn's digits. In a few steps the labels are shuffled among the
images, or the gradients multiplied by 100. All runs of a seed start from the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from benchmarks.conditions import OtherLoad, conditions, positive, write_rows
from benchmarks.drawing import GREY, PALETTE, legend_above, measured_on, save, tidy
from benchmarks.paper.data import load_images
from benchmarks.paper.data.images import Tensors
from benchmarks.small_models import SmallResNet
from benchmarks.studies.rows import Row, read_rows
from swd_fused import FusedAdamW

LR, BATCH_SIZE, WINDOW = 3e-3, 32, 10  # losses are means of a window
KINDS = {"labels": "labels shuffled", "gradients": "gradients times 100"}
CONTENDERS = {"as it is": None, "skip": "skip", "clip": "clip"}
UNDISTURBED = "without bad steps"
COLOURS = {UNDISTURBED: GREY, "as it is": PALETTE["red"], "skip": PALETTE["blue"], "clip": PALETTE["orange"]}


def batches(data: Tensors, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        for images, labels in data.train_batches(BATCH_SIZE, generator, augment=False):
            yield images.expand(-1, 3, -1, -1), labels


def bad_steps(steps: int) -> list[int]:
    return [steps * quarter // 4 for quarter in (1, 2, 3)]


def train(data: Tensors, kind: str, contender: str, seed: int, steps: int) -> tuple[list[float], list[int]]:
    """Returns the loss of each step, that of a bad one on its right labels, and the steps that stood out."""
    torch.manual_seed(seed)
    model = SmallResNet(width=8, blocks=1)
    optimizer = FusedAdamW(model.parameters(), lr=LR, outliers=CONTENDERS.get(contender))
    losses, found, before = [], [], 0.0
    for step, (images, labels) in zip(range(steps), batches(data, seed), strict=False):
        logits = model(images)
        losses.append(float(F.cross_entropy(logits.detach(), labels)))
        is_bad = step in bad_steps(steps)
        if is_bad and kind == "labels":
            labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))]
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
        if is_bad and kind == "gradients":
            torch._foreach_mul_([param.grad for param in model.parameters()], 100)
        optimizer.step()
        share = optimizer.metrics().get("outlier_share", 0.0) * (step + 1)
        found += [step] * round(share - before)
        before = share
    return losses, found


def measure(data: Tensors, name: str, seeds: int, steps: int) -> list[Row]:
    """Returns a row for each window of each contender: its loss, the median, least and largest over the seeds."""
    load, rows, bad = OtherLoad(), [], bad_steps(steps)
    for kind, contender in [("none", UNDISTURBED), *product(KINDS, CONTENDERS)]:
        runs = [train(data, kind, contender, seed, steps) for seed in range(seeds)]
        stood_out = [step for _, found in runs for step in found]
        planted = sum(step in bad for step in stood_out)
        others = len(stood_out) - planted
        print(f"{kind}, {contender}: {planted} of {seeds * len(bad)} bad steps stood out, {others} others", flush=True)
        for first in range(0, steps, WINDOW):
            means = [fmean(losses[first : first + WINDOW]) for losses, _ in runs]
            row = {"data": name, "kind": kind, "contender": contender, "seeds": seeds, "first_step": first}
            row |= {"loss": f"{median(means):.4f}", "least": f"{min(means):.4f}", "largest": f"{max(means):.4f}"}
            row |= {"bad_steps": " ".join(map(str, bad)), "found": planted, "found_others": others}
            rows.append({**row, **conditions(load)})
    return rows


def draw(rows: Sequence[Row], path: Path) -> Path:
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, len(KINDS), sharey=True)
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for contender, colour in COLOURS.items():
            own = [row for row in rows if row["kind"] in (kind, "none") and row["contender"] == contender]
            middles = [row["first_step"] + WINDOW / 2 for row in own]
            losses, least, largest = ([row[key] for row in own] for key in ("loss", "least", "largest"))
            axis.fill_between(middles, least, largest, color=colour, alpha=0.12, linewidth=0)
            axis.plot(middles, losses, color=colour, linewidth=1.3, label=contender)
        for step in map(int, rows[0]["bad_steps"].split()):
            axis.axvline(step, color=GREY, linewidth=0.8, linestyle=":")
        axis.set_title(f"{title} in the steps with a dotted line", fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        tidy(axis)
    axes[0].set_ylabel(f"training loss, mean of {WINDOW} steps", fontsize=8)
    legend_above(figure, axes, columns=len(COLOURS))
    caption = f"Median and range of {rows[0]['seeds']} seeds, ResNet on {rows[0]['data']}, lr {LR:g}. "
    return save(figure, path, caption + measured_on(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.bad_batches", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with CIFAR-10; default: scikit-learn's digits")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=240)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bad_batches.csv")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the net is too small for more
    name = "digits" if options.data is None else "cifar10-subset"
    data = load_images(name, options.data, torch.device("cpu"), limit=0)
    write_rows(options.out, measure(data, name, options.seeds, options.steps))
    print("Wrote", options.out, "and", draw(read_rows(options.out), options.out.with_suffix(".png")))


if __name__ == "__main__":
    main()

"""Draws losses as forest plots beside exponents, from the CSV files. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drawing import GREY, PALETTE, Differences, forest, measured_on, save
from benchmarks.studies.rows import Row, chosen
from benchmarks.which_decay.contenders import ADAMW, CONTENDERS, DECAYING, NO_DECAY
from benchmarks.which_decay.exponents import exponent, slopes
from benchmarks.which_decay.losses import TUNING_SEED, findings

COLOURS = {c.name: GREY if c.name == NO_DECAY else PALETTE["red" if c.scheduled else "blue"] for c in CONTENDERS}
TASKS = {"gpt": "GPT on prose", "resnet": "ResNet on CIFAR-10"}
NETS = {"digits": ("toy net", "#000000"), "plain resnet": ("ResNet", PALETTE["pink"])}


def plot(losses: Sequence[Row], stages: Sequence[Row], path: Path, fixed: Sequence[tuple[str, float]]) -> Path:
    """`fixed` are tasks and decays that are compared at the same number, too."""
    panels = [(task, at) for task, at in [*((task, None) for task in TASKS), *fixed] if findings(losses, task, at)]
    count = len(panels) + 1
    figure = Figure(figsize=(11, 3.7 * ((count + 1) // 2) + 0.8), layout="constrained")
    axes = figure.subplots((count + 1) // 2, 2, squeeze=False).ravel()
    for axis, (task, at) in zip(axes, panels, strict=False):
        draw_losses(axis, losses, task, at)
    draw_exponents(axes[len(panels)], stages)
    for axis in axes[count:]:
        axis.set_visible(False)
    said = (
        "Dots are seeds, diamonds their means: with intervals that hold for all kinds together with 95%, or hollow "
        f"where seeds are too few. Seed {TUNING_SEED} chose the best decays by validation loss and does not judge "
        f"them; a decay of {' and '.join(f'{at:g}' for _, at in fixed)} was fixed beforehand. Blue: AdamW's kinds, "
        "red: AdamS's. All kinds of a seed have the same start and batches. Exponents: means and 95% intervals over "
        "seeds, layers that a norm follows. "
    )
    first = [{key: str(value) for key, value in row.items()} for row in (*losses, *stages)][:1]
    title = "Seven kinds of weight decay: their losses, and how their gradients grow"
    return save(figure, path, said + measured_on(first), title)


def draw_losses(axis: Axes, rows: Sequence[Row], task: str, at: float | None) -> None:
    found = {finding.contender: finding for finding in findings(rows, task, at)}
    adamw = found.pop(ADAMW)
    lines = []
    for name, finding in found.items():
        label = name if name == NO_DECAY or at is not None else f"{name}, {finding.decay:g}"
        values, interval = finding.differences("test_loss"), finding.interval("test_loss")
        lines.append(Differences(label, values, interval, COLOURS[name]))
    forest(axis, lines)
    mean = f"{adamw.mean('test_loss'):.3f} at a decay of {adamw.decay:g}"
    axis.set_xlabel(f"test loss minus AdamW's ({mean})", fontsize=9)
    where = "each kind at its best decay" if at is None else f"all kinds at a decay of {at:g}"
    axis.set_title(f"{TASKS[task]}, {where}", fontsize=9.5, loc="left", fontweight="bold")


def draw_exponents(axis: Axes, stages: Sequence[Row]) -> None:
    lines, predicted = [], []
    for contender, (task, (label, colour)) in product(DECAYING, NETS.items()):
        own = chosen(stages, task=task, contender=contender.name)
        found, interval = slopes(own, "normed_grad_norm"), exponent(own, "normed_grad_norm")
        name = f"{contender.name}, {label}" if interval else f"{contender.name}, {label}: not settled"
        lines.append(Differences(name, found, interval, colour))
        predicted.append(contender.exponent)
    style = {"marker": "|", "s": 150, "color": PALETTE["green"], "linewidth": 3}
    axis.scatter(predicted, range(len(predicted)), zorder=1, label="predicted", **style)  # type: ignore[arg-type]
    forest(axis, lines)
    axis.set_xlabel("exponent of lr in the gradient norm (0: it stays)", fontsize=9)
    axis.legend(loc="lower left", fontsize=7.5, frameon=False, markerscale=0.6)
    axis.set_title("How gradients grow as the learning rate falls", fontsize=9.5, loc="left", fontweight="bold")

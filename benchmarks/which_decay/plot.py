"""Draws losses as forest plots beside exponents, from the CSV files. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drawing import GREY, PALETTE, Differences, forest, measured_on, save, tidy
from benchmarks.studies.rows import Row, chosen
from benchmarks.which_decay.contenders import ADAMW, CONTENDERS, DECAYING, NO_DECAY
from benchmarks.which_decay.exponents import exponent
from benchmarks.which_decay.losses import TUNING_SEED, findings

COLOURS = {c.name: GREY if c.name == NO_DECAY else PALETTE["red" if c.scheduled else "blue"] for c in CONTENDERS}
TASKS = {"gpt": "GPT on prose", "resnet": "ResNet on CIFAR-10"}
NETS = {"digits": ("toy net", "o", "#000000"), "plain resnet": ("ResNet", "s", PALETTE["pink"])}


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
    places = range(len(DECAYING))
    style = {"marker": "|", "s": 500, "color": PALETTE["green"], "linewidth": 3}
    axis.scatter([contender.exponent for contender in DECAYING], places, zorder=1, label="predicted", **style)
    for shift, (task, (label, marker, colour)) in zip((-0.13, 0.17), NETS.items(), strict=True):
        found = {c.name: exponent(chosen(stages, task=task, contender=c.name), "normed_grad_norm") for c in DECAYING}
        for place, interval in enumerate(found.values()):
            if interval is None:
                at = {"xy": (0.02, place + shift), "xycoords": ("axes fraction", "data"), "va": "center"}
                axis.annotate(f"{label}: some stages did not settle", **at, fontsize=7.5, color=colour)
                continue
            half = interval.high - interval.mean
            bar = {"xerr": half if half == half else 0.0, "marker": marker, "color": colour, "capsize": 3}
            axis.errorbar(interval.mean, place + shift, markersize=5, label=label if place == 0 else None, **bar)
    axis.set_yticks(places, [contender.name for contender in DECAYING], fontsize=8)
    axis.set_ylim(len(DECAYING) + 0.3, -0.6)
    axis.set_xlabel("exponent of the learning rate in the gradient norm (0: it stays)", fontsize=9)
    axis.legend(loc="lower left", ncols=3, fontsize=7.5, frameon=False, markerscale=0.6)
    axis.set_title("How gradients grow as the learning rate falls", fontsize=9.5, loc="left", fontweight="bold")
    axis.margins(x=0.08)
    tidy(axis, "x")

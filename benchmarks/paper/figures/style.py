"""How all figures look."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure  # without pyplot a figure draws with Agg, on machines without a display too
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter

from benchmarks.paper.figures.rows import Row, over_seeds

# From Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = {"AdamS": "#0072B2", "AdamW": "#D55E00", "Adam": "#009E73", "SGD": "#CC79A7"}
ORDERED = ("#999999", "#0072B2", "#D55E00", "#661100", "#000000")  # for lambdas, from small to large
INK = "#333333"
GREY = "#777777"

NAMES = {
    "cifar10": "CIFAR-10",
    "cifar10-subset": "CIFAR-10, 10,000 images",
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet",
    "fashion-mnist": "Fashion-MNIST",
    "digits": "digits",
    "penn-treebank": "Penn TreeBank",
    "penn-treebank-4000": "Penn TreeBank, 4,000 words",
    "python-documentation": "Python's documentation",
    "resnet18": "ResNet18",
    "resnet34": "ResNet34",
    "resnet50": "ResNet50",
    "vgg16": "VGG16, no BatchNorm",
    "vgg16-bn": "VGG16",
    "densenet121": "DenseNet121",
    "googlenet": "GoogLeNet",
    "lstm": "LSTM",
    "small-resnet": "small ResNet",
    "medium-resnet": "small ResNet, twice as wide",
    "large-resnet": "small ResNet, four times as wide",
    "small-vgg": "small VGG, no BatchNorm",
    "small-vgg-bn": "small VGG, BatchNorm",
    "small-lstm": "small LSTM",
    "medium-lstm": "small LSTM, twice as wide",
}


def task_name(row: Row) -> str:
    return f"{NAMES.get(row['model'], row['model'])}, {NAMES.get(row['data'], row['data'])}"


def lambda_name(weight_decay: float) -> str:
    return f"λ = {weight_decay:g}"


def panels(rows: int, columns: int, width: float = 3.6, height: float = 2.9) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def curve(axes: Axes, rows: Iterable[Row], x: str, y: str, label: str, colour: str, scale: float = 1.0) -> None:
    """The mean over seeds, and a band from the least to the most of them."""
    xs, mean, least, most = over_seeds(rows, x, y)
    axes.plot(xs, scale * mean, color=colour, linewidth=1.8, marker="o", markersize=2.5, label=label)
    axes.fill_between(xs, scale * least, scale * most, color=colour, alpha=0.18, linewidth=0)


def lambda_axis(axes: Axes, rows: Iterable[Row]) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("λ")
    axes.xaxis.set_major_locator(FixedLocator(sorted({row["weight_decay"] for row in rows})))


def plain_log_ticks(axis: Axis) -> None:
    """Numbers as people write them, more of them in each decade where there are few decades."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        axis.set_major_locator(
            LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 3 else (1,))
        )
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes, **options: object) -> None:
    axes.legend(frameon=False, fontsize=8, handlelength=1.4, **options)  # type: ignore[arg-type]


def save(figure: Figure, picture: Path, title: str, note: str) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                plain_log_ticks(axis)
            elif axis.get_label_text() in ("epoch", "rank"):
                axis.set_major_locator(MaxNLocator(integer=True))
        axes.title.set_fontsize(9.5)
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
    figure.suptitle(title, fontsize=11, fontweight="bold", color=INK)
    figure.supxlabel(fill(note, int(16 * figure.get_figwidth())), fontsize=8, color=GREY)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def seeds_note(rows: list[Row], extra: str = "") -> str:
    count = len({row["seed"] for row in rows})
    return f"Mean of {count} seeds; bands reach from the least to the most of them. {extra}".rstrip()

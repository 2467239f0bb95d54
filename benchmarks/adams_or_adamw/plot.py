"""Draws paired differences of test errors as a forest plot. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.adams_or_adamw.plan import ARMS, MARGIN, Arm, Row
from benchmarks.adams_or_adamw.report import COMPARISONS, FEWEST, headline
from benchmarks.adams_or_adamw.statistics import bootstrap, error_differences, pairs
from benchmarks.drawing import GREY, PALETTE, Differences, forest, save

COLOURS = (PALETTE["red"], GREY, PALETTE["blue"])  # of the comparisons in their order


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Whether there was anything to draw."""
    arms = [arm for arm in ARMS.values() if any(pairs(rows, arm.name, *both) for both in COMPARISONS)]
    if not arms:
        return False
    figure = Figure(figsize=(8.4, 1.0 + 1.75 * len(arms)), layout="constrained")
    axes = figure.subplots(len(arms), 1, squeeze=False, sharex=True)[:, 0]
    for axis, arm in zip(axes, arms, strict=True):
        draw_arm(axis, arm, rows)
    axes[-1].set_xlabel("difference of test errors, percentage points: left of 0 the first one has fewer errors")
    first = next(row for row in rows if row["role"] == "counted")
    note = (
        f"Dots are pairs of runs with the same start and batches; diamonds are means with 95% intervals over pairs and "
        f"{int(first['images']):,} test images. Grey band: differences of less than {MARGIN:g} points. "
        f"CIFAR-10, {int(first['train_images']):,} training images, ResNet of 0.3 million parameters. "
        f"torch {first['torch']}, swd_fused {first['swd_fused']}, CPU."
    )
    save(figure, path, note)
    return True


def draw_arm(axis: Axes, arm: Arm, rows: Sequence[Row]) -> None:
    axis.axvspan(-MARGIN, MARGIN, color="#eeeeee", zorder=0)
    lines = []
    for (one, other), colour in zip(COMPARISONS, COLOURS, strict=True):
        paired = pairs(rows, arm.name, one, other)
        label = f"{one} - {other}\n{len(paired)} of {arm.pairs} pairs"
        table = error_differences(paired)
        found = bootstrap(table) if len(paired) >= FEWEST else None
        lines.append(Differences(label, list(table.mean(1)) if paired else [], found, colour))
    forest(axis, lines, "+.2f")
    axis.set_title(f"{fill(headline(arm, rows), 80)}\n", fontsize=10, loc="left", fontweight="bold")
    axis.text(0.0, 1.03, f"Arm {arm.name}: {arm.what}", transform=axis.transAxes, fontsize=8.5, color="#444444")

"""Draws paired differences of test errors as a forest plot. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.adams_or_adamw.plan import ARMS, MARGIN, Arm
from benchmarks.adams_or_adamw.report import COMPARISONS, FEWEST, headline
from benchmarks.adams_or_adamw.statistics import Row, bootstrap, error_differences, pairs

COLOURS = ("#D55E00", "#777777", "#0072B2")  # of Okabe and Ito's palette, for the comparisons in their order


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
        f"{int(first['images']):,} test images.\nGrey band: differences of less than {MARGIN:g} points. "
        f"CIFAR-10, {int(first['train_images']):,} training images, ResNet of 0.3 million parameters. "
        f"torch {first['torch']}, swd_fused {first['swd_fused']}, CPU."
    )
    figure.supxlabel(note, fontsize=7.5, color="#444444", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return True


def draw_arm(axis: Axes, arm: Arm, rows: Sequence[Row]) -> None:
    axis.axvspan(-MARGIN, MARGIN, color="#eeeeee", zorder=0)
    axis.axvline(0.0, color="#444444", linewidth=0.8, zorder=1)
    labels = []
    for place, (one, other) in enumerate(COMPARISONS):
        paired = pairs(rows, arm.name, one, other)
        labels.append(f"{one} - {other}\n{len(paired)} of {arm.pairs} pairs")
        if not paired:
            continue
        table = error_differences(paired)
        axis.scatter(table.mean(1), [place + 0.22] * len(paired), s=9, color=COLOURS[place], alpha=0.45, linewidths=0)
        if len(paired) < FEWEST:
            continue
        found = bootstrap(table)
        axis.errorbar(
            found.mean,
            place - 0.1,
            xerr=[[found.mean - found.low], [found.high - found.mean]],
            color=COLOURS[place],
            marker="D",
            markersize=6,
            capsize=4,
            linewidth=1.8,
        )
        said = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
        axis.annotate(
            said,
            (1.0, place - 0.1),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            xytext=(4, 0),
            textcoords="offset points",
        )
    axis.set_yticks(range(len(COMPARISONS)), labels, fontsize=8)
    axis.set_ylim(len(COMPARISONS) - 0.4, -0.5)
    axis.set_title(f"{fill(headline(arm, rows), 80)}\n", fontsize=10, loc="left", fontweight="bold")
    axis.text(0.0, 1.03, f"Arm {arm.name}: {arm.what}", transform=axis.transAxes, fontsize=8.5, color="#444444")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)

"""Draws losses as forest plots beside exponents, from the CSV files. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.drawing import GREY, PALETTE, Differences, forest, measured_on, save, tidy
from benchmarks.studies.rows import Row
from benchmarks.which_decay.contenders import ADAMW, CONTENDERS, DECAYING, NO_DECAY
from benchmarks.which_decay.exponents import Exponent, exponents
from benchmarks.which_decay.findings import TUNING_SEED, Finding, findings

COLOURS = {c.name: GREY if c.name == NO_DECAY else PALETTE["red" if c.scheduled else "blue"] for c in CONTENDERS}
TASKS = {"gpt": "GPT on prose", "resnet": "ResNet on CIFAR-10"}
NETS = {"digits": ("toy net", "o", "#000000"), "plain resnet": ("ResNet", "s", PALETTE["pink"])}
AS_PREDICTED = 0.05  # of an exponent, without caution


def plot(losses: Sequence[Row], stages: Sequence[Row], path: Path, fixed: Sequence[tuple[str, float]]) -> Path:
    """`fixed` are tasks and decays that are compared at the same number, too."""
    best = [(task, None) for task in TASKS if any(row["task"] == task for row in losses)]
    panels = [(task, at, found) for task, at in [*best, *fixed] if len(found := findings(losses, task, at)) > 1]
    count = len(panels) + bool(stages)
    figure = Figure(figsize=(11, 3.7 * ((count + 1) // 2) + 0.8), layout="constrained")
    axes = figure.subplots((count + 1) // 2, 2, squeeze=False).ravel()
    for axis, (task, at, found) in zip(axes, panels, strict=False):
        draw_losses(axis, task, at, found)
    if stages:
        draw_exponents(axes[len(panels)], exponents(stages))
    for axis in axes[count:]:
        axis.set_visible(False)
    said = (
        "Dots are seeds, diamonds their means: with intervals that hold for all kinds together with 95%, or hollow "
        f"where seeds are too few. Seed {TUNING_SEED} chose the best decays by validation loss and does not judge "
        f"them; a decay of {' and '.join(f'{at:g}' for _, at in fixed)} was fixed beforehand. A loss counts as lower "
        "or higher if validation and test agree. Blue: AdamW's kinds, red: AdamS's. All kinds of a seed have the same "
        "start and batches. Exponents: means and 95% intervals over seeds, layers that a norm follows. "
    )
    first = [{key: str(value) for key, value in row.items()} for row in (*losses, *stages)][:1]
    title = "Seven kinds of weight decay: their losses, and how their gradients grow"
    return save(figure, path, said + measured_on(first), title)


def draw_losses(axis: Axes, task: str, at: float | None, found: Sequence[Finding]) -> None:
    lines = []
    for each in found:
        if each.contender != ADAMW:
            name = (
                each.contender if each.contender == NO_DECAY or at is not None else f"{each.contender}, {each.decay:g}"
            )
            interval = each.interval("test_loss")
            lines.append(Differences(name, each.differences("test_loss"), interval, COLOURS[each.contender]))
    forest(axis, lines)
    adamw = next(each for each in found if each.contender == ADAMW)
    axis.set_xlabel(
        f"test loss minus AdamW's ({adamw.mean('test_loss'):.3f} at a decay of {adamw.decay:g})", fontsize=9
    )
    where = f"{TASKS[task]}, " + ("each kind at its best decay" if at is None else f"all kinds at a decay of {at:g}")
    axis.set_title(f"{where}:\n{result(found)}", fontsize=9.5, loc="left", fontweight="bold")


def result(found: Sequence[Finding]) -> str:
    """Says what the seeds show."""
    seeds = max(len(each.differences("test_loss")) for each in found)
    verdicts = {each.contender: each.verdict for each in found if each.contender != ADAMW}
    if "too few seeds" in verdicts.values():
        return f"{seeds} seed{'s' * (seeds > 1)} cannot tell the kinds apart"
    named = {said: ", ".join(n for n, v in verdicts.items() if v == said) for said in ("lower", "higher")}
    differ = "; ".join(f"{said} loss than AdamW: {names}" for said, names in named.items() if names)
    return differ or f"no loss differs from AdamW's beyond {seeds} seeds"


def draw_exponents(axis: Axes, found: Sequence[Exponent]) -> None:
    names = [contender.name for contender in DECAYING]
    own = {(e.task, e.contender): e for e in found if e.quantity == "normed_grad_norm"}
    predictions = [contender.exponent for contender in DECAYING]
    axis.scatter(predictions, range(len(names)), marker="|", s=500, color=PALETTE["green"], linewidth=3, zorder=1)
    style = {"color": PALETTE["green"], "markersize": 10, "markeredgewidth": 3, "linestyle": ""}
    handles = [Line2D([], [], marker="|", label="predicted", **style)]  # type: ignore[arg-type]
    for task, (label, marker, colour) in NETS.items():
        if not any(of_task == task for of_task, _ in own):
            continue
        handles.append(Line2D([], [], marker=marker, color=colour, linestyle="", markersize=5, label=label))
        shift = -0.13 if task == "digits" else 0.17
        for place, name in enumerate(names):
            exponent = own.get((task, name))
            interval = exponent.interval if exponent else None
            if interval is None:
                why = "not run" if exponent is None else "some stages did not settle"
                where = ("axes fraction", "data")
                axis.annotate(
                    f"{label}: {why}", (0.02, place + shift), xycoords=where, fontsize=7.5, va="center", color=colour
                )
                continue
            half = 0.0 if interval.high != interval.high else interval.high - interval.mean
            axis.errorbar(interval.mean, place + shift, xerr=half, marker=marker, color=colour, capsize=3, markersize=5)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) + 0.3, -0.6)
    axis.set_xlabel("exponent of the learning rate in the gradient norm (0: it stays)", fontsize=9)
    axis.legend(handles=handles, loc="lower left", ncols=3, fontsize=7.5, frameon=False)
    axis.set_title(said_of(own), fontsize=9.5, loc="left", fontweight="bold")
    axis.margins(x=0.08)
    tidy(axis, "x")


def said_of(own: dict[tuple[str, str], Exponent]) -> str:
    """The title of the exponents: in which nets the kinds without caution are as predicted."""
    parts = []
    for task, (label, _, _) in NETS.items():
        off = [
            abs(e.interval.mean - (e.predicted or 0.0))
            for c in DECAYING
            if not c.cautious and (e := own.get((task, c.name))) is not None and e.interval is not None
        ]
        if off:
            parts.append(f"{label}: {'as' if max(off) <= AS_PREDICTED else 'not as'} predicted")
    return "How gradients grow as the learning rate falls:\n" + "; ".join(parts)

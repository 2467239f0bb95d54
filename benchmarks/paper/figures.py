"""Figures by experiment, drawn from the rows of its CSV. Nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from benchmarks.drawing import GREY, PALETTE, plain_log_ticks, save, tidy
from benchmarks.studies.rows import Row, chosen, grouped, over_seeds

COLOURS = {"AdamS": PALETTE["blue"], "AdamW": PALETTE["red"], "Adam": PALETTE["green"], "SGD": PALETTE["pink"]}
SCHEDULED = ("AdamS", "AMSGradS", "SGDS")
ORDERED = ("#999999", PALETTE["blue"], PALETTE["red"], "#661100", "#000000")  # for lambdas, from small to large
BLUES = (PALETTE["sky"], PALETTE["blue"], "#003366")
PAPER_DECAY = 5e-4
SCALED = "AdamW is given 1000 λ."

NAMES = {
    "cifar10": "CIFAR-10",
    "cifar10-subset": "CIFAR-10, 10,000 images",
    "cifar100": "CIFAR-100",
    "fashion-mnist": "Fashion-MNIST",
    "penn-treebank": "Penn TreeBank",
    "penn-treebank-4000": "Penn TreeBank, 4,000 words",
    "resnet18": "ResNet18",
    "resnet34": "ResNet34",
    "vgg16": "VGG16, no BatchNorm",
    "vgg16-bn": "VGG16",
    "lstm": "LSTM",
    "small-resnet": "small ResNet",
    "medium-resnet": "small ResNet, twice as wide",
    "large-resnet": "small ResNet, four times as wide",
    "small-vgg": "small VGG, no BatchNorm",
    "small-vgg-bn": "small VGG, BatchNorm",
    "small-lstm": "small LSTM",
    "medium-lstm": "small LSTM, twice as wide",
}


def named(name: str) -> str:
    return NAMES.get(name, name)


def task_name(row: Row) -> str:
    return f"{named(row['model'])}, {named(row['data'])}"


def at_end(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["epoch"] == row["epochs"]]


def by_optimizer(rows: Iterable[Row]) -> dict[str, list[Row]]:
    return {name: of for (name,), of in grouped(rows, ["optimizer"]).items()}


def by_decay(rows: Iterable[Row]) -> dict[float, list[Row]]:
    return {decay: of for (decay,), of in sorted(grouped(rows, ["weight_decay"]).items())}


def panels(rows: int, columns: int, width: float = 3.6, height: float = 2.9) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width * columns, height * rows + 0.7), layout="constrained")
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def curves(
    axes: Axes, lines: Iterable[tuple[str, str, Iterable[Row]]], x: str, y: str, label: str, scale: float = 1.0
) -> None:
    """Draws for each name, colour and rows the mean over seeds, and a band from the least to the most of them."""
    for name, colour, rows in lines:
        xs, mean, least, most = over_seeds(rows, x, y)
        axes.plot(xs, scale * mean, color=colour, linewidth=1.8, marker="o", markersize=2.5, label=name)
        axes.fill_between(xs, scale * least, scale * most, color=colour, alpha=0.18, linewidth=0)
    axes.set_ylabel(label)
    axes.set_xlabel("λ" if x == "weight_decay" else x)
    if x == "weight_decay":
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted({float(v) for line in axes.lines for v in line.get_xdata()})))


def legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, handlelength=1.4)


def finish(figure: Figure, picture: Path, title: str, rows: list[Row], note: str = "", seeds: str = "") -> None:
    for axes in figure.axes:
        tidy(axes, grid=None)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                plain_log_ticks(axis)
            elif axis.get_label_text() == "epoch":
                axis.set_major_locator(MaxNLocator(integer=True))
        axes.title.set_fontsize(9.5)
    count = len({row["seed"] for row in rows})
    seeds = seeds or f"Mean of {count} seeds; bands reach from the least to the most of them."
    save(figure, picture, f"{seeds} {note}".strip(), title)


def of_optimizers(rows: Iterable[Row]) -> list[tuple[str, str, list[Row]]]:
    return [(name, COLOURS[name], of) for name, of in by_optimizer(rows).items()]


def draw_table(rows: list[Row], picture: Path) -> None:
    """Tables 1 and 2 as a picture: each seed's test error a dot, their mean a line, best optimizer on top."""
    tasks = grouped(at_end(rows), ["data", "model"])
    figure, [axes_of_tasks] = panels(1, len(tasks), width=5.2 if len(tasks) == 1 else 3.2, height=3.4)
    for axes, of_task in zip(axes_of_tasks, tasks.values(), strict=True):
        errors = {name: [100 * row["test_error"] for row in of] for name, of in by_optimizer(of_task).items()}
        names = sorted(errors, key=lambda name: fmean(errors[name]), reverse=True)
        colours = [COLOURS.get(name, COLOURS["AdamS"] if name in SCHEDULED else GREY) for name in names]
        dots_and_means(axes, [errors[name] for name in names], colours, ".2f")
        axes.set_yticks(range(len(names)), names)
        axes.set_title(task_name(of_task[0]))
        axes.set_xlabel("test error, %")
    count = len({row["seed"] for row in rows})
    said = f"A dot for each of {count} seeds, a line and a number for their mean."
    title = f"Test error at the end of training, λ = {rows[0]['weight_decay']:g}"
    finish(figure, picture, title, rows, seeds=said)


def dots_and_means(axes: Axes, values: list[list[float]], colours: list[str], form: str) -> None:
    for y, (of_line, colour) in enumerate(zip(values, colours, strict=True)):
        mean = fmean(of_line)
        axes.plot(of_line, [y] * len(of_line), "o", color=colour, markersize=4, alpha=0.6)
        axes.plot([mean] * 2, [y - 0.3, y + 0.3], color=colour, linewidth=2)
        place = ("axes fraction", "data")
        axes.annotate(f"{mean:{form}}", (1.0, y), xycoords=place, fontsize=7.5, va="center", color=colour)
    axes.grid(axis="y", color="#EEEEEE")


def draw_gradnorm(rows: list[Row], picture: Path) -> None:
    """Figures 2 and 3: gradient norms over training, for weight decays from none to strong."""
    groups = grouped(rows, ["model", "optimizer"])
    decays = sorted({row["weight_decay"] for row in rows})
    figure, grid = panels(2, len(groups), width=3.0, height=2.5)
    for column, ((model, optimizer), of_group) in enumerate(groups.items()):
        lines = [(f"λ = {decay:g}", ORDERED[decays.index(decay) % 5], of) for decay, of in by_decay(of_group).items()]
        for axes, measure in zip((grid[0][column], grid[1][column]), ("grad_norm", "squared_grad_norm"), strict=True):
            first = "gradient norm" if measure == "grad_norm" else "squared gradient norm, G"
            curves(axes, lines, "epoch", measure, "" if column else first)
            axes.set_yscale("log")
        grid[0][column].set_title(f"{optimizer}, {named(model)}")
    legend(grid[0][0])
    note = f"Data: {named(rows[0]['data'])}. {SCALED} Means over each epoch's minibatches."
    finish(figure, picture, "Gradient norms with weaker and stronger weight decay", rows, note)


def draw_schedule(rows: list[Row], picture: Path) -> None:
    """Figures 4 and 5: what the schedule does, and how it depends on lambda."""
    tasks = grouped(rows, ["data", "model"])
    figure, grid = panels(len(tasks), 4, width=3.1)
    for (norms, decay_axes, losses, strength), of_task in zip(grid, tasks.values(), strict=True):
        scheduled = by_decay(chosen(of_task, optimizer="AdamS"))
        lines = [
            (f"AdamW, λ = {decay:g}", COLOURS["AdamW"], of)
            for decay, of in by_decay(chosen(of_task, optimizer="AdamW")).items()
        ]
        shades = zip(scheduled.items(), BLUES, strict=False)
        lines += [(f"AdamS, λ = {decay:g}", blue, of) for (decay, of), blue in shades]
        curves(norms, lines, "epoch", "squared_grad_norm", "G")
        curves(decay_axes, lines, "epoch", "adamw_weight_decay", "decay, in AdamW's terms")
        curves(losses, lines, "epoch", "train_loss", "training loss")
        relative = [
            (f"λ = {decay:g}", blue, [{**row, "strength": row["adamw_weight_decay"] / decay} for row in of])
            for (decay, of), blue in zip(scheduled.items(), BLUES, strict=False)
        ]
        curves(strength, relative, "epoch", "strength", "1 / rms gradient")
        strength.set_title("strength of the schedule")
        norms.set_title(task_name(of_task[0]))
        for axes in (norms, decay_axes, losses, strength):
            axes.set_yscale("log")
        legend(norms)
        legend(strength)
    finish(figure, picture, "The schedule follows the gradient norm", rows, SCALED)


def draw_basin(rows: list[Row], picture: Path) -> None:
    """Figures 10, 11 and 16: test errors over learning rate and weight decay."""
    tasks = list(grouped(rows, ["data", "model"]).values())
    optimizers = list(by_optimizer(rows))
    figure, [axes_row] = panels(1, len(optimizers) + len(tasks), width=3.3)
    errors = {
        key: [100 * row["test_error"] for row in of]
        for key, of in grouped(tasks[0], ["optimizer", "lr", "weight_decay"]).items()
    }
    least = min(fmean(values) for values in errors.values())
    for axes, optimizer in zip(axes_row, optimizers, strict=False):
        lrs = sorted({lr for name, lr, _ in errors if name == optimizer})
        decays = sorted({decay for name, _, decay in errors if name == optimizer})
        means = np.array([[fmean(errors[optimizer, lr, decay]) for decay in decays] for lr in lrs])
        # All panels have one scale, which ends at twice the least error: worse is worse.
        axes.imshow(means, origin="lower", cmap="viridis", vmin=least, vmax=2 * least, aspect="auto")
        for (y, x), mean in np.ndenumerate(means):
            values = errors[optimizer, lrs[y], decays[x]]
            spread = f"\n±{stdev(values):.1f}" if len(values) > 1 else ""
            colour = "white" if mean < 1.5 * least else "black"
            axes.text(x, y, f"{mean:.1f}{spread}", ha="center", va="center", fontsize=7.5, color=colour)
        axes.set_xticks(range(len(decays)), [f"{decay:g}" for decay in decays])
        axes.set_yticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
        axes.set(title=optimizer, xlabel="λ", ylabel="lr")
    for axes, of_task in zip(axes_row[len(optimizers) :], tasks, strict=True):
        lines = of_optimizers(chosen(of_task, lr=1e-3))
        curves(axes, lines, "weight_decay", "test_error", "test error, %", scale=100)
        axes.set_title(f"{task_name(of_task[0])}, lr 0.001")
        legend(axes)
    title = f"Test error over learning rate and weight decay: {task_name(tasks[0][0])}"
    finish(figure, picture, title, rows, f"In the maps mean ± standard deviation, in %. {SCALED}")


def draw_cosine(rows: list[Row], picture: Path) -> None:
    """Figures 12 and 20: cosine annealing with warm restarts."""
    tasks = grouped(rows, ["data", "model"])
    figure, grid = panels(len(tasks), 3)
    for (test, train, over_decay), of_task in zip(grid, tasks.values(), strict=True):
        lines = of_optimizers(chosen(of_task, weight_decay=PAPER_DECAY))
        curves(test, lines, "epoch", "test_error", "test error, %", scale=100)
        curves(train, lines, "epoch", "train_loss", "training loss")
        ends = of_optimizers(at_end(of_task))
        curves(over_decay, ends, "weight_decay", "test_error", "test error at the end, %", scale=100)
        test.set_title(f"{task_name(of_task[0])}, λ = {PAPER_DECAY:g}")
        for axes in (test, train):
            axes.set_yscale("log")
        legend(test)
    finish(figure, picture, "Cosine annealing with warm restarts", rows, SCALED)


def draw_tuned(rows: list[Row], picture: Path) -> None:
    """Lambda chosen on validation data, what it comes to on test data, and the gradient norms of these runs."""
    figure, [[search, test, norms]] = panels(1, 3, width=4.0, height=3.4)
    tuning = chosen(at_end(rows), role="tuning")
    for optimizer, of_optimizer in by_optimizer(tuning).items():
        points = sorted((row["weight_decay"], measure(row)) for row in of_optimizer)
        search.plot(*zip(*points, strict=True), "o-", color=COLOURS[optimizer], markersize=3, label=optimizer)
        best = {row["weight_decay"] for row in chosen(rows, role="tuned", optimizer=optimizer)}
        ringed = [point for point in points if point[0] in best]
        search.plot(*zip(*ringed, strict=True), "o", color=COLOURS[optimizer], markersize=9, fillstyle="none")
    search.set_xscale("log")
    search.set(xlabel="λ", ylabel=measure_name(tuning[0], "validation"), title="validation, by which λ is chosen")
    legend(search)

    tested = grouped(chosen(rows, part="test"), ["optimizer", "role"])
    names = {key: setting_name(*key) for key in tested}
    colours = {key: {"no decay": GREY, "equal decay": PALETTE["sky"]}.get(key[1], COLOURS[key[0]]) for key in tested}
    upwards = list(reversed(tested))
    dots_and_means(
        test, [[measure(row) for row in at_end(tested[k])] for k in upwards], [colours[k] for k in upwards], ".1f"
    )
    ticks = [names[k] + ("" if k[1] == "no decay" else f",\nλ = {tested[k][0]['weight_decay']:g}") for k in upwards]
    test.set_yticks(range(len(upwards)), ticks)
    test.set_ylim(-0.6, len(upwards) - 0.4)
    test.set(xlabel=measure_name(tuning[0], "test"), title="test, at the end")

    lines = [(names[key], colours[key], of) for key, of in tested.items()]
    curves(norms, lines, "epoch", "squared_grad_norm", "squared gradient norm, G")
    norms.set_yscale("log")
    norms.set_title("gradient norms of these runs")
    note = f"Left: one seed, rings where λ was chosen. {SCALED}"
    finish(figure, picture, f"λ tuned on validation data: {task_name(rows[0])}", chosen(rows, part="test"), note)


def setting_name(optimizer: str, role: str) -> str:
    roles = {"no decay": "no decay", "equal decay": f"{optimizer}, AdamW's\ntotal decay"}
    return roles.get(role, f"{optimizer}, tuned")


def measure(row: Row) -> float:
    error: float = row["test_error"]
    return math.exp(row["test_loss"]) if math.isnan(error) else 100 * error


def measure_name(row: Row, part: str) -> str:
    return f"{part} perplexity" if math.isnan(row["test_error"]) else f"{part} error, %"


DRAWINGS: dict[str, Callable[[list[Row], Path], None]] = {
    **dict.fromkeys(("tuned", "tuned-unaugmented", "tuned-lstm"), draw_tuned),
    **dict.fromkeys(("table1", "table2"), draw_table),
    "gradnorm": draw_gradnorm,
    "schedule": draw_schedule,
    "basin": draw_basin,
    "cosine": draw_cosine,
}

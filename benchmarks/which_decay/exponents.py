"""From runs on stairs to exponents: how norms at equilibrium scale with the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean

import numpy as np

from benchmarks.studies.intervals import Interval, t_interval
from benchmarks.studies.rows import Row, chosen, grouped
from benchmarks.studies.runner import Record
from benchmarks.which_decay.contenders import BY_NAME
from benchmarks.which_decay.runs import Run, mean, rms

# E-foldings of the squared weight norm before the part of a stage that is measured. What is left of the difference
# between the start and the equilibrium is then 5% of it.
SETTLED = 3.0
FEWEST_LRS = 3

# `unit_grad_norm`, the gradient norm times the weight norm, is the gradient of the same net with weights of norm 1.
QUANTITIES = ("normed_grad_norm", "normed_weight_norm", "unit_grad_norm", "grad_norm")


def stages(run: Run, record: Record) -> Iterator[Row]:
    """Yields a row for each stage, measured in its second half. The first one is for coming to the equilibrium.

    `e_foldings` says how near. `balance` is 2 shrink |p|^2 / (lr^2 * number of weights), 1 where updates are a random
    walk as Adam makes it from noise.
    """
    schedule = run.schedule
    for number, of_stage in groupby(record["points"], key=lambda point: schedule.stage(point["step"])):
        points = list(of_stage)
        length, lr = schedule.lengths[number], schedule.lrs[number]
        middle = points[-1]["step"] - length // 2
        measured = [point for point in points if point["step"] > middle]
        # Cautious decay takes about half of what it is given.
        share = 0.5 if BY_NAME[run.contender].cautious else 1.0
        e_foldings = 2 * share * sum(point["summed_decay"] for point in points if point["step"] <= middle)
        shrink = sum(point["summed_decay"] for point in measured) / sum(point["steps"] for point in measured)
        grad_norm, weight_norm = rms(measured, "normed_grad_norm"), rms(measured, "normed_weight_norm")
        yield {
            **run.columns,
            "stage": number,
            "lr": lr,
            "length": length,
            "e_foldings": e_foldings,
            "settled": e_foldings >= SETTLED,
            "grad_norm": math.sqrt(mean(measured, "squared_grad_norm")),
            "normed_grad_norm": grad_norm,
            "normed_weight_norm": weight_norm,
            "unit_grad_norm": grad_norm * weight_norm,
            "shrink": shrink,  # in a step
            "balance": 2 * shrink * weight_norm**2 / (lr**2 * record["normed_parameters"]),
            "train_loss": mean(measured, "train_loss"),
        }


def settled(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if str(row["settled"]) == "True"]


def slopes(rows: Sequence[Row], quantity: str) -> list[float]:
    """Returns the exponent of each seed's power law, by least squares of logarithms, of one contender's stages.

    None are returned where too few stages have settled.
    """
    by_seed = [([row["lr"] for row in own], own) for own in grouped(settled(rows), ["seed"]).values()]
    if any(len(set(lrs)) < FEWEST_LRS for lrs, _ in by_seed):
        return []
    return [float(np.polyfit(np.log(lrs), np.log([row[quantity] for row in own]), 1)[0]) for lrs, own in by_seed]


def exponent(rows: Sequence[Row], quantity: str) -> Interval | None:
    return t_interval(found) if (found := slopes(rows, quantity)) else None


HEADINGS = (
    *("kind", "predicted", "gradient norm", "weight norm", "gradient x weight norm", "gradient norm, whole model"),
    *("seeds", "balance, from the largest lr to the smallest", "back at the first lr / first", "stages left out"),
)


def cells(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Of a task. For cautious decay the inverse of the balance is the share of the decay that acts.

    Where stairs lead back to where they began, gradients should be as they were there.
    """
    for (name,), own in grouped(rows, ["contender"]).items():
        measured, kept = [exponent(own, quantity) for quantity in QUANTITIES], settled(own)
        at_lr = sorted(grouped(kept, ["lr"]).items(), reverse=True)
        balance = [fmean(row["balance"] for row in of_lr) for _, of_lr in at_lr]
        first = {(row["seed"], row["lr"]): row["normed_grad_norm"] for row in chosen(kept, stage=0)}
        later = [row for row in kept if row["stage"] > 0 and (row["seed"], row["lr"]) in first]
        back = [row["normed_grad_norm"] / first[row["seed"], row["lr"]] for row in later]
        yield [
            name,
            f"{BY_NAME[name].exponent:+.2f}",
            *(f"{each.mean:+.2f} ± {each.high - each.mean:.2f}" if each else "not settled" for each in measured),
            str(len(grouped(kept, ["seed"]))),
            f"{balance[0]:.2f} to {balance[-1]:.2f}" if balance else "",
            f"{fmean(back):.2f}" if back else "",
            str(len(own) - len(kept)),
        ]

"""Tables of what was found, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.which_decay.contenders import ADAMW, DECAYING
from benchmarks.which_decay.exponents import Exponent, Stage
from benchmarks.which_decay.findings import Finding, mean_and_deviation

Cells = list[list[str]]

LOSS_HEADINGS = [
    "kind",
    "decay",
    "validation loss",
    "test loss",
    "from AdamW, validation",
    "from AdamW, test",
    "beyond seeds?",
    "total decay",
    "gradient norm, end",
    "end / middle",
    "weight norm",
]


def loss_cells(found: Sequence[Finding]) -> Cells:
    return [
        [
            f.contender,
            f"{f.decay:g}" + (f" ({f.at_edge})" if f.at_edge else ""),
            mean_and_deviation(f.validation_losses),
            mean_and_deviation(f.test_losses),
            *(
                "" if f.contender == ADAMW else difference.shown(4)
                for difference in (f.validation_difference, f.test_difference)
            ),
            f.verdict,
            f"{f.shrink:.2f}",
            f"{f.normed_grad_norm:.3f}",
            f"{f.growth:.2f}",
            f"{f.normed_weight_norm:.1f}",
        ]
        for f in found
    ]


EXPONENT_HEADINGS = [
    "kind",
    "predicted",
    "gradient norm",
    "weight norm",
    "gradient x weight norm",
    "gradient norm, whole model",
    "seeds",
    "balance, from the largest lr to the smallest",
    "back at the first lr / first",
    "stages left out",
]


def exponent_cells(found: Sequence[Exponent], of_runs: Sequence[Stage]) -> Cells:
    """For cautious decay the inverse of `balance` is the share of the decay that acts.

    Where stairs lead back to where they began, gradients should be as they were there.
    """
    cells = []
    for name in (contender.name for contender in DECAYING):
        own = {exponent.quantity: exponent for exponent in found if exponent.contender == name}
        if not own:
            continue
        first = own["normed_grad_norm"]
        settled = [stage for stage in of_runs if stage.contender == name and stage.settled]
        cells.append(
            [
                name,
                f"{first.predicted:+.2f}",
                *(
                    own[quantity].interval.shown(2)
                    for quantity in ("normed_grad_norm", "normed_weight_norm", "unit_grad_norm", "grad_norm")
                ),
                str(first.seeds),
                " to ".join(f"{balance_at(settled, end(s.lr for s in settled)):.2f}" for end in (max, min)),
                returned(settled),
                str(first.left_out),
            ]
        )
    return cells


def balance_at(settled: Sequence[Stage], lr: float) -> float:
    return fmean(stage.balance for stage in settled if stage.lr == lr)


def returned(settled: Sequence[Stage]) -> str:
    first = {stage.seed: stage for stage in settled if stage.stage == 0}
    back = [stage for stage in settled if stage.stage > 0 and stage.lr == first[stage.seed].lr]
    if not back:
        return ""
    return f"{fmean(stage.normed_grad_norm / first[stage.seed].normed_grad_norm for stage in back):.2f}"


def table(title: str, headings: Sequence[str], cells: Cells) -> Table:
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in headings:
        result.add_column(heading)
    for row in cells:
        result.add_row(*row)
    return result


def markdown(title: str, headings: Sequence[str], cells: Cells) -> str:
    lines = [f"### {title}", "", f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells), ""])

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
    "best decay",
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
            ""
            if f.contender == ADAMW
            else f"{f.validation_difference.mean:+.4f} ± {f.validation_difference.half_width:.4f}",
            "" if f.contender == ADAMW else f"{f.test_difference.mean:+.4f} ± {f.test_difference.half_width:.4f}",
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
    "balance",
    "stages left out",
]


def exponent_cells(found: Sequence[Exponent], of_runs: Sequence[Stage]) -> Cells:
    """`balance` is the mean over settled stages. For cautious decay its inverse is the share of decay that acts."""
    cells = []
    for name in (contender.name for contender in DECAYING):
        own = {exponent.quantity: exponent for exponent in found if exponent.contender == name}
        if not own:
            continue
        first = own["normed_grad_norm"]
        balances = [stage.balance for stage in of_runs if stage.contender == name and stage.settled]
        cells.append(
            [
                name,
                f"{first.predicted:+.2f}",
                *(
                    str(own[quantity].interval)
                    for quantity in ("normed_grad_norm", "normed_weight_norm", "unit_grad_norm", "grad_norm")
                ),
                str(first.seeds),
                f"{fmean(balances):.2f}",
                str(first.left_out),
            ]
        )
    return cells


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

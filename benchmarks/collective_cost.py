"""What the schedule's all-reduce costs on clusters that are not at hand, by a latency model. Measures nothing.

32 bytes take as long as their way: up a tree and down again. The constants are those by which NCCL itself predicts
its tree algorithm for small messages (its LL protocol): a start of 6.8 us, 0.6 us for a hop over NVLink and 5.0 us for
one over the network, with all GPUs of a node in a chain and the nodes in a binary tree:

    start + 2 * ((GPUs in a node - 1) * NVLink + log2(nodes) * network)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import write_rows

GPUS_IN_A_NODE = 8
RANKS = (8, 64, 512, 1_000, 4_096, 16_384, 100_000)
STEP_SECONDS = 1.0  # of a whole training step, for the share


@dataclass(frozen=True)
class Latencies:
    """In microseconds."""

    start: float
    nvlink: float
    network: float


# The slow ones are a factor of four: a busy network, adaptive routing, Ethernet.
FABRICS = {
    "NCCL's constants": Latencies(6.8, 0.6, 5.0),
    "four times slower hops": Latencies(6.8, 2.4, 20.0),
}


def all_reduce_us(ranks: int, latencies: Latencies, gpus_in_a_node: int = GPUS_IN_A_NODE) -> float:
    nodes = ceil(ranks / gpus_in_a_node)
    chain = min(ranks, gpus_in_a_node) - 1
    return latencies.start + 2 * (chain * latencies.nvlink + log2(nodes) * latencies.network)


def ways(ranks: int, latencies: Latencies) -> dict[str, float]:
    """What a step waits for, in microseconds. Tensor parallelism is within a node, and its group is the second.

    The lagged schedule's first all-reduce has a whole forward and backward pass to arrive. What waits for it, the
    second one, cannot be sent earlier.
    """
    one = all_reduce_us(ranks, latencies)
    across = all_reduce_us(max(1, ranks // GPUS_IN_A_NODE), latencies, gpus_in_a_node=1)
    within = all_reduce_us(min(ranks, GPUS_IN_A_NODE), latencies)
    return {
        "FSDP, exact": one,
        "FSDP, lagged": 0.0,
        "TP + FSDP, exact": across + within,
        "TP + FSDP, lagged": within,
        "DDP; sum known": 0.0,
    }


def predictions() -> list[dict[str, Any]]:
    return [
        {
            "fabric": fabric,
            "ranks": ranks,
            "way": way,
            "waits_us": microseconds,
            "share_of_a_step": microseconds * 1e-6 / STEP_SECONDS,
            "step_s": STEP_SECONDS,
            "gpus_in_a_node": GPUS_IN_A_NODE,
            "start_us": latencies.start,
            "nvlink_us": latencies.nvlink,
            "network_us": latencies.network,
        }
        for fabric, latencies in FABRICS.items()
        for ranks in RANKS
        for way, microseconds in ways(ranks, latencies).items()
    ]


def table(rows: Sequence[dict[str, Any]], fabric: str) -> Table:
    names = list(dict.fromkeys(row["way"] for row in rows))
    result = Table(title=f"{fabric}: microseconds that a step waits", title_justify="left", box=SIMPLE_HEAD)
    result.add_column("ranks", justify="right")
    for name in names:
        result.add_column(name, justify="right")
    for ranks in RANKS:
        own = {row["way"]: row["waits_us"] for row in rows if (row["fabric"], row["ranks"]) == (fabric, ranks)}
        result.add_row(f"{ranks:,}", *(f"{own[name]:.0f}" for name in names))
    return result


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    colours = {"FSDP, exact": "#0072B2", "TP + FSDP, exact": "#E69F00", "TP + FSDP, lagged": "#56B4E9"}
    styles = dict(zip(FABRICS, ("-", "--"), strict=True))
    for fabric, style in styles.items():
        for way, colour in colours.items():
            own = [row for row in rows if (row["fabric"], row["way"]) == (fabric, way)]
            ranks, waits = [row["ranks"] for row in own], [row["waits_us"] for row in own]
            axis.plot(ranks, waits, style, color=colour, marker="o", markersize=3, label=f"{way} ({fabric})")
    axis.axhline(0, color="#009E73", label="FSDP, lagged; DDP; sum known")
    axis.set_xscale("log")
    axis.set_xlabel("ranks")
    axis.set_ylabel("a step waits, microseconds")
    axis.set_title("The schedule's all-reduce by a latency model: nothing here was measured", fontsize=10, loc="left")
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=160)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collective_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = Path("results/collective_cost")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    console = Console()
    rows = predictions()
    for fabric in FABRICS:
        console.print(table(rows, fabric))
    csv_path = options.out / "collective_cost.csv"
    write_rows(csv_path, rows)
    plot(rows, csv_path.with_suffix(".png"))
    console.print(f"Wrote {csv_path} and {csv_path.with_suffix('.png')}", soft_wrap=True)


if __name__ == "__main__":
    main()

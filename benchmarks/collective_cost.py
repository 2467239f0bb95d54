"""What the schedule's all-reduce costs on clusters that are not at hand, by a latency model. Measures nothing.

32 bytes take as long as their way: up a tree and down again. The constants are those by which NCCL itself predicts
its tree algorithm for small messages (its LL protocol): a start of 6.8 us, 0.6 us for a hop over NVLink and 5.0 us for
one over the network, with all GPUs of a node in a chain and the nodes in a binary tree:

    start + 2 * ((GPUs in a node - 1) * NVLink + log2(nodes) * network)
"""

from __future__ import annotations

from math import ceil, log2
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.conditions import write_rows
from benchmarks.step_times.harness import Row, crossed

OUT = Path("results/collective_cost/collective_cost.csv")
GPUS_IN_A_NODE = 8
RANKS = (8, 64, 512, 1_000, 4_096, 16_384, 100_000)


class Latencies(NamedTuple):
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
    across = all_reduce_us(max(1, ranks // GPUS_IN_A_NODE), latencies, gpus_in_a_node=1)
    within = all_reduce_us(min(ranks, GPUS_IN_A_NODE), latencies)
    found = {"FSDP, exact": all_reduce_us(ranks, latencies), "TP + FSDP, exact": across + within}
    return {**found, "TP + FSDP, lagged": within, "FSDP, lagged; DDP; sum known": 0.0}


def predictions() -> list[Row]:
    return [
        {"fabric": fabric, "ranks": ranks, "way": way, "waits_us": waits, **latencies._asdict()}
        for fabric, latencies in FABRICS.items()
        for ranks in RANKS
        for way, waits in ways(ranks, latencies).items()
    ]


def main() -> None:
    rows = predictions()
    write_rows(OUT, rows)
    title = "Microseconds that a step waits, modelled"
    by = (lambda row: f"{row['fabric']}, {row['ranks']:,} ranks", lambda row: row["way"])
    Console(width=120).print(crossed(rows, title, *by, lambda row: f"{row['waits_us']:.0f}"))
    print(f"Wrote {OUT}")


if __name__ == "__main__":
    main()

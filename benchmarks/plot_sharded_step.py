"""Draws what a step on shards adds to AdamW's from its CSV. Measures nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.conditions import read_rows

# Okabe and Ito's palette, which readers with any kind of colour vision can tell apart.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#999999", "#D55E00", "#E69F00", "#CC79A7")


def plot(csv_path: Path, picture_path: Path | None = None) -> Path:
    rows = read_rows(csv_path)
    picture_path = picture_path or csv_path.with_suffix(".png")
    picture_path.parent.mkdir(parents=True, exist_ok=True)
    bars = [row for row in rows if row["contender"] != row["peer"]]
    names = list(dict.fromkeys(row["contender"] for row in bars))
    panels = list(dict.fromkeys((row["suite"], row["ranks"]) for row in bars))
    figure = Figure(figsize=(10, 0.9 + 2.0 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (suite, ranks) in zip(axes, panels, strict=True):
        own = {row["contender"]: row for row in bars if (row["suite"], row["ranks"]) == (suite, ranks)}
        for position, name in enumerate(names):
            row = own[name]
            # A bare all-reduce is no step: its own time, not what it adds to one.
            keys = ("median_s", "q1_s", "q3_s") if "all-reduce" in name else ("added_s", "added_q1_s", "added_q3_s")
            middle, low, high = (1e3 * float(row[key]) for key in keys)
            axis.barh(position, middle, color=COLOURS[position % len(COLOURS)], zorder=2)
            axis.errorbar(
                middle, position, xerr=[[middle - low], [high - middle]], color="#222222", capsize=2, zorder=3
            )
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()
        axis.axvline(0, color="black", linewidth=1)
        axis.grid(axis="x", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
        here = [row for row in rows if (row["suite"], row["ranks"]) == (suite, ranks)]
        peer = next(row for row in here if row["contender"] == row["peer"])
        took = 1e3 * float(peer["median_s"])
        axis.set_title(f"{suite}, {ranks} ranks: ms added to {peer['contender']} ({took:.1f})", fontsize=9, loc="left")
    first = rows[0]
    figure.supxlabel(
        "Medians of differences within a round, whiskers: quartiles; with clipping to AdamW fused + clip_grad_norm_. "
        f"FSDP2, gloo on loopback, one thread a rank, {first['cpu']}.\n"
        f"Load average {float(first['load_average']):.1f} on {first['cores']} cores. torch {first['torch']}, "
        f"swd_fused {first['swd_fused']}, Python {first['python']}, {first['date'][:10]}, {first['repeats']} repeats.",
        fontsize=7.5,
        color="#444444",
        x=0.01,
        ha="left",
    )
    figure.savefig(picture_path, dpi=160)
    return picture_path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_sharded_step", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=Path("results/sharded_step/sharded_step.csv"))
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: beside the CSV")
    options = parser.parse_args(arguments)
    print(f"Wrote {plot(options.csv, options.out)}")


if __name__ == "__main__":
    main()

"""Bytes for each parameter with `offload=True`, on the GPU and on the host, by counting tensors; and their picture.

Counted without a GPU: parameters stay there, the host has the state of the same step on the CPU, a twin of each
parameter, and where a step waits for all gradients these too. tests/backends/test_gpu_offload_life.py holds the page
that has these numbers to what torch's allocator has given out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from swd_fused import FusedAdamS, __version__

Row = dict[str, Any]

NUMEL = 10**6

CHOICES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16, master weights": (torch.bfloat16, {"master_weights": True}),
    "bfloat16, stochastic rounding, 8bit": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": "8bit"}),
}

# What is where: the parts of each bar, and the column that has its bytes.
BARS = {
    "GPU without offload": {"parameters": "gpu", "gradients": "gradient", "state": "state"},
    "GPU": {"parameters": "gpu"},
    "host": {"twins": "gpu", "gradients": "host_gradients", "state": "state"},
}

# Okabe and Ito's palette, as in the other picture of memory.
COLOURS = {"parameters": "#0072B2", "state": "#56B4E9", "gradients": "#E69F00", "twins": "#009E73"}


def sizes(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, float]:
    """Returns the bytes for each parameter of a model after a step."""
    param = torch.nn.Parameter(torch.randn(NUMEL).to(dtype))
    param.grad = torch.randn(NUMEL).to(dtype)
    optimizer = FusedAdamS([param], **options)
    optimizer.step()
    state = sum(tensor.untyped_storage().nbytes() for tensor in optimizer.state[param].values())
    parts = {"parameter": param.nbytes, "gradient": param.grad.nbytes, "state": state}
    return {name: round(size / NUMEL, 2) for name, size in parts.items()}


def rows() -> list[Row]:
    """Returns what is where, with gradients on their way to the host left out: they are up to 256 MB and one more."""
    result = []
    for choice, (dtype, options) in CHOICES.items():
        for schedule in ("exact", "lagged"):
            size = sizes(dtype, {**options, "schedule": schedule})
            waiting = size["gradient"] if schedule == "exact" else 0.0
            result.append(
                {
                    "choice": f"{choice}, {schedule}",
                    "without_offload": round(sum(size.values()), 2),
                    "gpu": size["parameter"],
                    "host": round(size["parameter"] + waiting + size["state"], 2),
                    "gradient": size["gradient"],
                    "state": size["state"],
                    "host_gradients": waiting,
                    "swd_fused": __version__,
                    "torch": torch.__version__,
                }
            )
    return result


def table(found: Sequence[Row]) -> Table:
    title = "Bytes for each parameter with offload=True"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    result.add_column("choice")
    for heading in ("GPU, without", "GPU", "host"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        result.add_row(row["choice"], *(f"{row[key]:g}" for key in ("without_offload", "gpu", "host")))
    return result


def plot(found: Sequence[Row], path: Path) -> Path:
    """Draws three bars for each choice: the GPU without offload, the GPU with it, and the host."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.75 * len(found)), layout="constrained")
    axis = figure.subplots()
    places, names = [], []
    for index, row in enumerate(found):
        for offset, (where, parts) in enumerate(BARS.items()):
            place, left = 3.8 * index + offset, 0.0
            for part, key in parts.items():
                axis.barh(place, row[key], left=left, color=COLOURS[part], height=0.9)
                left += row[key]
            axis.text(left + 0.1, place, f"{left:.4g}", va="center", fontsize=8)
            places.append(place)
            names.append(f"{row['choice']}: {where}" if offset == 0 else where)
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.spines[["top", "right", "left"]].set_visible(False)
    for part, colour in COLOURS.items():
        axis.barh(0, 0, color=colour, label=part)
    axis.legend(fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    figure.supxlabel(
        "Bytes for each parameter, by counting tensors, without activations and gradients on their way. "
        f"torch {found[0]['torch']}, swd_fused {found[0]['swd_fused']}.",
        fontsize=7.5,
        color="#444444",
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path

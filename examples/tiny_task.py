"""What all examples train: a small model on random data, in an order that does not depend on the number of ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 12
BATCH = 16  # of all ranks together
LR = 1e-2
MAX_GRAD_NORM = 0.5
DECAY: dict[str, Any] = {"adamw_weight_decay": 0.1, "calibration_steps": 4}  # AdamW's for 4 steps, then the schedule's


def new_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5)).to(dtype)


def dataset(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 9, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :5] * torch.arange(1, 6)) * torch.tensor([0.1, 0.3, 1.0, 3.0, 10.0])
    return TensorDataset(x.to(dtype), y.to(dtype))


def arguments(description: str | None, **choices: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0], help="default: %(default)s")
    parser.add_argument("--save", type=Path, metavar="PATH", help="where to put the trained weights")
    return parser.parse_args()


def save(path: Path | None, state_dict: dict[str, Any]) -> None:
    """On one rank only."""
    if path is not None:
        torch.save({name.removeprefix("model."): value for name, value in state_dict.items()}, path)

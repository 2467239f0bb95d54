"""Parameters with their optimizer, and what they hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.fuzz.layouts import exact_copy, same_bits
from tests.masters_definition import master_of

Snapshot = tuple[list[Tensor], list[dict[str, Tensor]], int]


class Trained(NamedTuple):
    params: list[torch.nn.Parameter]
    optimizer: FusedAdamS

    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state.get(param, {}) for param in self.params]

    def snapshot(self) -> Snapshot:
        states = [{key: exact_copy(value) for key, value in state.items()} for state in self.states()]
        return [exact_copy(param) for param in self.params], states, int(self.optimizer.skipped_steps)


def weights(param: Tensor, state: dict[str, Any]) -> Tensor:
    """What a step starts from: the master, but where someone has written to the parameter."""
    master = master_of(param, state)
    if "master_param" not in state:
        return master
    return torch.where(master.to(param.dtype) == param, master, param.to(master.dtype))


def same_state(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(same_bits(one[key], two[key]) for key in one)

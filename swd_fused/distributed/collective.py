"""Sums over all ranks, where shards are spread over any process groups: the only communication of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from swd_fused.distributed.sharding import Sharding
from swd_fused.tensors.hyper import scalar_dtype
from swd_fused.tensors.transfer import to_device


class Collective:
    """One all-reduce for each process group over which anything is sharded, whatever gradients this rank has.

    A rank must go through its groups in an order that all ranks share, or they wait for each other forever: by size
    and name, which all members of a group see alike. `last` are the groups that users gave. By then what differs from
    rank to rank (stages of a pipeline may be sharded in different ways) has been added up to a single row.
    """

    def __init__(self, shardings: Iterable[Sharding], last: Iterable[dist.ProcessGroup], device: torch.device) -> None:
        self.device = device
        self._shardings = {(), *shardings}
        given = set(last)
        self._groups = sorted(
            {group for sharding in self._shardings for group in sharding},
            key=lambda group: (group in given, -group.size(), group.group_name),
        )

    @property
    def is_local(self) -> bool:
        """Whether there is nothing to be told to others."""
        return not self._groups

    def start(self, rows: Sequence[tuple[Sharding, Tensor]], width: int) -> Reduction:
        """Begins to add up rows of `width` numbers, of which each belongs to a sharding."""
        parts: dict[Sharding, list[Tensor]] = {sharding: [] for sharding in self._shardings}
        for sharding, row in rows:
            parts[sharding].append(to_device(row, self.device))
        sums = {sharding: added(rows, width, self.device) for sharding, rows in parts.items()}
        return Reduction(sums, self._groups, self.device)

    def total(self, rows: Sequence[tuple[Sharding, Tensor]], width: int) -> Tensor:
        return self.start(rows, width).finish()

    def largest(self, value: Tensor) -> Tensor:
        """Returns the largest of all ranks' values. Where shardings differ, one group's result goes on to the next."""
        for group in self._groups:
            there = value.to(device_for(group, value), copy=True)
            dist.all_reduce(there, dist.ReduceOp.MAX, group)
            value = there.to(value.device)
        return value


class Reduction:
    """Sums on their way. Those over one group only travel at once; a second group waits for `finish`.

    It could not be started from a thread in the meantime: the ranks would disagree on what comes first, this or the
    model's own communication.
    """

    def __init__(self, sums: dict[Sharding, Tensor], groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._arrived = sums
        self._travelling: list[tuple[dist.Work, list[Sharding], Tensor]] = []
        self._order = {group: position for position, group in enumerate(groups)}
        self._groups = list(groups)
        self._device = device
        while self._groups and not any(self._groups[0] in sharding for sharding in self._shardings_travelling()):
            self._send()

    def finish(self) -> Tensor:
        self._receive()
        while self._groups:
            self._send()
            self._receive()
        return self._arrived[()]

    def abandon(self) -> None:
        """Waits for what is on its way, and sends nothing more."""
        self._receive()

    def _shardings_travelling(self) -> list[Sharding]:
        return [sharding for _, shardings, _ in self._travelling for sharding in shardings]

    def _send(self) -> None:
        group = self._groups.pop(0)
        shardings = [sharding for sharding in self._arrived if group in sharding]
        shardings.sort(key=lambda sharding: [self._order[other] for other in sharding])  # rows too must agree
        rows = torch.stack([self._arrived.pop(sharding) for sharding in shardings])
        rows = rows.to(device_for(group, rows))
        work = dist.all_reduce(rows, group=group, async_op=True)
        rest = [tuple(other for other in sharding if other is not group) for sharding in shardings]
        self._travelling.append((work, rest, rows))

    def _receive(self) -> None:
        for work, shardings, rows in self._travelling:
            work.wait()
            for sharding, row in zip(shardings, rows.to(self._device).unbind(), strict=True):
                self._arrived[sharding] = self._arrived[sharding] + row if sharding in self._arrived else row
        self._travelling = []


def added(rows: Sequence[Tensor], width: int, device: torch.device) -> Tensor:
    if not rows:
        return torch.zeros(width, dtype=scalar_dtype(device), device=device)
    return rows[0] if len(rows) == 1 else torch.stack(list(rows)).sum(0)


def device_for(group: dist.ProcessGroup, values: Tensor) -> torch.device:
    """Where the group can communicate: parameters that are offloaded to the CPU often have a group of GPUs only."""
    devices = [torch.device(device) for device in group._device_types]
    same = [device for device in devices if device.type == values.device.type]
    return values.device if same else devices[0]

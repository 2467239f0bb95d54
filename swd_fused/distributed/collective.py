"""Sums over all ranks, with shards spread over any process groups: a step's only communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swd_fused.devices.transfer import scalar_dtype, to_device
from swd_fused.distributed.sharding import ShardedOver, Sharding, is_distributed, over_of, sharding_in, sharding_of


class Collective:
    """Runs one all-reduce for each process group over which anything is sharded, whatever gradients this rank has.

    All ranks must use their groups in the same order, or they wait for each other forever. The order is by size and
    name, which all members of a group see alike. The groups that users gave, `last`, come last: by then rows that
    differ from rank to rank (stages of a pipeline may be sharded differently) have been added up to a single one.
    """

    def __init__(self, shardings: Iterable[Sharding], last: Iterable[dist.ProcessGroup], device: torch.device) -> None:
        self.device = device
        self._shardings = {(), *shardings}
        given = set(last)
        groups = sorted(
            {group for sharding in self._shardings for group in sharding},
            key=lambda group: (group in given, -group.size(), group.group_name),
        )
        self.places = {group: device_for(group, device) for group in groups}  # each group's device, in order
        self.is_local = not groups  # whether no communication is needed
        self.sums_over_given_groups = not given.isdisjoint(groups)

    def start(self, rows: Sequence[tuple[Sharding, Tensor]], width: int) -> Reduction:
        """Starts adding up rows of `width` numbers. Each row comes with its sharding."""
        sums: dict[Sharding, Tensor] = {}
        for sharding, row in rows:
            row = row if row.device == self.device else to_device(row, self.device)
            sums[sharding] = sums[sharding] + row if sharding in sums else row
        for sharding in self._shardings:
            if sharding not in sums:
                sums[sharding] = torch.zeros(width, dtype=scalar_dtype(self.device), device=self.device)
        return Reduction(sums, self)

    def total(self, rows: Sequence[tuple[Sharding, Tensor]], width: int) -> Tensor:
        return self.start(rows, width).finish()


def collective_of(params: Sequence[tuple[Tensor, Mapping[str, Any]]], sharded_over: ShardedOver | None) -> Collective:
    """Returns the all-reduces over parameters and their groups. Gradients do not count, so that all ranks agree."""
    device = params[0][0].device if params else torch.device("cpu")
    if not is_distributed():
        return Collective([], [], device)
    shardings = {sharding_in(group, param, sharded_over) for param, group in params}
    if sharded_over is not None:  # a rank without any parameters must take part too
        shardings.add(sharding_of(None, sharded_over))
    given = [sharded_over, *(over_of(group, sharded_over) for _, group in params)]
    return Collective(shardings, [over.group for over in given if over is not None], device)


class Reduction:
    """Holds sums that are being reduced. All-reduces start at once, except one that needs another's result: `finish`
    starts it.

    A thread could not start it earlier: ranks would disagree on whether it or the model's communication comes first.
    """

    def __init__(self, sums: dict[Sharding, Tensor], ranks: Collective) -> None:
        self._arrived = sums
        self._travelling: list[tuple[dist.Work, list[Sharding], Tensor]] = []
        self._awaited: set[dist.ProcessGroup] = set()  # groups over which travelling sums must still be reduced
        self._groups, self._places, self._device = list(ranks.places), ranks.places, ranks.device
        while self._groups and self._groups[0] not in self._awaited:
            self._send()

    def finish(self) -> Tensor:
        self._receive()
        while self._groups:
            self._send()
            self._receive()
        return self._arrived[()]

    def abandon(self) -> None:
        """Waits for travelling sums, and sends no more. If a peer has died, the next reduction will say so."""
        for work, _, _ in self._travelling:
            with suppress(RuntimeError):
                work.wait()
        self._travelling = []

    def _send(self) -> None:
        group = self._groups.pop(0)
        shardings = [sharding for sharding in self._arrived if group in sharding]
        if len(shardings) > 1:  # ranks must also agree on the order of rows
            order = list(self._places)
            shardings.sort(key=lambda sharding: [order.index(other) for other in sharding])
        rows = torch.stack(list(map(self._arrived.pop, shardings))).to(self._places[group])
        work = dist.all_reduce(rows, group=group, async_op=True)
        rest = []
        for sharding in shardings:
            place = sharding.index(group)
            rest.append(sharding[:place] + sharding[place + 1 :])
            self._awaited.update(rest[-1])
        self._travelling.append((work, rest, rows))

    def _receive(self) -> None:
        for work, shardings, rows in self._travelling:
            work.wait()
            for sharding, row in zip(shardings, rows.to(self._device).unbind(), strict=True):
                self._arrived[sharding] = self._arrived[sharding] + row if sharding in self._arrived else row
        self._travelling = []


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Returns a device on which the group can communicate. Parameters offloaded to the CPU often have a GPU group."""
    devices = [torch.device(other) for other in group._device_types]
    return device if any(other.type == device.type for other in devices) else devices[0]

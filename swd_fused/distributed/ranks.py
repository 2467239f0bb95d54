"""The parameters of all ranks: how this rank's are sharded, and the collective that adds up over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from swd_fused.distributed.collective import Collective
from swd_fused.distributed.sharding import ShardedOver, Sharding, is_distributed, is_dtensor, sharding_of
from swd_fused.distributed.wrappers import refuse_unknown_shards

Group = Mapping[str, Any]


class Ranks:
    """`sharded_over` holds for groups of parameters that have no process group of their own."""

    def __init__(self, sharded_over: ShardedOver | None) -> None:
        self._sharded_over = sharded_over
        self._params: list[Tensor] = []
        self._shardings: dict[int, Sharding] = {}  # by id of these, since asking a mesh takes long
        self._process_groups: list[object] = []  # as the parameters' groups have them
        self._collective: Collective | None = None
        self._checked = False
        self._local: Collective | None = None  # where there are no other ranks

    def sharding_of(self, param: Tensor, group: Group) -> Sharding:
        if not is_distributed():
            return ()
        known = self._shardings.get(id(param))
        return sharding_of(param, self._over(group)) if known is None else known

    def are_regrouped(self, groups: Sequence[Group]) -> bool:
        """Tells whether someone has set other process groups for the same parameters."""
        if self._collective is None or not is_distributed():
            return False
        process_groups = _process_groups(groups)
        if len(process_groups) == len(self._process_groups) and all(map(is_, process_groups, self._process_groups)):
            return False
        for group in groups:
            self._over(group)  # refuses nonsense before anything is given up for it
        return _are_the_same(list(chain.from_iterable(group["params"] for group in groups)), self._params)

    def collective(self, groups: Sequence[Group], check: bool) -> Collective:
        """Returns the all-reduces over all parameters, with a gradient or not: all ranks must come to the same.

        `check` is for steps whose result would be wrong if a parameter were a shard without looking like one.
        """
        if not is_distributed():
            firsts = [(param, group) for group in groups for param in group["params"][:1]]
            moved = firsts and self._local is not None and self._local.device != firsts[0][0].device
            if self._local is None or moved:
                self._local = self.collective_of(firsts)
            return self._local
        params = list(chain.from_iterable(group["params"] for group in groups))
        if self._collective is None or not _are_the_same(params, self._params):
            by_group = [(param, group) for group in groups for param in group["params"]]
            self._shardings = {}
            self._shardings = {id(param): self.sharding_of(param, group) for param, group in by_group}
            self._params, self._process_groups = params, _process_groups(groups)
            self._collective = self.collective_of(by_group)
            self._checked = False
        if check and not self._checked:
            # A group that says None for itself is known to be whole.
            unsaid = [group for group in groups if self._over(group) is None and "process_group" not in group]
            plain = [param for group in unsaid for param in group["params"] if not is_dtensor(param)]
            if plain:
                refuse_unknown_shards(plain)
            self._checked = True
        return self._collective

    def collective_of(self, params: Sequence[tuple[Tensor, Group]]) -> Collective:
        shardings = {self.sharding_of(param, group) for param, group in params}
        given = [self._sharded_over, *(self._over(group) for _, group in params)]
        if self._sharded_over is not None:  # a rank may have no parameters at all, and must take part
            shardings.add(sharding_of(None, self._sharded_over))
        device = params[0][0].device if params else torch.device("cpu")
        return Collective(shardings, [over.group for over in given if over is not None], device)

    def _over(self, group: Group) -> ShardedOver | None:
        return ShardedOver.checked(group.get("process_group", self._sharded_over))


def _process_groups(groups: Sequence[Group]) -> list[object]:
    return [group.get("process_group", "the optimizer's") for group in groups]


def _are_the_same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))

"""The ranks that share an optimizer's parameters, from what its groups and tensors say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swd_fused.core.values import Group
from swd_fused.distributed.collective import Collective
from swd_fused.distributed.sharding import ShardedOver, Sharding, is_distributed, sharding_of


def sharding_in(group: Group, param: Tensor, sharded_over: ShardedOver | None) -> Sharding:
    """Returns the process groups over which a parameter is sharded. A group's own `process_group` comes first."""
    if not is_distributed():
        return ()
    return sharding_of(param, over_of(group, sharded_over))


def over_of(group: Group, sharded_over: ShardedOver | None) -> ShardedOver | None:
    """Returns the process group that a group of parameters is sharded over: its own, or the optimizer's."""
    return ShardedOver.checked(group.get("process_group", sharded_over))


def collective_of(params: Sequence[tuple[Tensor, Group]], sharded_over: ShardedOver | None) -> Collective:
    """Returns the all-reduces over all parameters, with a gradient or not: all ranks must come to the same."""
    device = params[0][0].device if params else torch.device("cpu")
    if not is_distributed():
        return Collective([], [], device)
    shardings = {sharding_in(group, param, sharded_over) for param, group in params}
    if sharded_over is not None:  # a rank may have no parameters at all, and must take part
        shardings.add(sharding_of(None, sharded_over))
    given = [sharded_over, *(over_of(group, sharded_over) for _, group in params)]
    return Collective(shardings, [over.group for over in given if over is not None], device)


def unsaid_params(groups: Sequence[Group], sharded_over: ShardedOver | None) -> list[Tensor]:
    """Returns the parameters of groups of which nobody has said over whom to sum. One that says None is whole."""
    unsaid = [group for group in groups if "process_group" not in group and sharded_over is None]
    return [param for group in unsaid for param in group["params"]]

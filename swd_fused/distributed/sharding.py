"""Shards of tensors: their process groups, this rank's part, and conversion to and from DTensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The process groups over which a tensor's shards are spread; empty if this process has the whole tensor.
Sharding = tuple["dist.ProcessGroup", ...]


class ShardedOver:
    """Holds a process group so that optimizers can be copied. Pickling one fails with torch's own error."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @staticmethod
    def checked(group: object) -> ShardedOver | None:
        """Checks and wraps a process group that a user passed. Returns None or a wrapped one as it is."""
        if group is None or isinstance(group, ShardedOver):
            return group
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"FusedAdamS got process_group={group!r}, wanted a torch.distributed.ProcessGroup or None. For a "
                "DeviceMesh pass mesh.get_group(), for all ranks torch.distributed.group.WORLD."
            )
        return ShardedOver(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedOver:
        return self

    def __repr__(self) -> str:
        return f"ranks {dist.get_process_group_ranks(self.group)}"


# For a thousand tensors, comparing the set of their types is faster than asking one by one.
PLAIN_TYPES = {Tensor, torch.nn.Parameter}


def is_dtensor(tensor: Tensor) -> bool:
    # Importing DTensor takes longer than importing torch's optimizers, and any code with a DTensor has imported it.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def sharding_of(param: Any, over: ShardedOver | None) -> Sharding:
    """Returns the process groups over which a parameter is sharded, except groups of a single rank."""
    groups = []
    if is_dtensor(param):
        _check_mesh(param, over)
        for dim, placement in enumerate(param.placements):
            if placement.is_partial():
                raise ValueError(
                    f"FusedAdamS got a parameter of shape {tuple(param.shape)} with placements {param.placements}, "
                    "wanted Shard and Replicate only: a partial sum is no weight. Redistribute it."
                )
            if not placement.is_replicate():  # is_shard() is False for torch's strided shards
                groups.append(param.device_mesh.get_group(dim))
    if over is not None:
        groups.append(over.group)
    return tuple(group for group in dict.fromkeys(groups) if group.size() > 1)


def over_of(group: Mapping[str, Any], sharded_over: ShardedOver | None) -> ShardedOver | None:
    """Returns the process group that a group of parameters is sharded over: its own, or the optimizer's."""
    return ShardedOver.checked(group.get("process_group", sharded_over))


def sharding_in(group: Mapping[str, Any], param: Tensor, sharded_over: ShardedOver | None) -> Sharding:
    """Returns the process groups over which a parameter is sharded that belongs to this parameter group."""
    return sharding_of(param, over_of(group, sharded_over)) if is_distributed() else ()


def _check_mesh(param: Any, over: ShardedOver | None) -> None:
    mesh, rank = param.device_mesh, dist.get_rank()
    ranks = set(mesh.mesh.flatten().tolist())
    if over is None:
        if rank not in ranks:
            raise ValueError(
                f"FusedAdamS got a parameter of shape {tuple(param.shape)} on ranks {sorted(ranks)} but not on this "
                f"rank, {rank}, whose mean would differ from theirs. Pass process_group=, the ranks to sum over."
            )
    elif ranks.intersection(dist.get_process_group_ranks(over.group)) - {rank}:
        raise ValueError(
            f"FusedAdamS got a DTensor of shape {tuple(param.shape)} on ranks {sorted(ranks)} with a process_group of "
            f"{over}: it would be counted twice, since a DTensor knows its own ranks. Leave process_group out, or give "
            "it to the parameter groups that need it."
        )


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns a DTensor's local tensor; any other tensor itself."""
    # `to_local()` makes a new view in each call, which could not be recognised by identity.
    if not is_dtensor(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def dtensors_in(tensors: Sequence[Tensor]) -> list[Any]:
    return [] if set(map(type, tensors)) <= PLAIN_TYPES else list(filter(is_dtensor, tensors))


def local_grads(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the gradients of the parameters' local tensors."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is not None and set(map(type, chain(params, grads))) == {module.DTensor}:
        locals_ = list(map(attrgetter("_local_tensor"), grads))
        are_placed_alike = all(map(eq, map(_PLACEMENTS, params), map(_PLACEMENTS, grads))) and all(
            map(is_, map(_MESH, params), map(_MESH, grads))
        )
        if are_placed_alike and set(map(type, locals_)) == {Tensor}:  # and no tensor is still being communicated
            return locals_
    advice = "Call zero_grad() after sharding a model."
    pairs = zip(params, grads, strict=True)
    return [None if grad is None else redistributed_like(param, grad, advice) for param, grad in pairs]


_PLACEMENTS, _MESH = attrgetter("_spec.placements"), attrgetter("_spec.mesh")


def sharded_like(param: Any, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Returns a local tensor as a DTensor with the parameter's placements, or as it is if that is no DTensor.

    The whole tensor has the parameter's shape and strides, or the given shape in row-major order.
    """
    if not is_dtensor(param):
        return local
    # DTensor.from_local would move it to the mesh's type of device, but CPUOffloadPolicy keeps parameters on the CPU.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    whole = param if shape is None else torch.empty(shape, device="meta")
    spec = replace(param._spec, tensor_meta=TensorMeta(whole.shape, whole.stride(), local.dtype))
    sharded: Tensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return sharded


LOAD = (
    "Load saved state with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict, which shards it as the "
    "model is sharded. It does not convert moments: load with the state_dtype that was saved, then set state_dtype in "
    "the optimizer's groups."
)


def redistributed_like(param: Any, value: Any, advice: str = LOAD) -> Tensor:
    """Returns this rank's part of saved state, or of a gradient, after sharding it as the parameter is."""
    if is_dtensor(param) != is_dtensor(value):
        raise ValueError(
            f"FusedAdamS got a {type(value).__name__} for a {type(param).__name__} parameter of shape "
            f"{tuple(param.shape)}, wanted both sharded or both not. {advice}"
        )
    if is_dtensor(value) and (value.placements != param.placements or value.device_mesh != param.device_mesh):
        value = value.redistribute(param.device_mesh, param.placements)  # a gradient of partial sums, for instance
    return local_tensor(value)


is_distributed: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False

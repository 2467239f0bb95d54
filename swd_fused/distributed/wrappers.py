"""Wrappers that hand an optimizer plain tensors which are shards: without being told, the mean would be the shard's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from swd_fused.distributed.sharding import is_distributed, is_dtensor

# By module of the class whose method calls `step`, and what to do there.
SUM_OVER = "pass process_group=, the group over which it shards"
CALLERS = {
    "torch.distributed.optim.zero_redundancy_optimizer": f"{SUM_OVER}, by "
    "functools.partial(FusedAdamS, process_group=...), since it keeps an argument of that name to itself",
    "fairscale.optim.oss": SUM_OVER,
    "megatron.core.optimizer.distrib_optimizer": f"{SUM_OVER}, and total_numel=, since it pads",
    "deepspeed.runtime.zero": "call swd_fused.distributed.deepspeed.follow(engine) after "
    "deepspeed.initialize, which tells the optimizer the gradients' norm",
}
MARKS = {
    "_fsdp_flattened": ("FullyShardedDataParallel", f"{SUM_OVER}, and total_numel= unless use_orig_params=True"),
    "tensor_model_parallel": ("Megatron's tensor parallelism", SUM_OVER),
}
FRAMES = 20


def refuse_unknown_shards(params: Iterable[Tensor], needed: str) -> None:
    """Raises if plain tensors are shards by their marks or by who calls `step`. Slow: call it when `params` changed.

    `needed` is what the step would get wrong of them.
    """
    if not is_distributed() or dist.get_world_size() == 1:
        return
    found = _mark(params) or _caller()
    if found is not None:
        who, advice = found
        raise RuntimeError(
            f"FusedAdamS got plain tensors from {who}, which are shards: {needed} would be that of this rank's, and "
            f"wrong. To have it over the whole model, {advice}. Where nothing is sharded after all pass a "
            "process_group of this rank alone."
        )


def refuse_late_reduction(params: Iterable[Tensor]) -> None:
    """Raises where gradients are still to be reduced over ranks when autograd has accumulated them, for releasing them
    then. Looks at all objects there are, since DistributedDataParallel leaves no mark on parameters: some 0.1 s."""
    name = late_reducer(list(params))
    if name is not None:
        raise RuntimeError(
            f"release_gradients got parameters of {name}, which reduces gradients over ranks only after autograd has "
            "accumulated them: each rank would step with its own. Use FSDP2 (fully_shard; without sharding a mesh of "
            "two dimensions, the second of size 1), or step() after backward()."
        )


def refuse_ranks_of_offloaded(params: Iterable[Tensor]) -> None:
    """Raises where gradients that are copied to the host in the backward pass are not those of all ranks."""
    params = list(params)
    if not params:
        return
    name = "DTensors" if any(map(is_dtensor, params)) else late_reducer(params)
    if name is None and is_distributed() and dist.get_world_size() > 1:
        name = f"{dist.get_world_size()} ranks"
    if name is not None:
        raise RuntimeError(
            f"FusedAdamS got offload=True for parameters of {name}, wanted those of one process: gradients are taken "
            "away in the backward pass, before they are reduced. Leave offload out, and shard the model by FSDP2 with "
            "fully_shard(..., offload_policy=CPUOffloadPolicy()), which keeps parameters and state on the CPU."
        )


def late_reducer(params: list[Tensor]) -> str | None:
    """Returns the name of a wrapper that reduces gradients after autograd has accumulated them."""
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    found = _mark(params)
    if found is not None:
        return found[0]
    if module is not None and is_distributed():
        wrapper = module.DistributedDataParallel
        own = set(map(id, params))
        for other in gc.get_objects():
            # By type: isinstance would ask proxies, which may import or compute something to answer.
            if issubclass(type(other), wrapper) and own.intersection(map(id, other.parameters())):
                return str(wrapper.__name__)
    return None


def _mark(params: Iterable[Tensor]) -> tuple[str, str] | None:
    for param in params:
        for attribute, found in MARKS.items():
            if getattr(param, attribute, False):
                return found
    return None


def _caller() -> tuple[str, str] | None:
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        owner = type(frame.f_locals.get("self"))
        for module, advice in CALLERS.items():
            if str(owner.__module__).startswith(module):
                return owner.__name__, advice
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None

"""Refuses wrappers that pass an optimizer only a part of the model: the mean would silently be that part's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from swd_fused.distributed.collective import Collective
from swd_fused.distributed.sharding import is_distributed, is_dtensor

SUM_OVER = "pass process_group=, the group over which it shards"
# Advice, by the module or package that calls `step`.
CALLERS = {
    "torch.distributed.optim.zero_redundancy_optimizer": f"{SUM_OVER}, by functools.partial(FusedAdamS, "
    "process_group=...), since it keeps an argument of that name to itself",
    "fairscale.optim.oss": SUM_OVER,
    "megatron.core.optimizer.distrib_optimizer": f"{SUM_OVER}, and total_numel=, since it pads",
    "deepspeed.runtime.zero": "call swd_fused.distributed.deepspeed.follow(engine) after deepspeed.initialize",
}
# The library that shards, and advice, by the attribute with which it marks parameters.
MARKS = {
    "_fsdp_flattened": ("FullyShardedDataParallel", f"{SUM_OVER}, and total_numel= unless use_orig_params=True"),
    "tensor_model_parallel": ("Megatron's tensor parallelism", SUM_OVER),
}
# Modules that make one optimizer for each tensor.
PER_TENSOR = ("torchao.optim.cpu_offload", "torchao.prototype.low_bit_optim.cpu_offload")
FRAMES = 20  # how many frames of the stack are searched for callers


def refuse_unknown_shards(params: Iterable[Tensor], needed: str) -> None:
    """Raises if marks on plain tensors, or the caller of `step`, show that they are shards. `needed` names the quantity
    that would be wrong. Slow: call it only when `params` changed.
    """
    if not is_distributed() or dist.get_world_size() == 1:
        return
    caller = _caller(CALLERS)
    who, advice = _mark(params) or (caller, CALLERS.get(caller or ""))
    if advice is not None:
        raise RuntimeError(
            f"FusedAdamS got plain tensors from {who}, which are shards: {needed} would be that of this rank's, and "
            f"wrong. To have it over the whole model, {advice}. Where nothing is sharded pass a process_group of this "
            "rank alone."
        )


def refuse_tensor_alone(needed: str) -> None:
    """Raises if a wrapper calls the constructor once per tensor. Nothing marks these tensors, so the caller decides."""
    caller = _caller(PER_TENSOR)
    if caller is not None:
        raise ValueError(
            f"FusedAdamS was made by {caller}, whose CPUOffloadOptimizer makes one optimizer for each tensor: {needed} "
            "would be that of a tensor, and wrong. To keep state in host memory use FSDP2's fully_shard(model, "
            "offload_policy=CPUOffloadPolicy()), on one process too."
        )


def refuse_stage_alone(params: Iterable[Tensor], unsaid: Iterable[Tensor], needed: str) -> None:
    """Raises if an optimizer has the parameters of some stages of a pipeline only, and sums would cover only these.

    `unsaid` are parameters without a stated process group. Stages do not mark parameters, so this looks at all objects
    of the process. It takes some 0.1 s, and only if torch's pipelining has been imported.
    """
    module: Any = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None or not is_distributed():
        return
    stages = {stage: set(map(id, stage.submod.parameters())) for stage in _instances(module._PipelineStageBase)}
    own, asked = set(map(id, params)), set(map(id, unsaid))
    for stage, ids in stages.items():
        if stage.group_size > 1 and asked & ids:
            raise RuntimeError(
                f"FusedAdamS got parameters of stage {stage.stage_index} of a pipeline of {stage.num_stages}: {needed} "
                "would be that of this rank's stages, and wrong. To have it over the whole model pass process_group=, "
                "the pipeline's group, as pp_mesh.get_group() has it; where each stage is a model of its own, that of "
                "this rank alone."
            )
    here = [stage for stage, ids in stages.items() if own & ids]
    pipelines = {(stage.group, stage.num_stages) for stage in here}
    indices = {stage.stage_index for stage in here}  # another model's pipeline has the same indices on this rank
    others = [it for it in stages if (it.group, it.num_stages) in pipelines and it.stage_index not in indices]
    groups = [vars(each).get("param_groups", ()) for each in _instances(sys.modules["swd_fused"].FusedAdamS)]
    optimized = {id(param) for of_one in groups for group in of_one for param in group["params"]}
    if any(stages[other] & optimized - own for other in others):
        raise RuntimeError(
            f"FusedAdamS got parameters of stages {sorted(indices)} of a pipeline of {here[0].num_stages}, and another "
            f"FusedAdamS on this rank those of others: {needed} would be that of some stages, and wrong. Build one "
            "FusedAdamS for all stages that a rank has."
        )


def refuse_late_reduction(params: Sequence[Tensor]) -> None:
    """Raises if ranks reduce gradients only after autograd has accumulated them, when gradient release frees them.

    DistributedDataParallel does not mark parameters, so this looks at all objects of the process, in some 0.1 s.
    """
    own = set(map(id, params))
    name, _ = _mark(params) or (None, None)
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    wrappers = _instances(module.DistributedDataParallel) if module is not None and is_distributed() else []
    if name is None and any(own.intersection(map(id, wrapper.parameters())) for wrapper in wrappers):
        name = "DistributedDataParallel"
    if name is not None:
        raise RuntimeError(
            f"release_gradients got parameters of {name}, which reduces gradients over ranks only after autograd has "
            "accumulated them: each rank would step with its own. Use FSDP2 (fully_shard; without sharding a mesh of "
            "two dimensions, the second of size 1), or step() after backward()."
        )


def refuse_scaler(params: Iterable[Any], ranks: Collective) -> None:
    """Raises if only some ranks would learn of an infinity: GradScaler shares it on the first gradient's mesh only."""
    if ranks.sums_over_given_groups or len({param.device_mesh for param in params if is_dtensor(param)}) > 1:
        raise RuntimeError(
            "FusedAdamS got a step from a GradScaler with parameters on several device meshes or with a process_group, "
            "wanted one mesh: only some ranks would lower their loss scale after an infinity. Train in bfloat16."
        )


def _mark(params: Iterable[Tensor]) -> tuple[str, str] | None:
    marks = (found for param in params for attribute, found in MARKS.items() if getattr(param, attribute, False))
    return next(marks, None)


def _caller(modules: Iterable[str]) -> str | None:
    """Returns the first of these modules or packages in the call stack.

    Does not look at `self` in frames: reading a frame's locals keeps them alive while it runs, even an old optimizer.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            break
        name = frame.f_globals.get("__name__", "")
        for module in modules:
            if name.startswith(module):
                return module
        frame = frame.f_back
    return None


def _instances(kind: type) -> list[Any]:
    # By type, since isinstance asks proxies for their class, and these may import or compute something to answer.
    return [other for other in gc.get_objects() if issubclass(type(other), kind)]

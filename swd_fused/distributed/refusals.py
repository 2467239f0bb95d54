"""Refuses wrappers that give an optimizer a part of the model, so that the mean would silently be that part's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from swd_fused.distributed.sharding import is_distributed

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
# Modules that make one optimizer for each tensor.
PER_TENSOR = ("torchao.optim.cpu_offload", "torchao.prototype.low_bit_optim.cpu_offload")


def refuse_unknown_shards(params: Iterable[Tensor], needed: str) -> None:
    """Raises if marks on plain tensors, or who calls `step`, show that they are shards. `needed` names the sum that
    would be wrong. Slow: call it when `params` changed.
    """
    if not is_distributed() or dist.get_world_size() == 1:
        return
    found = _mark(params)
    for frame in _callers() if found is None else ():
        owner = type(frame.f_locals.get("self"))
        advices = [advice for module, advice in CALLERS.items() if str(owner.__module__).startswith(module)]
        if advices:
            found = owner.__name__, advices[0]
            break
    if found is not None:
        who, advice = found
        raise RuntimeError(
            f"FusedAdamS got plain tensors from {who}, which are shards: {needed} would be that of this rank's, and "
            f"wrong. To have it over the whole model, {advice}. Where nothing is sharded after all pass a "
            "process_group of this rank alone."
        )


def refuse_tensor_alone(needed: str) -> None:
    """Raises in the constructor if a wrapper calls it for each tensor, whose tensors are ordinary ones."""
    # Not by `self`: to look at a frame's locals keeps them alive as long as it runs, an older optimizer among them.
    caller = next((name for frame in _callers() if (name := frame.f_globals.get("__name__")) in PER_TENSOR), None)
    if caller is not None:
        raise ValueError(
            f"FusedAdamS was made by {caller}, whose CPUOffloadOptimizer makes one optimizer for each tensor: {needed} "
            "would be that of a tensor, and wrong. To keep state in host memory use FSDP2's fully_shard(model, "
            'offload_policy=CPUOffloadPolicy()), on one process too; or decay="decoupled" without max_grad_norm and '
            "skip_nonfinite, which depends on nothing but the tensor."
        )


def refuse_stage_alone(params: Iterable[Tensor], unsaid: Iterable[Tensor], needed: str) -> None:
    """Raises if an optimizer's parameters are those of some stages of a pipeline, and sums would be over these only.

    `unsaid` are parameters without a process group. Stages leave no mark on parameters, so this looks at all objects
    of the process: some 0.1 s, and only where torch's pipelining has been imported.
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
                "the pipeline's group, as pp_mesh.get_group() has it. Where each stage is a model of its own after all "
                "pass a process_group of this rank alone."
            )
    here = [stage for stage, ids in stages.items() if own & ids]
    kinds = {(stage.group, stage.num_stages) for stage in here}
    indices = {stage.stage_index for stage in here}
    # A pipeline of another model has the same indices on this rank.
    others = [it for it in stages if (it.group, it.num_stages) in kinds and it.stage_index not in indices]
    groups = [vars(other).get("param_groups", ()) for other in _instances(sys.modules["swd_fused"].FusedAdamS)]
    optimized = [{id(param) for group in of_one for param in group["params"]} for of_one in groups]
    if any(stages[stage] & ids and not own & ids for stage in others for ids in optimized):
        raise RuntimeError(
            f"FusedAdamS got parameters of stages {sorted(indices)} of a pipeline of {here[0].num_stages}, and another "
            f"FusedAdamS on this rank those of stage {others[0].stage_index}: {needed} would be that of some stages, "
            "and wrong. Build one FusedAdamS for all stages that a rank has."
        )


def refuse_late_reduction(params: Sequence[Tensor]) -> None:
    """Raises if ranks reduce gradients only after autograd has accumulated them, when gradient release frees them.

    DistributedDataParallel leaves no mark on parameters, so this looks at all objects of the process: some 0.1 s.
    """
    own = set(map(id, params))
    name, _ = _mark(params) or (None, None)
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    if name is None and module is not None and is_distributed():
        wrappers = _instances(module.DistributedDataParallel)
        if any(own.intersection(map(id, wrapper.parameters())) for wrapper in wrappers):
            name = "DistributedDataParallel"
    if name is not None:
        raise RuntimeError(
            f"release_gradients got parameters of {name}, which reduces gradients over ranks only after autograd has "
            "accumulated them: each rank would step with its own. Use FSDP2 (fully_shard; without sharding a mesh of "
            "two dimensions, the second of size 1), or step() after backward()."
        )


def _mark(params: Iterable[Tensor]) -> tuple[str, str] | None:
    marks = (found for param in params for attribute, found in MARKS.items() if getattr(param, attribute, False))
    return next(marks, None)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _instances(kind: type) -> list[Any]:
    # By type: isinstance would ask proxies, which may import or compute something to answer.
    return [other for other in gc.get_objects() if issubclass(type(other), kind)]

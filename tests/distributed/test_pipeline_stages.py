"""One optimizer for each stage of a pipeline has a part of the model: summed over the stages, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from swd_fused import FusedAdamS, param_groups
from tests.distributed.ranks import once_on_ranks

STEPS, LAYERS = 6, 4
OPTIONS: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 0.5, "adamw_weight_decay": 1.0, "calibration_steps": 2}


def new_model() -> torch.nn.Sequential:
    """Layers of unlike gradients, so that the mean of some is not that of all."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(LAYERS - 1)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 1)).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = torch.Generator().manual_seed(1)
    sizes = [(4, 8), (4, 1)]
    return [tuple(torch.randn(s, generator=data, dtype=torch.float64) for s in sizes) for _ in range(STEPS)]  # type: ignore[misc]


def on_one_process(**options: Any) -> dict[str, torch.Tensor]:
    model = new_model()
    optimizer = FusedAdamS(param_groups(model), backend="torch", **{**OPTIONS, **options})
    for x, y in batches():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


Build = Callable[[dict[int, torch.nn.Module], Any], list[torch.optim.Optimizer]]


def trained(build: Build, per_rank: int = 1) -> dict[str, Any]:
    """Trains by torch's pipelining. Returns this rank's weights, or what was refused; and whether none had changed."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    group, rank = dist.group.WORLD, dist.get_rank()
    model, device = new_model(), torch.device("cpu")
    count = per_rank * dist.get_world_size()
    width = LAYERS // count
    indices = range(rank, count, dist.get_world_size())
    parts: dict[int, torch.nn.Module] = {i: model[i * width : (i + 1) * width] for i in indices}
    stages = [PipelineStage(part, i, count, device, group=group) for i, part in parts.items()]
    loss = torch.nn.functional.mse_loss
    schedule: Any = (
        Schedule1F1B(stages[0], 2, loss_fn=loss) if per_rank == 1 else ScheduleInterleaved1F1B(stages, 2, loss_fn=loss)  # type: ignore[arg-type]
    )
    optimizers = build(parts, group)
    refused = ""
    before = [param.detach().clone() for param in model.parameters()]
    for x, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        is_last = any(i == count - 1 for i in indices)
        schedule.step(*([x] if 0 in indices else []), **({"target": y} if is_last else {}))
        try:
            for optimizer in optimizers:
                optimizer.step()
        except RuntimeError as error:
            refused = str(error)
            break
    names = [f"{index}." for i in indices for index in range(i * width, (i + 1) * width)]
    weights = {name: value for name, value in model.state_dict().items() if name.startswith(tuple(names))}
    is_unchanged = all(map(torch.equal, before, model.parameters()))
    return {"weights": weights, "refused": refused, "is_unchanged": is_unchanged}


def one(parts: dict[int, torch.nn.Module], **options: Any) -> torch.optim.Optimizer:
    return FusedAdamS(param_groups(torch.nn.ModuleList(parts.values())), **{**OPTIONS, **options})


def for_each(parts: dict[int, torch.nn.Module], **options: Any) -> list[torch.optim.Optimizer]:
    return [one({i: part}, **options) for i, part in parts.items()]


ADAMW: dict[str, Any] = {"decay": "decoupled", "adamw_weight_decay": None, "calibration_steps": None}
WITHOUT_SUMS: dict[str, Any] = {**ADAMW, "max_grad_norm": None}
CASES: dict[str, tuple[int, Build]] = {
    "summed": (1, lambda parts, group: [one(parts, process_group=group)]),
    "lagged": (1, lambda parts, group: [one(parts, process_group=group, schedule="lagged", max_grad_norm=None)]),
    "clipped": (1, lambda parts, group: [one(parts, process_group=group, **ADAMW)]),
    "interleaved": (2, lambda parts, group: [one(parts, process_group=group)]),
    "without sums": (2, lambda parts, group: for_each(parts, **WITHOUT_SUMS)),
    "unsaid": (1, lambda parts, group: [one(parts)]),
    "unsaid norm": (1, lambda parts, group: [one(parts, **ADAMW)]),
    "one for each": (2, lambda parts, group: for_each(parts, process_group=group)),
}


def run_cases() -> dict[str, Any]:
    return {name: trained(build, per_rank) for name, (per_rank, build) in CASES.items()}


def results(case: str) -> list[dict[str, Any]]:
    return [answers[case] for answers in once_on_ranks(2, run_cases)]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("summed", {}),
        ("lagged", {"schedule": "lagged", "max_grad_norm": None}),
        ("clipped", ADAMW),
        ("interleaved", {}),
        ("without sums", WITHOUT_SUMS),
    ],
)
def test_stages_train_as_one_process(case: str, options: dict[str, Any]) -> None:
    reference = on_one_process(**options)
    weights: dict[str, torch.Tensor] = {}
    for answers in results(case):
        assert not answers["refused"]
        weights.update(answers["weights"])
    assert weights.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unsaid", r"stage \d of a pipeline of 2: the schedule's mean would be .* pass process_group="),
        ("unsaid norm", r"stage \d of a pipeline of 2: the gradients' norm would be"),
        ("one for each", r"stages \[\d\] of a pipeline of 4, and another FusedAdamS .* Build one FusedAdamS for all"),
    ],
)
def test_stages_that_would_be_alone_are_refused(case: str, message: str) -> None:
    for answers in results(case):
        assert re.search(message, answers["refused"]), answers["refused"]
        assert answers["is_unchanged"]


def fully_sharded_stage() -> str:
    """As torchtitan has it: DTensors, on a mesh that knows nothing of the pipeline."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "fsdp"))
    part = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["fsdp"])
    stage = PipelineStage(part, dist.get_rank(), 2, torch.device("cpu"), group=mesh.get_group("pp"))
    part(torch.ones(2, 4)).square().sum().backward()
    try:
        FusedAdamS(part.parameters()).step()
    except RuntimeError as error:
        message = str(error)
    FusedAdamS(part.parameters(), process_group=stage.group).step()
    return message


def test_stages_of_dtensors_are_refused() -> None:
    for message in once_on_ranks(2, fully_sharded_stage):
        assert "of a pipeline of 2" in message

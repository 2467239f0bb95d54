"""torch.compile with FSDP2: the model and the step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swd_fused import FusedAdamS
from tests.distributed.ranks import once_on_ranks
from tests.distributed.sharded_model import LR, MAX_GRAD_NORM, Record, defined, distance, new_model, param_groups, train

pytestmark = pytest.mark.slow


def sharded() -> tuple[nn.Module, FusedAdamS]:
    model = fully_shard(new_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, FusedAdamS(param_groups(model), lr=LR, max_grad_norm=MAX_GRAD_NORM)


def compiled_model() -> Record:
    """By the backend that traces, differentiates and then runs eagerly: generating code would take a minute."""
    model, optimizer = sharded()
    model.compile(backend="aot_eager")
    return train(model, optimizer)


def compiled_step() -> Record:
    """Runs as it is: what communicates between its passes is no graph."""
    model, optimizer = sharded()
    step = torch.compile(optimizer.step, backend="aot_eager")
    return train(model, optimizer, step=lambda _: step())


def run_cases() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.__name__: case() for case in (compiled_model, compiled_step)}


@pytest.mark.parametrize("case", ["compiled_model", "compiled_step"])
def test_compiled_equals_eager(case: str) -> None:
    for answers in once_on_ranks(2, run_cases):
        assert distance(answers[case], defined()) < 1e-12

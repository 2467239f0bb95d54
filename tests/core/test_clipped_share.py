"""The share of steps that clipping has changed, which tells whether it leaves anything of the schedule."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swd_fused import FusedAdamS
from tests.device import DEVICE
from tests.distributed.ranks import on_ranks
from tests.runs import fused, random_params, run


def of_norm(norm: float, *sizes: int) -> list[torch.Tensor]:
    """Returns a step's gradients that have this norm together."""
    return [torch.full((size,), norm / math.sqrt(sum(sizes))) for size in sizes]


def share(optimizer: FusedAdamS) -> float:
    return optimizer.metrics()["clipped_share"]


ONE_BUCKET = [{"params": [0, 1]}]
TWO_BUCKETS = [{"params": [0], "amsgrad": True}, {"params": [1]}]


@pytest.mark.parametrize("groups", [ONE_BUCKET, TWO_BUCKETS], ids=["one bucket", "two buckets"])
@pytest.mark.parametrize("decay", ["scheduled", "decoupled"])
def test_share_of_steps(backend: str, groups: list[dict[str, Any]], decay: str) -> None:
    params = random_params([(6,), (10,)])
    optimizer = fused(params, groups, backend=backend, decay=decay, max_grad_norm=1.0)
    assert math.isnan(share(optimizer))
    for norm, wanted in [(3.0, 1.0), (0.5, 1 / 2), (0.9, 1 / 3), (1.1, 2 / 4)]:
        run(params, [of_norm(norm, 6, 10)], optimizer)
        assert share(optimizer) == wanted
    optimizer.max_grad_norm = 10.0
    run(params, [of_norm(3.0, 6, 10)], optimizer)
    assert share(optimizer) == 2 / 5


def test_only_steps_that_may_clip_count(backend: str) -> None:
    params = random_params([(6,)])
    optimizer = fused(params, [{"params": [0]}], backend=backend)
    run(params, [of_norm(3.0, 6)], optimizer)
    assert "clipped_share" not in optimizer.metrics()
    optimizer.max_grad_norm = 1.0
    run(params, [of_norm(3.0, 6)], optimizer)
    assert share(optimizer) == 1


def test_a_share_of_one_means_that_the_schedule_is_constant(backend: str) -> None:
    params = random_params([(16,)])
    optimizer = fused(params, [{"params": [0]}], backend=backend, max_grad_norm=0.1)
    decays = []
    for norm in (30.0, 5.0, 0.7):
        run(params, [of_norm(norm, 16)], optimizer)
        decays += optimizer.effective_weight_decay()
    assert share(optimizer) == 1
    assert decays == pytest.approx([5e-4 * math.sqrt(16) / 0.1] * 3, rel=1e-5)


def test_skipped_steps_do_not_count(backend: str) -> None:
    params = random_params([(6,)])
    optimizer = fused(params, [{"params": [0]}], backend=backend, max_grad_norm=1.0, skip_nonfinite=True)
    run(params, [of_norm(3.0, 6), of_norm(math.inf, 6), of_norm(math.nan, 6), of_norm(0.5, 6)], optimizer)
    assert int(optimizer.skipped_steps) == 2
    assert share(optimizer) == 1 / 2


def test_unscaled_gradients_count(backend: str) -> None:
    params = random_params([(6,)])
    optimizer = fused(params, [{"params": [0]}], backend=backend, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for norm in (0.5, 3.0, math.inf):
        params[0].grad = of_norm(norm, 6)[0] * 1024
        scaler.scale(torch.zeros(()))  # makes the scale
        scaler.step(optimizer)
        scaler.update()
    assert share(optimizer) == 1 / 2


def test_a_step_in_parts_counts_once(backend: str) -> None:
    """As DeepSpeed takes it: the sum is that of the whole model."""
    params = random_params([(6,), (10,)])
    optimizer = fused(params, ONE_BUCKET, backend=backend, max_grad_norm=1.0)
    for norm in (3.0, 0.5, 0.9):
        grads = of_norm(norm, 6, 10)
        for index, grad in enumerate(grads):
            params[index].grad, params[1 - index].grad = grad, None
            optimizer.step(grad_sumsq=norm**2, numel=16)
    assert share(optimizer) == 1 / 3


def test_the_share_survives_copies_and_is_no_part_of_the_state() -> None:
    params = random_params([(6,)])
    optimizer = fused(params, [{"params": [0]}], max_grad_norm=1.0)
    run(params, [of_norm(3.0, 6), of_norm(0.5, 6)], optimizer)
    assert share(copy.deepcopy(optimizer)) == share(pickle.loads(pickle.dumps(optimizer))) == 1 / 2
    assert "clip" not in str(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert share(optimizer) == 1 / 2


def global_norm_counts() -> tuple[float, float]:
    """Each rank's own norm is below the bound."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdamS([param], max_grad_norm=1.0, process_group=dist.group.WORLD)
    param.grad = torch.full((4,), 0.8 / 2)
    optimizer.step()
    return float(optimizer.grad_norm), share(optimizer)


def test_ranks_count_by_the_norm_of_all() -> None:
    for norm, counted in on_ranks(2, global_norm_counts):
        assert norm == pytest.approx(0.8 * math.sqrt(2))
        assert counted == 1

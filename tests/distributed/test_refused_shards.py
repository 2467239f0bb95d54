"""What wrappers are told that shard parameters, and what is refused because it cannot be right."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from swd_fused import FusedAdamS
from tests.distributed.ranks import once_on_ranks
from tests.distributed.sharded_model import LR, new_model, param_groups, train
from tests.distributed.test_sharded_tensors import as_partial, fsdp1, zero_redundancy_optimizer
from tests.runs import random_grads, random_params, run


def said(run: Callable[[], object]) -> str:
    try:
        run()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return ""


def a_parameter() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return param


def of_megatron() -> torch.nn.Parameter:
    param = a_parameter()
    param.tensor_model_parallel = True  # type: ignore[attr-defined]
    return param


def a_shard(mesh: DeviceMesh | None = None) -> torch.nn.Parameter:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    return param


def zero() -> None:
    model = new_model()
    train(model, zero_redundancy_optimizer(param_groups(model), FusedAdamS, lr=LR))


def partial_param() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = torch.nn.Parameter(as_partial(torch.ones(3), mesh))
    param.grad = as_partial(torch.ones(3), mesh)
    FusedAdamS([param]).step()


def plain_state() -> None:
    optimizer = FusedAdamS([a_shard()])
    optimizer.step()
    state = {"step": 1.0, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})


def deepspeed() -> None:
    namespace: dict[str, Any] = {"__name__": "deepspeed.runtime.zero.stage3"}
    exec("def step(optimizer): optimizer.step()", namespace)
    namespace["step"](FusedAdamS([a_parameter()]))


ASKED: dict[str, Callable[[], object]] = {
    "counted twice": lambda: FusedAdamS([a_shard()], process_group=dist.group.WORLD).step(),
    "on other ranks": lambda: FusedAdamS([a_shard(DeviceMesh("cpu", [0]))]).step(),
    "deepspeed": deepspeed,
    "zero": zero,
    "megatron": lambda: FusedAdamS([of_megatron()]).step(),
    "whole after all": lambda: FusedAdamS([{"params": [of_megatron()], "process_group": None}]).step(),
    "partial param": partial_param,
    "plain state": plain_state,
    "pickled": lambda: pickle.dumps(FusedAdamS([a_parameter()], process_group=dist.group.WORLD)),
    "fsdp1, False": lambda: fsdp1(False, process_group=None, total_numel=None),
    "fsdp1, True": lambda: fsdp1(True, process_group=None, total_numel=None),
}


def messages() -> dict[str, str]:
    """Returns what is said by case."""
    return {name: said(ask) for name, ask in ASKED.items()}


def answers_of_ranks() -> list[dict[str, str]]:
    return once_on_ranks(2, messages)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("zero", r"plain tensors from torch.*zero_redundancy_optimizer, which are shards.*functools\.partial"),
        ("deepspeed", r"from deepspeed\.runtime\.zero, .* call swd_fused\.distributed\.deepspeed\.follow"),
        ("counted twice", "Leave process_group out"),
        ("megatron", "from Megatron's tensor parallelism, .* pass process_group="),
        ("fsdp1, False", "from FullyShardedDataParallel, .* total_numel="),
        ("fsdp1, True", "from FullyShardedDataParallel"),
        ("partial param", "wanted Shard and Replicate only"),
        ("plain state", "set_optimizer_state_dict"),
        ("pickled", "cannot pickle .*ProcessGroup"),
    ],
)
def test_what_would_be_wrong_is_refused(case: str, message: str) -> None:
    for answers in answers_of_ranks():
        assert re.search(message, answers[case]), answers[case]


def test_a_group_that_says_it_is_whole_is_believed() -> None:
    assert all(not answers["whole after all"] for answers in answers_of_ranks())


def test_a_rank_outside_of_a_mesh_is_told() -> None:
    inside, outside = [answers["on other ranks"] for answers in answers_of_ranks()]
    assert not inside
    assert "but not on this rank, 1" in outside


# --- Where no mean over the model is used the wrapper need not be told apart

SHAPES = [(5,), (3, 4), (7,)]
PEERS = {"decoupled": torch.optim.AdamW, "l2": torch.optim.Adam}
NEED_THE_NORM: list[dict[str, Any]] = [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}]


def trained(optimizer_class: Any, later: dict[str, Any] | None = None, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, 4, torch.float64)
    inner = functools.partial(optimizer_class, **options)
    optimizer = zero_redundancy_optimizer(params, inner, lr=0.01, weight_decay=0.1)
    run(params, grads[:2], optimizer)
    for name, value in (later or {}).items():
        setattr(optimizer.optim, name, value)
    run(params, grads[2:], optimizer)
    return [param.detach() for param in params]


def cases() -> dict[str, Any]:
    answers: dict[str, Any] = {decay: trained(FusedAdamS, decay=decay) for decay in PEERS}
    answers |= {peer.__name__: trained(peer) for peer in PEERS.values()}
    refused: dict[str, dict[str, Any]] = {f"{options}": {"decay": "decoupled", **options} for options in NEED_THE_NORM}
    refused |= {"later": {"decay": "decoupled", "later": {"max_grad_norm": 1.0}}, "scheduled": {}}
    return answers | {name: said(functools.partial(trained, FusedAdamS, **given)) for name, given in refused.items()}


@pytest.mark.parametrize("decay", PEERS)
def test_zero_without_a_schedule_is_adams(decay: str) -> None:
    for answers in once_on_ranks(2, cases):
        for param, peer in zip(answers[decay], answers[PEERS[decay].__name__], strict=True):
            torch.testing.assert_close(param, peer, rtol=0, atol=1e-14)


@pytest.mark.parametrize("case", [*map(str, NEED_THE_NORM), "later"])
def test_the_norm_of_a_shard_is_refused(case: str) -> None:
    for answers in once_on_ranks(2, cases):
        assert re.search(
            "from torch.*zero_redundancy_optimizer, .* the gradients' norm would be that of this", answers[case]
        )


def test_the_mean_of_a_shard_is_refused() -> None:
    for answers in once_on_ranks(2, cases):
        assert re.search(
            "from torch.*zero_redundancy_optimizer, .* the schedule's mean would be that of", answers["scheduled"]
        )

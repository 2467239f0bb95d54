"""What `deepspeed.follow` takes from an engine. tests/packaging/test_frameworks.py has the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swd_fused import FusedAdamS
from swd_fused.distributed.deepspeed import follow
from tests.distributed.ranks import once_on_ranks


def engine_of(model: torch.nn.Module, optimizer: Any, clip_grad: float = 0.0) -> Any:
    zero = SimpleNamespace(
        optimizer=optimizer, _global_grad_norm=torch.tensor(3.0), clip_grad=clip_grad, dp_process_group=dist.group.WORLD
    )
    return SimpleNamespace(module=model, optimizer=zero)


def told() -> dict[str, Any]:
    model = torch.nn.Linear(4, 3)
    model.weight.ds_numel = 1000  # what ZeRO 3 leaves of a parameter is empty, and says how large it was
    model.bias.requires_grad_(False)
    answers = {}
    for clip_grad in (0.0, 2.0, 5.0):
        optimizer = FusedAdamS(model.parameters())
        follow(engine_of(model, optimizer, clip_grad))
        assert optimizer.grad_sumsq_provider is not None
        assert optimizer._stepper.sharded_over is not None
        grad_sumsq, numel = optimizer.grad_sumsq_provider()
        answers[clip_grad] = float(grad_sumsq), numel
    return answers


def test_the_norm_is_told_as_it_is_after_the_engine_has_clipped() -> None:
    for answers in once_on_ranks(2, told):
        assert answers[0.0] == answers[5.0] == (9.0, 1000)
        assert answers[2.0] == (pytest.approx(4.0, rel=1e-5), 1000)


def test_what_cannot_be_followed() -> None:
    model = torch.nn.Linear(4, 3)
    with pytest.raises(TypeError, match="SimpleNamespace around AdamW, wanted ZeRO stage 1, 2 or 3 around FusedAdamS"):
        follow(engine_of(model, torch.optim.AdamW(model.parameters())))
    with pytest.raises(ValueError, match='Put "gradient_clipping" into its config'):
        follow(engine_of(model, FusedAdamS(model.parameters(), max_grad_norm=1.0)))

"""One norm over two optimizers: Muon steps the matrices and FusedAdamW the rest, clipped by one factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from swd_fused import FusedAdamS, FusedAdamW
from tests.distributed.ranks import once_on_ranks

STEPS = 6
BOUND = 0.5


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 5)).double()


def matrices_and_rest(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [param for name, param in model.named_parameters() if name in ("1.weight", "3.weight")]
    return matrices, [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]


def new_optimizers(model: nn.Module, kind: Any, **options: Any) -> list[Any]:
    matrices, rest = matrices_and_rest(model)
    return [Muon(matrices, lr=0.02), kind(rest, lr=0.01, weight_decay=0.1, **options)]


def step_with_one_norm(model: nn.Module, muon: Muon, adamw: FusedAdamW) -> None:
    """The lines of docs/recipes.md."""
    norm = get_total_norm([param.grad for param in model.parameters()])
    clip_grads_with_norm_(muon.param_groups[0]["params"], BOUND, norm)
    muon.step()
    adamw.step(grad_sumsq=norm**2)


def step_after_clipping(model: nn.Module, muon: Muon, adamw: torch.optim.Optimizer) -> None:
    clip_grad_norm_(model.parameters(), BOUND)
    muon.step()
    adamw.step()


def train(model: nn.Module, optimizers: list[Any], step: Any, steps: range = range(STEPS)) -> list[Tensor]:
    """Gradients are given: rounding in Muon, which works in bfloat16, must not change those that follow."""
    schedulers = [LambdaLR(each, lambda t: 1 / (1 + t)) for each in optimizers]
    for t in range(STEPS):
        generator = torch.Generator().manual_seed(t)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float64) / 10**t  # clipped, then not
            param.grad = distribute_tensor(grad, param.device_mesh, [Shard(0)]) if isinstance(param, DTensor) else grad
        if t in steps:
            step(model, *optimizers)
        for scheduler in schedulers:
            scheduler.step()
    return [param.detach().clone() for param in model.parameters()]


def plain() -> list[Tensor]:
    model = new_model()
    return train(model, new_optimizers(model, AdamW), step_after_clipping)


def sharded() -> list[Tensor]:
    """Trained, saved and resumed."""
    mesh = init_device_mesh("cpu", (2,))
    first, second = (fully_shard(new_model(), mesh=mesh) for _ in range(2))
    optimizers, others = (new_optimizers(model, FusedAdamW, max_grad_norm=BOUND) for model in (first, second))
    train(first, optimizers, step_with_one_norm, range(3))
    second.load_state_dict(first.state_dict())
    set_optimizer_state_dict(second, others, get_optimizer_state_dict(first, optimizers))
    for optimizer in others:
        for group in optimizer.param_groups:
            group["lr"] = group.pop("initial_lr")  # the schedulers go through all steps once more
    return [param.full_tensor() for param in train(second, others, step_with_one_norm, range(3, STEPS))]


def assert_close(params: list[Tensor], wanted: list[Tensor], of_matrices: float) -> None:
    for (name, _), param, other in zip(new_model().named_parameters(), params, wanted, strict=True):
        torch.testing.assert_close(
            param, other, rtol=0, atol=of_matrices if name in ("1.weight", "3.weight") else 1e-12
        )


def test_one_factor_clips_both() -> None:
    model = new_model()
    optimizers = new_optimizers(model, FusedAdamW, max_grad_norm=BOUND)
    assert_close(train(model, optimizers, step_with_one_norm), plain(), of_matrices=0)


def test_sharded_by_fsdp2_and_resumed() -> None:
    """Muon's iterations in bfloat16 add up in another order on two ranks."""
    for params in once_on_ranks(2, sharded):
        assert_close(params, plain(), of_matrices=0.01)


def test_adams_divides_by_the_gradients_of_its_own_parameters() -> None:
    """Both are clipped outside: a sum over Muon's matrices would count their gradients as its own."""
    model = new_model()
    optimizers = new_optimizers(model, FusedAdamS)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    step_after_clipping(model, *optimizers)
    own = torch.cat([param.grad.flatten() for param in optimizers[1].numbered_params()])
    assert float(optimizers[1].exp_avg_sq_mean) == pytest.approx(float(own.square().mean()), rel=1e-12)

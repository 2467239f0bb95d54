"""FSDP2's CPUOffloadPolicy on a mesh of GPUs: parameters, gradients and state are on the CPU, the mesh is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from swd_fused import FusedAdamS
from swd_fused.distributed.sharding import local_tensor
from tests.device import needs_gpu
from tests.distributed.ranks import once_on_ranks

pytestmark = needs_gpu

MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "lagged": {"schedule": "lagged"},
    "clipping": {"max_grad_norm": 0.01},
    "8 bits": {"state_dtype": "8bit"},
}


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))


def set_grads(model: nn.Module, seed: int) -> None:
    """As FSDP2 leaves them: beside the parameters."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator)
        param.grad = grad if type(param.data) is torch.Tensor else placed_like(param, grad)


def placed_like(param: Any, whole: torch.Tensor) -> torch.Tensor:
    grad: torch.Tensor = torch.zeros_like(param)
    local_tensor(grad).copy_(whole)  # one rank has all of it
    return grad


def stepped(model: nn.Module, optimizer: FusedAdamS) -> list[torch.Tensor]:
    for seed in range(4):
        set_grads(model, seed)
        optimizer.step()
    return [local_tensor(param.detach()).clone() for param in model.parameters()]


def compare_all() -> dict[str, tuple[bool, set[str]]]:
    """Returns of each mode whether it equals plain tensors on the CPU, also after a resume; and where its state is."""
    found = {}
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for name, options in MODES.items():
        plain = new_model()
        expected_optimizer = FusedAdamS(plain.parameters(), **options)
        model = fully_shard(new_model(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = FusedAdamS(model.parameters(), **options)
        is_equal = all(map(torch.equal, stepped(model, optimizer), stepped(plain, expected_optimizer)))
        resumed = FusedAdamS(model.parameters(), **options)
        set_optimizer_state_dict(model, resumed, get_optimizer_state_dict(model, optimizer))
        is_equal &= all(map(torch.equal, stepped(model, resumed), stepped(plain, expected_optimizer)))
        states = [*optimizer.state.values(), *resumed.state.values()]
        places = {str(value.device) for state in states for value in state.values() if isinstance(value, torch.Tensor)}
        found[name] = is_equal, places
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_step_equals_that_of_plain_tensors_on_the_cpu(mode: str) -> None:
    ((is_equal, places),) = (answers[mode] for answers in once_on_ranks(1, compare_all))
    assert is_equal
    assert places == {"cpu"}

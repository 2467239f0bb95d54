"""torch.compile: a step is one opaque operator, without a graph break, that equals eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from swd_fused import FusedAdamS
from tests.runs import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile has several of its own


OPTIONS: list[dict[str, Any]] = [
    {},
    {"schedule": "lagged", "corrected_decay": True, "largest_lr": 1e-2, "cautious_decay": True},
    {"amsgrad": True, "max_grad_norm": 0.1, "ema_decay": 0.9},
    {"state_dtype": "8bit"},
    {"outliers": "clip", "decay": "decoupled"},
]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))


@pytest.fixture(autouse=True)
def _reset() -> None:
    torch._dynamo.reset()


def backward(net: torch.nn.Module, x: torch.Tensor) -> None:
    net.zero_grad()
    net(x).square().mean().backward()


@pytest.mark.thinned
@pytest.mark.parametrize("lr", [1e-2, "tensor"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.usefixtures("_codes_of_small_tensors")
def test_compiled_step_equals_eager(compiler: str, options: dict[str, Any], lr: float | str) -> None:
    """In one graph, which a scheduler does not make anew if `lr` is a tensor."""
    net = model()
    peer = copy.deepcopy(net)
    rates = [torch.tensor(1e-2) if lr == "tensor" else lr for _ in range(2)]
    optimizer, eager = (
        FusedAdamS(net.parameters(), rates[0], **options),
        FusedAdamS(peer.parameters(), rates[1], **options),
    )
    counter = CompileCounterWithBackend(compiler)
    step = torch.compile(optimizer.step, fullgraph=True, backend=counter)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, eager)]
    for _ in range(6):
        x = torch.randn(8, 10)
        backward(net, x)
        step()
        backward(peer, x)
        eager.step()
        for scheduler in schedulers:
            scheduler.step()
    assert all(map(torch.equal, net.parameters(), peer.parameters()))
    for param, other in zip(net.parameters(), peer.parameters(), strict=True):
        assert all(map(torch.equal, optimizer.state[param].values(), eager.state[other].values()))
    assert torch.equal(optimizer.exp_avg_sq_mean, eager.exp_avg_sq_mean)
    if lr == "tensor":
        assert counter.frame_count == 1


def test_what_the_graph_does_to_parameters_is_seen() -> None:
    """Also where the compiler passes copies of them."""
    param = torch.nn.Parameter(torch.ones(5))
    peer = torch.nn.Parameter(torch.ones(5))
    optimizer, eager = FusedAdamS([param]), FusedAdamS([peer])

    def halve_and_step(param: torch.nn.Parameter, optimizer: FusedAdamS) -> torch.Tensor:
        with torch.no_grad():
            param.mul_(0.5)
        optimizer.step()
        return param * 2

    compiled = torch.compile(halve_and_step, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        param.grad = peer.grad = torch.ones(5)
        assert torch.equal(compiled(param, optimizer), halve_and_step(peer, eager))
    assert torch.equal(param, peer)


def test_a_copy_of_an_optimizer_steps_itself() -> None:
    net = model()
    optimizer = FusedAdamS(net.parameters())
    twin_net, twin = copy.deepcopy((net, optimizer))
    backward(twin_net, torch.randn(8, 10))
    before = [param.detach().clone() for param in net.parameters()]
    torch.compile(twin.step, fullgraph=True, backend="aot_eager")()
    assert all(map(torch.equal, net.parameters(), before))
    assert not any(map(torch.equal, twin_net.parameters(), before))


def test_loading_and_hooks_are_compiled() -> None:
    """Into an optimizer that was made outside, and has steps behind it."""
    net = model()
    optimizer = FusedAdamS(net.parameters())
    backward(net, torch.randn(8, 10))
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    torch.compile(lambda: optimizer.load_state_dict(saved), backend="eager")()
    assert_same(optimizer.state_dict()["state"], saved["state"])
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    torch.compile(optimizer.step, backend="eager")()
    assert seen == ["pre", "post"]
    assert float(optimizer.state[net[0].weight]["step"]) == 2  # type: ignore[index]

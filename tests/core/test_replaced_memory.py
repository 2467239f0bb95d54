"""Tensors that get other memory by `.data`, which torch does not count: moments and masters of another size or dtype at
the same address, and parameters whose masters must follow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.core import snapshot
from tests.runs import everything, random_grads, random_params, run

SHAPE = (64, 64)

# --- State: as if it had been loaded

STATE = [
    ("exp_avg", {}),
    ("exp_avg_sq", {}),
    ("max_exp_avg_sq", {"amsgrad": True}),
    ("master_param", {"master_weights": True}),
    ("master_remainder", {"master_weights": True}),
    *((key, {"state_dtype": "8bit"}) for key in ("exp_avg_codes", "exp_avg_scales")),
    *((key, {"state_dtype": "8bit"}) for key in ("exp_avg_sq_root_codes", "exp_avg_sq_root_scales")),
]


def trained(backend: str, key: str, options: dict[str, Any]) -> tuple[Any, list[list[Tensor]], FusedAdamS]:
    """Two buckets, of which the first is well."""
    dtype = {"master_param": torch.float16, "master_remainder": torch.bfloat16}.get(key, torch.float32)
    params, grads = random_params([(50,), SHAPE], dtype), random_grads([(50,), SHAPE], 3, dtype)
    options = dict(options)
    group = {name: options.pop(name) for name in ("amsgrad", "state_dtype") if name in options}
    optimizer = FusedAdamS([{"params": params[:1]}, {"params": params[1:], **group}], backend=backend, **options)
    with patch.object(snapshot, "WATCHED", 2):  # so that some are not among the first
        run(params, grads[:2], optimizer)
    return params, grads, optimizer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("key", "options"), STATE[:4], ids=str)
def test_state_of_another_dtype_at_the_same_address(
    backend: str, key: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """As a state dict that has it in this dtype: it is converted, and memory behind its end stays as it is."""
    params, grads, optimizer = trained(backend, key, options)
    tensor = optimizer.state[params[1]][key]
    size = torch.empty((), dtype=dtype).element_size() * tensor.numel()
    room = torch.full((size + 2 * tensor.nbytes,), 7, dtype=torch.uint8)
    own = room[: tensor.nbytes].view(tensor.dtype).view(SHAPE)
    own.copy_(tensor)
    tensor.data = own
    run(params, grads[1:2], optimizer)
    values = tensor.detach().to(dtype, copy=True)
    narrow = room[:size].view(dtype).view(SHAPE)
    narrow.copy_(values)
    room[size:] = 7
    tensor.data = narrow
    assert tensor.data_ptr() == room.data_ptr()
    others = copy.deepcopy(params)
    loaded = FusedAdamS(
        [{**group, "params": [other]} for group, other in zip(optimizer.param_groups, others, strict=True)],
        backend=backend,
        **{name: value for name, value in options.items() if name == "master_weights"},
    )
    loaded.load_state_dict(optimizer.state_dict())
    run(params, grads[2:], optimizer)
    run(others, grads[2:], loaded)
    assert bool((room[size:] == 7).all()), "written past its end"
    assert all(map(torch.equal, everything(optimizer, params), everything(loaded, others)))


@pytest.mark.parametrize(("key", "options"), STATE[:5], ids=str)
def test_state_that_was_transposed_in_place(backend: str, key: str, options: dict[str, Any]) -> None:
    """A square one: the shape is the same, and so is the address."""
    params, grads, optimizer = trained(backend, key, options)
    tensor = optimizer.state[params[1]][key]
    values = tensor.detach().clone()
    tensor.data.copy_(values.t())
    tensor.data = tensor.data.t()
    assert torch.equal(tensor, values)
    peer_params, _, peer = copy.deepcopy((params, grads, optimizer))
    peer.state[peer_params[1]][key] = values
    run(params, grads[2:], optimizer)
    run(peer_params, grads[2:], peer)
    for one, other in zip(everything(optimizer, params), everything(peer, peer_params), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


# --- Parameters: masters follow what takes their place

Replace = Callable[[torch.nn.Parameter], None]


def by_other_data(param: torch.nn.Parameter) -> None:
    param.data = torch.full_like(param, 3.0)


def by_a_view_of_a_buffer(param: torch.nn.Parameter) -> None:
    """As averaging over ranks does."""
    buffer = torch.cat([param.data.reshape(-1), torch.zeros(1, dtype=param.dtype, device=param.device)]) * 0.5
    param.data = buffer[:-1].view_as(param)


def by_a_transposed_one(param: torch.nn.Parameter) -> None:
    param.data = torch.full(SHAPE, 3.0, dtype=param.dtype).t()


def by_set_(param: torch.nn.Parameter) -> None:
    with torch.no_grad():
        param.set_(torch.full_like(param, 3.0))  # type: ignore[call-overload]


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
@pytest.mark.parametrize("replace", [by_other_data, by_a_view_of_a_buffer, by_a_transposed_one, by_set_])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_parameters_with_other_memory(
    backend: str, dtype: torch.dtype, replace: Replace, schedule: Any
) -> None:
    """As a run that starts there with the same moments, and with what masters have beyond bfloat16, but without
    float32 masters."""
    shapes = [(50,), SHAPE]
    params, grads = random_params(shapes, dtype), random_grads(shapes, 4, dtype)
    optimizer = FusedAdamS(params, lr=0.1, master_weights=True, backend=backend, schedule=schedule)
    run(params, grads[:2], optimizer)
    replace(params[1])
    others = [torch.nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]
    expected = FusedAdamS(others, lr=0.1, master_weights=True, backend=backend, schedule=schedule)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][1].pop("master_param", None)
    expected.load_state_dict(state_dict)
    run(params, grads[2:], optimizer)
    run(others, grads[2:], expected)
    assert all(map(torch.equal, params, others))


def test_a_parameter_without_a_gradient_is_followed_later(backend: str) -> None:
    params, grads = random_params([(50,), SHAPE], torch.float16), random_grads([(50,), SHAPE], 4, torch.float16)
    optimizer = FusedAdamS(params, lr=0.1, master_weights=True, backend=backend)
    run(params, grads[:2], optimizer)
    with torch.no_grad():
        params[1].fill_(3.0)
    run(params, [[grads[2][0], None]], optimizer)
    run(params, grads[3:], optimizer)
    assert float((params[1].detach() - 3.0).abs().max()) < 1.0


def test_masters_keep_what_a_mere_move_does_not_change(backend: str) -> None:
    """The same values elsewhere: what the master has beyond 16 bits is not lost."""
    shapes = [(50,), SHAPE]
    params, grads = random_params(shapes, torch.bfloat16), random_grads(shapes, 4, torch.bfloat16)
    others = copy.deepcopy(params)
    optimizer, unmoved = (FusedAdamS(two, master_weights=True, backend=backend) for two in (params, others))
    run(params, grads[:2], optimizer)
    for param in params:
        param.data = param.data.clone()
    run(params, grads[2:], optimizer)
    run(others, grads, unmoved)
    assert all(map(torch.equal, params, others))
    for one, other in zip(params, others, strict=True):
        assert torch.equal(optimizer.master_param(one), unmoved.master_param(other))

"""Masters in two bytes: bfloat16 parameters and what their float32 masters are beside them."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.state import weights
from tests.device import DEVICE
from tests.masters_definition import as_float32, bits_of, master_of, nearest
from tests.runs import random_grads, random_params, run

ROOT = Path(__file__).parents[2]


def test_all_patterns_of_masters_come_back(tmp_path: Path) -> None:
    """All 2^32 of them, in C++. Only NaN loses bits, and stays NaN."""
    program, source = tmp_path / "check", ROOT / "tests/backends/masters_check.cpp"
    subprocess.run(
        ["g++", "-std=c++20", "-O3", "-march=native", "-Wno-psabi", str(source), "-o", str(program)], check=True
    )
    changed, lost_nans, far, halfway = map(int, subprocess.check_output([program]).split())
    assert (changed, lost_nans, far, halfway) == (0, 0, 0, 2 * 0x7F80)


def edge_masters() -> Tensor:
    """Around each parameter: its own value, its neighbours, and the limits of remainders; and some NaNs."""
    offsets = np.array([-0x8000, -0x7FFF, -1, 0, 1, 2, 0x7FFE, 0x7FFF])
    bits = ((np.arange(0x7F80)[:, None] << 16) + offsets).ravel()
    bits = bits[bits >= 0]
    nans = [0x7FC00000, 0x7FFFFFFF, 0x7F808000, 0x7F800001]
    return as_float32(np.concatenate([bits, bits + 0x80000000, [0x7F800000, 0xFF800000], nans]))


def test_plain_torch_agrees_with_the_definition() -> None:
    master = edge_masters()
    param, remainder = weights.split(master)
    assert (param.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(param.isnan(), master.isnan())
    numbers = ~master.isnan()
    assert torch.equal(param[numbers], nearest(master, torch.bfloat16)[numbers])
    assert (bits_of(weights.joined(param, remainder))[numbers] == bits_of(master)[numbers]).all()
    every_param = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for value in (-0x8000, -1, 1, 0x7FFF):
        state = {"master_remainder": torch.full(every_param.shape, value, dtype=torch.int16)}
        joined = weights.joined(every_param, state["master_remainder"])
        assert torch.equal(joined.isnan(), every_param.isnan())
        numbers = ~every_param.isnan()
        assert (bits_of(joined)[numbers] == bits_of(master_of(every_param, state))[numbers]).all()
    numbers = ~master.isnan()
    assert torch.equal(weights.remainder_of(param[numbers], master[numbers]), remainder[numbers])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_step_that_changes_nothing_keeps_all_bits(backend: str, transposed: bool) -> None:
    """In the kernels: with a learning rate of 0 masters are joined and split again."""
    master = edge_masters()[:: 1 if backend == "cpu" else 512]
    master = master[: len(master) // 6 * 6].view(6, -1).to(DEVICE)
    values, remainder = weights.split(master)
    if transposed:
        values, remainder = values.t().contiguous().t(), remainder.t().contiguous().t()
    param = torch.nn.Parameter(values.clone(memory_format=torch.preserve_format))
    optimizer = FusedAdamS([param], lr=0.0, weight_decay=0.0, master_weights=True, backend=backend)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.state[param]["master_remainder"] = remainder.clone(memory_format=torch.preserve_format)
    optimizer.step()
    numbers = master.isfinite()
    assert torch.equal(param.detach()[numbers], values[numbers])
    assert torch.equal(optimizer.state[param]["master_remainder"][numbers], remainder[numbers])
    assert torch.equal(param.isnan(), values.isnan())


WRITTEN = {"zero": 0.0, "-0": -0.0, "infinity": float("inf"), "-infinity": float("-inf"), "a number": -3.0}


@pytest.mark.parametrize("value", WRITTEN.values(), ids=WRITTEN)
def test_what_others_write_to_a_parameter_is_not_undone(backend: str, value: float) -> None:
    """Pruning, averaging, loading: the master is what was written, within half of its last place, and a number."""
    params, grads = random_params([(4000,)], torch.bfloat16), random_grads([(4000,)], 3, torch.bfloat16)
    optimizer = FusedAdamS(params, lr=1e-2, master_weights=True, backend=backend)
    run(params, grads[:2], optimizer)
    before = optimizer.master_param(params[0]).clone()
    kept = params[0].detach().clone()
    assert bool((optimizer.state[params[0]]["master_remainder"] < 0).any())
    with torch.no_grad():
        params[0].fill_(value)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    run(params, grads[2:], optimizer)
    assert bool((params[0].detach() == value).all())
    master = optimizer.master_param(params[0])
    assert not bool(master.isnan().any())
    assert float((nearest(master, torch.bfloat16).double() - params[0].detach().double()).nan_to_num().abs().max()) == 0
    if not torch.tensor(value).isinf():
        with torch.no_grad():
            params[0].copy_(kept)
        rewritten = bits_of(optimizer.master_param(params[0]))
        is_same = rewritten == bits_of(before)
        assert is_same.all() if value == -3.0 else is_same.any()


def test_float32_masters_of_older_checkpoints_load(backend: str) -> None:
    """To the bit, but for the last one of those that torch has rounded halfway down; where a parameter is not its
    master's, the parameter counts."""
    params, grads = random_params([(64,)], torch.bfloat16), random_grads([(64,)], 3, torch.bfloat16)
    optimizer = FusedAdamS(params, master_weights=True, backend=backend, lr=1e-2)
    run(params, grads[:2], optimizer)
    expected = optimizer.master_param(params[0]).clone()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["master_remainder"]
    saved["state"][0]["master_param"] = expected.clone()
    with torch.no_grad():
        params[0][0], expected[0], saved["state"][0]["master_param"][0] = 5.0, 5.0, 1.0
        halfway = 1 + 2**-8  # to which 1 is as near as the next number, and even
        params[0][1], expected[1], saved["state"][0]["master_param"][1] = 1.0, halfway - 2**-23, halfway
    resumed = FusedAdamS(params, master_weights=True, backend=backend, lr=0.0, weight_decay=0.0)
    resumed.load_state_dict(saved)
    resumed.param_groups[0].update(lr=0.0, weight_decay=0.0)
    run(params, grads[2:], resumed)
    assert torch.equal(resumed.master_param(params[0]), expected)
    assert set(resumed.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq", "master_remainder"}

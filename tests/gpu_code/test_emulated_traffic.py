"""What a compiled step moves and takes, counted by the emulator: bytes, sectors and float64 instructions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS

from .emulated_cases import BF16, CASES, LAGGED, Case
from .emulated_launches import emulated_launches
from .ptx_emulator import Statistics


def last_launch(case: Case, params: list[torch.nn.Parameter], grads: list[list[Tensor]], programs: int) -> Statistics:
    """Returns what the step takes that ends a run."""
    with emulated_launches(programs) as emulator:
        case.trained(params, grads)
    name, statistics = emulator.statistics[-1]
    assert name == f"{case.options.get('schedule', 'exact')}_step_kernel"
    return statistics


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_small_tensors_need_few_float64_instructions(schedule: str) -> None:
    """After many steps. When all threads found a tensor's scalars, an exact step had 1,110 of them for each."""
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(100)]
    for param in params:
        param.grad = torch.ones(64)
    with emulated_launches(programs=2, arch=75) as emulator:
        optimizer = FusedAdamS(params, backend="triton", schedule=schedule)  # type: ignore[arg-type]
        optimizer.step()
        for param in params:
            optimizer.state[param]["step"].fill_(100_000)
        for _ in range(2):
            optimizer.step()
    assert 0 < emulator.statistics[-1][1].float64_instructions <= 320 * len(params)


IN_8_BITS = {"state_dtype": "8bit"}
# Bytes for each element, in and out: gradients twice in the exact step, and everything else of the update once; of
# codes both scales of a block.
BYTES = {
    "fp32": (CASES["fp32"], 4 + 16 + 12),
    "lagged": (CASES["lagged"], 16 + 12),
    "bf16": (CASES["bf16"], 2 + 12 + 10),
    "bf16 masters": (CASES["bf16 masters"], 2 + 14 + 12),
    "fp16 masters": (CASES["fp16 masters"], 2 + 14 + 14),
    "bf16 exp_avg": (CASES["bf16 exp_avg"], 2 + 10 + 8),
    "amsgrad": (CASES["amsgrad clipped"], 4 + 12 + 20 + 16),
    "averages": (Case({"ema_decay": 0.9}), 4 + 16 + 12 + 8),
    "averages in 8 bits of masters": (Case({**IN_8_BITS, "master_weights": True, "ema_decay": 0.9}, BF16), 24 + 1 / 16),
    "8 bits": (Case(IN_8_BITS), 20 + 1 / 16),
    "8 bits lagged": (Case({**IN_8_BITS, **LAGGED}), 16 + 1 / 16),
    "8 bits bf16": (Case({**IN_8_BITS, "stochastic_rounding": True}, BF16), 12 + 1 / 16),
    "8 bits bf16 masters": (Case({**IN_8_BITS, "master_weights": True}, BF16), 16 + 1 / 16),
    "8 bits amsgrad": (Case({**IN_8_BITS, "amsgrad": True}), 4 + 4 + 4 + 1 + 20 - 4 + 8 + 5 / 64),
}


@pytest.mark.parametrize(("case", "each"), BYTES.values(), ids=list(BYTES))
def test_a_step_moves_as_few_bytes_as_there_are(case: Case, each: float) -> None:
    params, grads = case.start([(300, 1024), (200, 768)])
    is_lagged = case.options.get("schedule") == "lagged"
    statistics = last_launch(case, params, grads[: 1 + is_lagged], programs=8)
    numel = sum(param.numel() for param in params)
    print(f"{statistics.bytes / numel:.2f} bytes, {statistics.sector_bytes / numel:.2f} in sectors")
    tables = 1.08 if "state_dtype" in case.options else 1.02
    assert each <= statistics.bytes / numel < tables * each
    assert each <= statistics.sector_bytes / numel < 1.08 * each

"""Compiled steps with moments in 8 bits, executed in the emulator, against the definition in plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swd_fused import FusedAdamS
from swd_fused.backends.triton.kernels.tables import RESULT, TENSOR
from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import CODES, SCALES

from .emulated_step import EmulatedStep
from .test_emulated_kernels import EXACT, LAGGED, check_sums_that_steps_leave, start, take_steps, two_groups

# Whole blocks, shorter ones at the end of rows that are aligned and that are not, vectors that end with a whole access
# and within one, and small tensors between.
SHAPES = [(9, 512), (7,), (8, 600), (11, 402), (513,), (5000,), (3, 5, 300), (4099,)]
PRECISION = {
    "fp32 in 8 bits": {},
    "bf16 in 8 bits": {"stochastic_rounding": True, "seed": 7},
    "bf16 with masters in 8 bits": {"master_weights": True, "seed": 7},
    "fp32 amsgrad in 8 bits": {"amsgrad": True},
}


@pytest.fixture(autouse=True)
def _vectors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones, since each element takes the emulator a while."""
    monkeypatch.setattr(eight_bit, "LEAST_VECTOR", eight_bit.LEAST_NUMEL)


@pytest.mark.thinned
@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize("configuration", PRECISION)
@pytest.mark.parametrize("kernel", [EXACT, LAGGED])
def test_codes_are_those_of_plain_pytorch(kernel: str, configuration: str, programs: int) -> None:
    params, grads = start(configuration, SHAPES)
    # In this order, since tensors are numbered by it.
    groups = [
        {**group, "params": members} for group, members in zip(two_groups(0), ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True)
    ]
    options = PRECISION[configuration]
    model = EmulatedStep(configuration, params, groups, programs=programs, rounding_seed=options.get("seed", 0))
    take_steps(model, grads[:2], kernel)
    plain_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    plain_groups = [{**group, "params": [plain_params[i] for i in group["params"]]} for group in groups]
    schedule = "lagged" if kernel == LAGGED else "exact"
    plain = FusedAdamS(plain_groups, backend="torch", schedule=schedule, state_dtype="8bit", **options)
    for step_grads in grads[:2]:
        for param, grad in zip(plain_params, step_grads, strict=True):
            param.grad = grad.clone()
        plain.step()
    assert model.coded == [0, 2, 3, 5, 6, 7]
    codes = {"exp_avg": model.tensors(TENSOR.exp_avg), "exp_avg_sq": model.tensors(TENSOR.exp_avg_sq)}
    for i, param in enumerate(plain_params):
        state = plain.state[param]
        if i in model.coded:
            for key in CODES:
                apart = (codes[key][i].int() - state[CODES[key]].flatten().int()).abs()
                assert apart.max() <= 1
                assert apart.double().mean() <= 1e-3
                torch.testing.assert_close(model.scales_of(key, i), state[SCALES[key]], rtol=1e-6, atol=0)
        weight = plain.master_param(param)
        close = torch.isclose(model.weights[i].view_as(weight), weight, rtol=2**-7 if weight.itemsize == 2 else 1e-6)
        assert (~close).double().mean() <= 1e-3
    if kernel == EXACT:
        mean = model.get("results")[RESULT.exp_avg_sq_mean]
        np.testing.assert_allclose(mean, float(plain.exp_avg_sq_mean), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", PRECISION)
def test_the_sums_that_a_step_leaves_are_those_of_what_is_stored(configuration: str) -> None:
    check_sums_that_steps_leave(configuration, SHAPES)


# Bytes for each element, in and out: gradients twice in the exact step, weights, codes, and both scales of a block.
BYTES = [
    (EXACT, "fp32 in 8 bits", 20 + 1 / 16),
    (LAGGED, "fp32 in 8 bits", 16 + 1 / 16),
    (EXACT, "bf16 in 8 bits", 12 + 1 / 16),
    (LAGGED, "bf16 in 8 bits", 10 + 1 / 16),
    (EXACT, "bf16 with masters in 8 bits", 16 + 1 / 16),
    (EXACT, "fp32 amsgrad in 8 bits", 4 + 4 + 4 + 1 + 20 - 4 + 8 + 5 / 64),
]


@pytest.mark.parametrize(("kernel", "configuration", "each"), BYTES)
def test_a_step_moves_as_few_bytes_as_there_are(kernel: str, configuration: str, each: float) -> None:
    params, grads = start(configuration, [(300, 1024), (200, 768)])
    model = EmulatedStep(configuration, params, two_groups(len(params)), programs=8)
    model.set_grads(grads[0])
    statistics = model.launch(kernel)
    numel = sum(model.numels)
    print(
        f"{kernel}, {configuration}: {statistics.bytes / numel:.2f}, {statistics.sector_bytes / numel:.2f} in sectors"
    )
    assert each <= statistics.bytes / numel < 1.08 * each
    assert each <= statistics.sector_bytes / numel < 1.08 * each


@pytest.mark.parametrize("kernel", [EXACT, LAGGED])
def test_there_is_no_race_and_any_order_gives_the_same_bits(kernel: str) -> None:
    params, grads = start("fp32 in 8 bits", [(9, 512), (7,), (11, 402)])
    everything = []
    for seed in (None, 0):
        model = EmulatedStep("fp32 in 8 bits", params, two_groups(len(params)), programs=3)
        model.set_grads(grads[0])
        model.launch(kernel, seed=seed, find_races=True)
        everything.append(model.everything())
    assert everything[0] == everything[1]

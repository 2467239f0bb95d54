"""The compiled step, executed: FusedAdamS with launches in the PTX emulator, against the definition and bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import CODES, SCALES
from tests.backends.triton_launches import rebuilt_sums
from tests.runs import defined, error, moments, run

from .emulated_cases import BF16, CASES, LAGGED, Case
from .emulated_launches import emulated_launches

# Shorter and longer than blocks of 256, 512 and 1024, and than the 4096 to 8192 elements that pass 1 takes at once.
SHAPES = [(1,), (513,), (1031,), (0,), (8192 + 1024 + 7,), (8192,)]
SMALL = [(1,), (513,), (1031,), (0,), (2048,)]  # for what takes long
# With codes: whole blocks, shorter ones at the end of rows that are aligned and that are not, vectors that end with a
# whole access and within one, and small tensors between.
CODED = [(9, 512), (7,), (8, 600), (11, 402), (513,), (5000,), (3, 5, 300), (4099,)]

OTHER_ARCHITECTURES = {
    "sm_80": Case(device={"arch": 80}),
    "sm_100": Case(device={"arch": 100}),
    "sm_100 bf16": Case(dtype=BF16, device={"arch": 100}),
    "sm_75 bf16": Case(dtype=BF16, device={"arch": 75}),  # has no instructions that convert bfloat16
}


@pytest.mark.parametrize(
    "case",
    [*CASES.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in OTHER_ARCHITECTURES.values())],
    ids=[*CASES, *OTHER_ARCHITECTURES],
)
def test_steps_are_as_near_to_the_definition_as_plain_pytorch(case: Case) -> None:
    params, grads = case.start(SHAPES)
    with emulated_launches(**case.device) as emulator:
        own, optimizer = case.trained(params, grads)
    assert {name for name, _ in emulator.statistics} >= {f"{case.options.get('schedule', 'exact')}_step_kernel"}
    plain, plain_optimizer = case.trained(params, grads, "torch")
    options = dict(case.options)
    lagged = options.pop("schedule", "exact") == "lagged"
    amsgrad = options.get("amsgrad", False)
    groups = case.groups(len(params))
    reference = defined(
        params, grads, groups, max_grad_norm=options.get("max_grad_norm"), lagged=lagged, amsgrad=amsgrad
    )
    for right, *both in (
        (
            reference.params,
            *([o.master_param(p) for p in ps] for o, ps in ((optimizer, own), (plain_optimizer, plain))),
        ),
        *(
            (getattr(reference, key), moments(optimizer, own, key), moments(plain_optimizer, plain, key))
            for key in ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad)
        ),
    ):
        assert error(both[0], right) <= 2 * error(both[1], right)
    np.testing.assert_allclose(float(optimizer.grad_norm), float(reference.grad_norm), rtol=1e-7)
    if not lagged:
        np.testing.assert_allclose(float(optimizer.exp_avg_sq_mean), float(reference.exp_avg_sq_mean), rtol=1e-6)


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_amsgrad_keeps_nan(schedule: str) -> None:
    """As torch.maximum does, and not the instruction of that name."""
    (param,), grads = Case().start([(600,)])
    grads[1][0][5] = torch.nan
    with emulated_launches():
        optimizer = FusedAdamS([param], amsgrad=True, schedule=schedule, backend="triton")  # type: ignore[arg-type]
        run([param], grads[:2], optimizer)
    assert optimizer.state[param]["max_exp_avg_sq"].isnan().nonzero().tolist() == [[5]]


# --- Moments in 8 bits

CODED_CASES = {
    "fp32": Case(),
    "bf16": Case({"stochastic_rounding": True, "seed": 7}, BF16),
    "bf16 masters": Case({"master_weights": True, "seed": 7}, BF16),
    "fp32 amsgrad": Case({"amsgrad": True}),
}


@pytest.fixture
def _vectors_have_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones, since each element takes the emulator a while."""
    monkeypatch.setattr(eight_bit, "LEAST_VECTOR", eight_bit.LEAST_NUMEL)


@pytest.mark.thinned
@pytest.mark.usefixtures("_vectors_have_codes")
@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize("name", CODED_CASES)
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_codes_are_those_of_plain_pytorch(schedule: str, name: str, programs: int) -> None:
    case = CODED_CASES[name]
    case = Case({**case.options, "state_dtype": "8bit", "schedule": schedule}, case.dtype)
    params, grads = case.start(CODED)
    with emulated_launches(programs):
        own, optimizer = case.trained(params, grads[:2])
    plain, plain_optimizer = case.trained(params, grads[:2], "torch")
    coded = 0
    for param, wanted in zip(own, plain, strict=True):
        state, wanted_state = optimizer.state[param], plain_optimizer.state[wanted]
        for key in CODES.keys() if CODES["exp_avg"] in state else ():
            apart = (state[CODES[key]].int() - wanted_state[CODES[key]].int()).abs()
            assert apart.max() <= 1
            assert apart.double().mean() <= 1e-3
            torch.testing.assert_close(state[SCALES[key]], wanted_state[SCALES[key]], rtol=1e-6, atol=0)
            coded += 1
        weights = optimizer.master_param(param), plain_optimizer.master_param(wanted)
        close = torch.isclose(*weights, rtol=2**-7 if weights[0].itemsize == 2 else 1e-6)
        assert (~close).double().mean() <= 1e-3
    assert coded == 2 * 6
    torch.testing.assert_close(optimizer.exp_avg_sq_mean, plain_optimizer.exp_avg_sq_mean, rtol=1e-6, atol=0)


# --- Sums

SUMMED = ["fp32", "bf16", "lagged", "fp64", "bf16 masters", "bf16 exp_avg", "amsgrad clipped", "lagged amsgrad"]


@pytest.mark.usefixtures("_vectors_have_codes")
@pytest.mark.parametrize(
    ("case", "shapes"),
    [
        *((CASES[name], SHAPES) for name in SUMMED[:3]),
        (Case({"state_dtype": "8bit"}), CODED),
        *(pytest.param(CASES[name], SHAPES, marks=pytest.mark.slow) for name in SUMMED[3:]),
        *(
            pytest.param(
                Case({**case.options, "state_dtype": "8bit", **LAGGED}, case.dtype), CODED, marks=pytest.mark.slow
            )
            for case in CODED_CASES.values()
        ),
    ],
)
def test_the_sums_that_a_step_leaves_are_those_of_what_is_stored(case: Case, shapes: list[tuple[int, ...]]) -> None:
    """Bit for bit, so that a resumed run is the uninterrupted one. One tensor has no gradient in the last step."""
    params, grads = case.start(shapes)
    grads[1][1] = None  # type: ignore[call-overload]
    with emulated_launches(programs=3):
        _, optimizer = case.trained(params, grads[:2])
        rebuilt_sums(optimizer, programs=3)


# --- Orders and races


def race(case: Case, shapes: list[tuple[int, ...]], seed: int | None) -> list[Tensor]:
    """Returns parameters and state after two steps whose accesses have an order between them."""
    torch.manual_seed(0)
    params, grads = case.start(shapes)
    with emulated_launches(3, seed=seed, find_races=True):
        own, optimizer = case.trained(params, grads[:2])
    return [*own, *(value for param in own for value in optimizer.state[param].values())]


@pytest.mark.parametrize(
    ("case", "shapes"),
    [
        *((CASES[name], SMALL) for name in ("fp32", "amsgrad clipped", "bf16 masters", "lagged")),
        (Case({"state_dtype": "8bit"}), [(9, 512), (7,), (11, 402)]),
    ],
)
def test_there_is_no_race(case: Case, shapes: list[tuple[int, ...]]) -> None:
    """And any order of the warps gives the same bits."""
    assert all(map(torch.equal, *(race(case, shapes, seed) for seed in (None, 0))))

"""Compiled steps bit by bit: codes of 8-bit moments, the sums that steps leave, and any order of the warps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import CODES, SCALES
from tests.backends.triton_launches import rebuilt_sums

from .emulated_cases import CASES, CODED, CODED_CASES, LAGGED, SHAPES, Case
from .emulated_launches import emulated_launches


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
        *((CASES[name], [(1,), (513,), (2048,)]) for name in ("fp32", "amsgrad clipped", "bf16 masters", "lagged")),
        (Case({"state_dtype": "8bit"}), [(9, 512), (7,), (11, 402)]),
    ],
)
def test_there_is_no_race(case: Case, shapes: list[tuple[int, ...]]) -> None:
    """And any order of the warps gives the same bits."""
    assert all(map(torch.equal, *(race(case, shapes, seed) for seed in (None, 0))))

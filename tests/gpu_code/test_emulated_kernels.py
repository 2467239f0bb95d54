"""The compiled step, executed: FusedAdamS with launches in the PTX emulator, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swd_fused import FusedAdamS
from tests.runs import defined, error, moments, run

from .emulated_cases import BF16, CASES, SHAPES, Case
from .emulated_launches import emulated_launches

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

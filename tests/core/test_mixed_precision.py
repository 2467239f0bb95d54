"""Master weights, stochastic rounding and the state's dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.masters_definition import master_of, nearest
from tests.runs import fused, random_grads, random_params, run, steps_for

ONE = [{"params": [0], "weight_decay": 2e-3, "lr": 1e-3}]
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.usefixtures("_codes_of_small_tensors")
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"amsgrad": True, "schedule": "lagged"}], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_masters_are_the_run_in_float32(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Bit for bit: a float32 run with the same gradients. The parameters are its rounded copy."""
    shapes = [(700,), (31, 17), (), (0,)]
    groups = [{"params": range(4), "lr": 1e-2, "weight_decay": 2e-3}]
    params, grads = (
        random_params(shapes, dtype),
        random_grads(shapes, 300 if backend == "cpu" else steps_for(backend, 20), dtype),
    )
    wide = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizer = fused(params, groups, master_weights=True, backend=backend, **options)
    run(params, grads, optimizer)
    peer_optimizer = fused(wide, groups, backend=backend, **options)
    run(wide, [[grad.float() for grad in step_grads] for step_grads in grads], peer_optimizer)
    for param, peer in zip(params, wide, strict=True):
        master = optimizer.master_param(param)
        assert master.dtype == torch.float32
        assert torch.equal(master, master_of(param, optimizer.state[param]))
        assert torch.equal(master, peer.detach())
        assert torch.equal(param.detach(), nearest(master, dtype))


def test_only_16_bit_parameters_get_masters(backend: str) -> None:
    params = [param for dtype in (*HALVES, torch.float32) for param in random_params([(5,)], dtype)]
    optimizer = fused(params, [{"params": [0, 1, 2]}], master_weights=True, backend=backend)
    run(params, [[torch.randn(5, dtype=param.dtype) for param in params]], optimizer)
    found = [{key: tensor.dtype for key, tensor in optimizer.state[p].items() if "master" in key} for p in params]
    assert found == [{"master_remainder": torch.int16}, {"master_param": torch.float32}, {}]


def test_a_model_that_is_converted_between_steps_gets_the_state_it_needs(backend: str) -> None:
    params = [*random_params([(5,)]), *random_params([(5,)], torch.bfloat16)]
    optimizer = fused(params, [{"params": [0, 1]}], master_weights=True, backend=backend)
    keys = {torch.float16: {"master_param"}, torch.bfloat16: {"master_remainder"}}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float16, torch.float64):
        params[0].grad = None
        params[0].data = params[0].data.to(dtype)
        run(params, [[torch.ones_like(param) for param in params]], optimizer)
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert optimizer.state[params[0]]["exp_avg_sq"].dtype == wanted
        assert {key for key in optimizer.state[params[0]] if "master" in key} == keys.get(dtype, set())
    assert float(optimizer.state[params[0]]["step"]) == 5


def test_stochastic_rounding_is_unbiased(backend: str) -> None:
    """Each rounding is up or down; their mean over many elements is the value within four standard errors."""
    numel = 20_000
    value, lower, upper = 1.0 + 0.3 * 2**-7, 1.0, 1.0 + 2**-7
    param = torch.nn.Parameter(torch.ones(numel, dtype=torch.bfloat16))
    group = [{"params": [0], "lr": value - 1, "weight_decay": 0.0, "eps": 0.0, "maximize": True}]
    optimizer = fused([param], group, stochastic_rounding=True, seed=3, backend=backend)
    run([param], [[torch.ones(numel, dtype=torch.bfloat16)]], optimizer)
    rounded = param.detach().double()
    assert set(rounded.unique().tolist()) == {lower, upper}
    up = float((rounded == upper).double().mean())
    assert abs(up - 0.3) < 4 * (0.3 * 0.7 / numel) ** 0.5
    # Neighbours, and elements far apart, are independent.
    ups = (rounded == upper).double() - up
    for distance in (1, 2, 512, 4096):
        assert abs(float((ups[:-distance] * ups[distance:]).mean())) < 4 * 0.21 / (numel - distance) ** 0.5


def test_stochastic_rounding_moves_where_nearest_stalls(backend: str) -> None:
    steps = steps_for(backend, 60)
    grads = [[torch.full((600,), 1e-3, dtype=torch.bfloat16)] for _ in range(steps)]
    param = torch.nn.Parameter(torch.ones(600, dtype=torch.bfloat16))
    group = [{"params": [0], "lr": 1e-3, "weight_decay": 0.0}]
    run([param], grads, fused([param], group, stochastic_rounding=True, backend=backend))
    assert float((1 - param.detach().double()).mean()) == pytest.approx(1e-3 * steps, rel=0.2)


def test_nonfinite_values_are_not_rounded_away(backend: str) -> None:
    param = torch.nn.Parameter(torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0], dtype=torch.bfloat16))
    run(
        [param], [[torch.ones(4, dtype=torch.bfloat16)]], fused([param], ONE, stochastic_rounding=True, backend=backend)
    )
    assert param[0] == torch.inf
    assert param[1] == -torch.inf
    assert param[2].isnan()
    assert param[3].isfinite()


# --- Updates that bfloat16 cannot hold


def test_small_learning_rates_in_bfloat16_warn() -> None:
    params = random_params([(20,)], torch.bfloat16)
    with pytest.warns(UserWarning, match=r"bfloat16 parameters with lr=1e-05.*master_weights=True") as caught:
        FusedAdamS(params, lr=1e-5)
    assert len(caught) == 1


@pytest.mark.parametrize("options", [{"master_weights": True}, {"stochastic_rounding": True}, {"lr": 1e-3}], ids=str)
def test_no_warning_where_updates_are_kept(options: dict[str, Any]) -> None:
    FusedAdamS(random_params([(20,)], torch.bfloat16), **{"lr": 1e-5, **options})

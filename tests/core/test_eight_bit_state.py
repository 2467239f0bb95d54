"""Moments in 8 bits in state dicts: converted, loaded, copied, written to by others, and refused where damaged."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from swd_fused.state.moments import decoded_moment
from tests.runs import random_grads, random_params, run

CODED_KEYS = {"step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_root_codes", "exp_avg_sq_root_scales"}

pytestmark = pytest.mark.usefixtures("_codes_of_small_tensors")


def trained(options: dict[str, Any], steps: int = 3, shape: tuple[int, ...] = (16, 300)) -> FusedAdamS:
    torch.manual_seed(0)
    params = random_params([shape])
    optimizer = FusedAdamS(params, **options)
    run(params, random_grads([shape], steps), optimizer)
    return optimizer


def test_float32_state_loads_into_8_bits_and_back(backend: str) -> None:
    wide = trained({"backend": backend})
    narrow = trained({"backend": backend, "state_dtype": "8bit"}, steps=0)
    narrow.load_state_dict(wide.state_dict())
    (param,) = narrow.numbered_params()
    assert narrow.state[param].keys() == CODED_KEYS
    before, after = (decoded_moment(o.state[o.numbered_params()[0]], "exp_avg_sq") for o in (wide, narrow))
    assert float((before.sqrt() - after.sqrt()).abs().max()) <= 0.51 / 255 * float(before.sqrt().max())
    back = trained({"backend": backend}, steps=0)
    back.load_state_dict(narrow.state_dict())
    (own,) = back.numbered_params()
    assert torch.equal(back.state[own]["exp_avg_sq"], after)
    for optimizer in (narrow, back):  # both go on
        run(list(optimizer.numbered_params()), random_grads([(16, 300)], 2), optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_warning_where_nothing_can_have_8_bits(dtype: torch.dtype) -> None:
    params = random_params([(16, 300) if dtype == torch.float64 else (3, 3), (7,)], dtype)
    with pytest.warns(UserWarning, match='state_dtype="8bit" for 2 parameters of which none can') as warned:
        FusedAdamS(params, state_dtype="8bit")
    assert warned[0].filename == __file__


def test_adamw_state_loads_into_8_bits() -> None:
    params = random_params([(16, 300)])
    adamw = torch.optim.AdamW(params)
    run(params, random_grads([(16, 300)], 2), adamw)
    optimizer = trained({"state_dtype": "8bit"}, steps=0)
    with pytest.warns(UserWarning, match="for AdamW's decoupled decay"):
        optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.state[optimizer.numbered_params()[0]].keys() == CODED_KEYS


def test_copies_and_pickles_go_on_alike() -> None:

    optimizer = trained({"state_dtype": "8bit"})
    grads = random_grads([(16, 300)], 2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for each in (optimizer, *copies):
        run(list(each.numbered_params()), grads, each)
    for each in copies:
        assert torch.equal(each.numbered_params()[0], optimizer.numbered_params()[0])


@pytest.mark.backends(interpreted=False)
@pytest.mark.parametrize("key", ["exp_avg_sq_root_codes", "exp_avg_sq_root_scales"])
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_writes_by_others_are_seen(backend: str, key: str, schedule: str) -> None:
    """A second moment that somebody has changed has another sum."""
    results = []
    for resumes in (False, True):
        optimizer = trained({"state_dtype": "8bit", "backend": backend, "schedule": schedule})
        (param,) = optimizer.numbered_params()
        value = optimizer.state[param][key]
        value.copy_(value // 2 + 1 if key.endswith("codes") else value * 2)
        if resumes:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
        run([param], random_grads([(16, 300)], 1), optimizer)
        results.append((param.detach().clone(), float(optimizer.exp_avg_sq_mean)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.backends(interpreted=False)
def test_codes_in_another_layout_are_taken(backend: str) -> None:
    results = []
    for is_transposed in (False, True):
        optimizer = trained({"state_dtype": "8bit", "backend": backend})
        (param,) = optimizer.numbered_params()
        state = optimizer.state[param]
        for key in CODED_KEYS - {"step"}:
            state[key] = state[key].t().contiguous().t() if is_transposed else state[key].clone()
        run([param], random_grads([(16, 300)], 2), optimizer)
        results.append(param)
    assert torch.equal(*results)


def test_numbers_beside_codes_are_dropped(backend: str) -> None:
    """Or the neighbour, whose moments are numbers, would take them for its own."""
    shapes = [(16, 300), (16, 300)]
    params, grads = random_params(shapes), random_grads(shapes, 2)
    groups = [{"params": params[:1]}, {"params": params[1:], "state_dtype": None}]
    optimizer = FusedAdamS(groups, state_dtype="8bit", backend=backend)
    run(params, grads[:1], optimizer)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0].update({key: torch.ones(16, 300) for key in ("exp_avg", "exp_avg_sq")})
    optimizer.load_state_dict(state_dict)
    assert optimizer.state[params[0]].keys() == CODED_KEYS
    run(params, grads[1:], optimizer)
    assert not torch.equal(optimizer.state[params[1]]["exp_avg_sq"], state_dict["state"][1]["exp_avg_sq"])

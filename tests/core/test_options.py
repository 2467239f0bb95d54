"""The tables of options: the constructor has the same, and pickles without an option get its default."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

from swd_fused import FusedAdamS
from swd_fused.options import GROUP_DEFAULTS, Compatibility, Options
from tests.runs import random_grads, random_params, run

OPTIONS = {**GROUP_DEFAULTS, "process_group": None, **Options._field_defaults}

# Groups count the steps that are left; the constructor's None is for 100 where there are any to take, or for 0. And
# they keep what steps have seen.
# What None is for weight_decay depends on `decay`.
OF_GROUPS_ONLY = {"calibration_steps": 0, "largest_lr_so_far": 0.0, "weight_decay": 5e-4}
ARGUMENTS = inspect.signature(FusedAdamS).parameters.keys() & OPTIONS.keys()


def test_the_constructor_has_the_options_of_the_tables() -> None:
    parameters = inspect.signature(FusedAdamS).parameters
    own = {name: parameter.default for name, parameter in parameters.items() if name not in ("params", "compatibility")}
    in_tables = {name: default for name, default in OPTIONS.items() if name not in Compatibility.__optional_keys__}
    assert {**own, **OF_GROUPS_ONLY} == in_tables


# --- Pickles


def test_options_keep_their_places() -> None:
    """Pickles have their values in this order. New options come after them."""
    first = ("decay", "master_weights", "stochastic_rounding", "seed", "skip_nonfinite", "max_grad_norm", "schedule")
    assert Options._fields[:10] == (*first, "total_numel", "backend", "offload")


def test_what_had_offload_in_version_0_2_is_loaded_or_refused() -> None:
    """It has left its place in pickles. A pickle with True may have state on other devices than the parameters."""
    params = random_params([(3,), (4,)])
    optimizer = FusedAdamS(params, offload=False)
    run(params, random_grads([(3,), (4,)], 1), optimizer)
    again = pickle.loads(pickle.dumps(optimizer))
    assert tuple(again.options)[9] is False
    assert again.options == optimizer.options
    state = optimizer.__getstate__()
    pickled = pickle.dumps({**state, "options": state["options"]._replace(offload=True)})
    message = r"got offload=True, which is gone.*fully_shard\(.*CPUOffloadPolicy\(\).*follow\(engine\)"
    with pytest.raises(ValueError, match=message):
        FusedAdamS.__new__(FusedAdamS).__setstate__(pickle.loads(pickled))
    with pytest.raises(ValueError, match=message):
        FusedAdamS(params, offload=True)


def test_a_pickle_of_an_older_version_gets_the_defaults() -> None:
    """Groups may have only what torch's AdamW has, and `max_decay`."""
    params = random_params([(3,), (4,)])
    optimizer = FusedAdamS(params)
    run(params, random_grads([(3,), (4,)], 1), optimizer)
    state = pickle.loads(pickle.dumps(optimizer.__getstate__()))
    in_first_version = {"params", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "max_decay"}
    for group in (state["defaults"], *state["param_groups"]):
        for key in group.keys() - in_first_version:
            del group[key]
    del state["_clipped_steps"]
    older = FusedAdamS.__new__(FusedAdamS)
    older.__setstate__(state)
    assert optimizer.defaults == GROUP_DEFAULTS
    assert GROUP_DEFAULTS.items() <= older.defaults.items()
    assert [group.keys() for group in older.param_groups] == [group.keys() for group in optimizer.param_groups]
    assert older.options == optimizer.options
    own = older.numbered_params()
    run(own, random_grads([(3,), (4,)], 1), older)  # type: ignore[arg-type]
    assert all(int(older.state[param]["step"]) == 2 for param in own)
    assert all(torch.isfinite(param).all() for param in own)

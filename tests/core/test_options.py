"""The tables of options: the constructor has the same, and explains them."""

from __future__ import annotations

import inspect

import pytest

from swd_fused import FusedAdamS
from swd_fused.options import GROUP_DEFAULTS, Compatibility, Options
from tests.runs import random_params

OPTIONS = {**GROUP_DEFAULTS, "process_group": None, **Options._field_defaults}

# Groups count the steps that are left and keep what steps have seen; the constructor's None depends on other options.
OF_GROUPS_ONLY = {"calibration_steps": 0, "largest_lr_so_far": 0.0, "weight_decay": 5e-4}
ARGUMENTS = inspect.signature(FusedAdamS).parameters.keys() & OPTIONS.keys()


def test_the_constructor_has_the_options_of_the_tables() -> None:
    parameters = inspect.signature(FusedAdamS).parameters
    own = {name: parameter.default for name, parameter in parameters.items() if name not in ("params", "compatibility")}
    in_tables = {name: default for name, default in OPTIONS.items() if name not in Compatibility.__optional_keys__}
    assert {**own, **OF_GROUPS_ONLY} == in_tables


def test_each_argument_is_explained() -> None:
    explained = inspect.getdoc(FusedAdamS) or ""
    assert not [name for name in ARGUMENTS if f"\n    {name}: " not in explained]


def test_offload_is_refused_and_both_replacements_are_named() -> None:
    message = r"got offload=True, which is gone.*fully_shard\(.*CPUOffloadPolicy\(\).*follow\(engine\)"
    with pytest.raises(ValueError, match=message):
        FusedAdamS(random_params([(3,)]), offload=True)
    assert FusedAdamS(random_params([(3,)]), offload=False).options == Options()

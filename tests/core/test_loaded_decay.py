"""What a state dict says about the weight decay, and what an optimizer that decays otherwise makes of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from swd_fused import FusedAdamS
from tests.runs import random_grads, random_params, run

SHAPES = [(6,), (3, 4)]
DECAY = ("weight_decay", "adamw_weight_decay", "calibration_steps", "max_decay")

Built = dict[str, Any]
SCHEDULED: Built = {"weight_decay": 1e-3}
CALIBRATING: Built = {"adamw_weight_decay": 0.2, "calibration_steps": 7}
DECOUPLED: Built = {"decay": "decoupled", "weight_decay": 0.1}
L2: Built = {"decay": "l2", "weight_decay": 0.03}
KINDS = {"scheduled": SCHEDULED, "calibrating": CALIBRATING, "decoupled": DECOUPLED, "l2": L2}
DIFFERENT = [
    (one, other) for one in KINDS for other in KINDS if one != other and {one, other} != {"scheduled", "calibrating"}
]


def trained(params: list[torch.nn.Parameter], options: Built, steps: int = 2) -> FusedAdamS:
    optimizer = FusedAdamS(params, **options)
    run(params, random_grads(SHAPES, steps), optimizer)
    return optimizer


def decay_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [optimizer.param_groups[0].get(key) for key in DECAY]


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(("saved", "own"), DIFFERENT, ids=lambda kind: kind)
def test_another_kind_of_decay_is_not_taken_over(saved: str, own: str) -> None:
    params = random_params(SHAPES)
    state_dict = trained(params, {**KINDS[saved], "max_decay": 0.5}).state_dict()
    optimizer = FusedAdamS(params, lr=0.5, **KINDS[own])
    before = decay_of(optimizer)
    kept = "adamw_weight_decay=0.2" if own == "calibrating" else f"weight_decay={KINDS[own]['weight_decay']}"
    with pytest.warns(UserWarning, match=rf"keeping {kept}") as caught:
        optimizer.load_state_dict(state_dict)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert decay_of(optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 1e-3, "what is not about the decay is loaded"
    run(params, random_grads(SHAPES, 1), optimizer)
    assert optimizer.state[params[0]]["step"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_is_taken_over_silently(kind: str) -> None:
    params = random_params(SHAPES)
    saved = trained(params, {**KINDS[kind], "max_decay": 0.5})
    other = {"adamw_weight_decay": 0.7} if kind == "calibrating" else {**KINDS[kind], "weight_decay": 0.007}
    optimizer = FusedAdamS(params, **other)
    with silence():
        optimizer.load_state_dict(saved.state_dict())
    assert decay_of(optimizer) == decay_of(saved)


def test_a_group_that_does_not_decay_is_not_mentioned() -> None:
    params = random_params(SHAPES)
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
    state_dict = FusedAdamS(groups, **DECOUPLED).state_dict()
    optimizer = FusedAdamS([dict(group) for group in groups], weight_decay=1e-3)
    with pytest.warns(UserWarning, match="keeping weight_decay=0.001") as caught:
        optimizer.load_state_dict(state_dict)
    assert len(caught) == 1


# --- Checkpoints of others


@pytest.mark.parametrize(
    ("peer", "own", "is_taken"),
    [
        (torch.optim.AdamW, "decoupled", True),
        (torch.optim.AdamW, "l2", False),
        (torch.optim.AdamW, "scheduled", False),
        (torch.optim.Adam, "l2", True),
        (torch.optim.Adam, "decoupled", False),
        (torch.optim.Adam, "scheduled", False),
    ],
)
def test_torchs_kinds(peer: Any, own: str, is_taken: bool) -> None:
    params = random_params(SHAPES)
    other = peer(params, weight_decay=0.25)
    run(params, random_grads(SHAPES, 1), other)
    optimizer = FusedAdamS(params, **KINDS[own])
    before = decay_of(optimizer)
    with silence() if is_taken else pytest.warns(UserWarning, match=r"weight_decay=0\.25"):
        optimizer.load_state_dict(other.state_dict())
    assert decay_of(optimizer) == ([0.25, *before[1:]] if is_taken else before)


@pytest.mark.parametrize("own", ["decoupled", "l2"])
def test_a_foreign_kind_that_nobody_knows_is_taken_for_the_own(own: str) -> None:
    """Those of an old torch, and apex, do not say which of both it is."""
    params = random_params(SHAPES)
    adamw = torch.optim.AdamW(params, weight_decay=0.25)
    run(params, random_grads(SHAPES, 1), adamw)
    state_dict = adamw.state_dict()
    del state_dict["param_groups"][0]["decoupled_weight_decay"]
    optimizer = FusedAdamS(params, **KINDS[own])
    with silence():
        optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_our_older_checkpoints_count_as_scheduled() -> None:
    params = random_params(SHAPES)
    state_dict = trained(params, CALIBRATING).state_dict()
    del state_dict["param_groups"][0]["decay"]
    same, other = FusedAdamS(params), FusedAdamS(params, **DECOUPLED)
    with silence():
        same.load_state_dict(state_dict)
    assert decay_of(same)[1:3] == [0.2, 5]
    with pytest.warns(UserWarning, match="keeping weight_decay=0.1"):
        other.load_state_dict(state_dict)
    assert decay_of(other)[:3] == [0.1, None, 0]


def test_an_adamw_that_went_on_with_our_state_is_an_adamw() -> None:
    """torch keeps our keys in its groups. What it saves is AdamW's all the same."""
    params = random_params(SHAPES)
    adamw = torch.optim.AdamW(params)
    adamw.load_state_dict(trained(params, CALIBRATING).state_dict())
    adamw.param_groups[0]["weight_decay"] = 0.25
    optimizer, decoupled = FusedAdamS(params, **SCHEDULED), FusedAdamS(params, **DECOUPLED)
    with pytest.warns(UserWarning, match=r"weight_decay=0\.25.*keeping weight_decay=0\.001"):
        optimizer.load_state_dict(adamw.state_dict())
    with silence():
        decoupled.load_state_dict(adamw.state_dict())
    assert decay_of(decoupled)[:3] == [0.25, None, 0]


# --- adamw_weight_decay is set


@pytest.mark.parametrize("value", [0.2, 0.1])
def test_adamws_checkpoint_goes_on_with_a_calibration(value: float) -> None:
    """There is nothing to match by hand, and nothing to say if it is AdamW's own value."""
    params = random_params(SHAPES)
    adamw = torch.optim.AdamW(params, weight_decay=value)
    run(params, random_grads(SHAPES, 1), adamw)
    optimizer = FusedAdamS(params, **CALIBRATING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(adamw.state_dict())
    assert not any("pass it as adamw_weight_decay" in str(warning.message) for warning in caught)
    assert [str(warning.message).count("keeping adamw_weight_decay=0.2") for warning in caught] == [1] * (value != 0.2)
    assert decay_of(optimizer)[1:3] == [0.2, 7]


# --- The key in groups


def test_the_kind_is_in_the_groups_and_survives_torchs_flattened_checkpoints() -> None:
    """torch unflattens only what the groups of the optimizer that loads have."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    grads = random_grads([tuple(param.shape) for param in model.parameters()], 1)
    decoupled, optimizer = (FusedAdamS(model.parameters(), **options) for options in (DECOUPLED, SCHEDULED))
    run(list(model.parameters()), grads, decoupled)
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    state_dict = get_optimizer_state_dict(model, decoupled, options=flattened)
    with pytest.warns(UserWarning, match=r"weight_decay=0\.1.*keeping weight_decay=0\.001"):
        set_optimizer_state_dict(model, optimizer, state_dict, options=flattened)
    assert decay_of(optimizer)[0] == 1e-3

"""The host around the kernels: what a step asks, what it notices, and what it leaves alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from swd_fused.core import step as core_step
from swd_fused.core.snapshot import Snapshot
from swd_fused.core.values import SCHEDULED, GroupValues
from swd_fused.decay import kinds
from swd_fused.options import GROUP_OPTIONS
from tests.core.test_effects import CHANGES as EFFECTS
from tests.runs import random_grads, random_params, run

SHAPES = [(20,), (30,), (7, 5)]
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """All descriptions, as they are made."""
    made: list[Snapshot] = []

    class Counted(Snapshot):
        def __init__(self, *inputs: Any) -> None:
            super().__init__(*inputs)
            made.append(self)

    monkeypatch.setattr(core_step, "Snapshot", Counted)
    return made


# --- Ordinary training stays on the short way


def scaled(optimizer: FusedAdamS) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 8.0), torch.zeros(1)  # type: ignore[attr-defined]


ORDINARY: dict[str, Callable[[FusedAdamS], object]] = {
    "other gradients": lambda optimizer: None,
    "another lr": lambda optimizer: optimizer.param_groups[0].update(lr=3e-3),
    "other betas": lambda optimizer: optimizer.param_groups[0].update(betas=(0.8, 0.99)),
    "another decay": lambda optimizer: optimizer.param_groups[0].update(weight_decay=1e-3),
    "another norm to clip to": lambda optimizer: setattr(optimizer, "max_grad_norm", 0.5),
    "another schedule": lambda optimizer: setattr(optimizer, "schedule", "lagged"),
    "a scaled loss": scaled,
    "a note in a group": lambda optimizer: optimizer.param_groups[0].update(note="seen"),
}


@pytest.mark.backends(interpreted=False)
@pytest.mark.parametrize("change", ORDINARY)
def test_ordinary_training_needs_one_description(backend: str, change: str, described: list[Snapshot]) -> None:
    params, grads = random_params(SHAPES), random_grads(SHAPES, 6)
    optimizer = FusedAdamS(params, backend=backend)
    run(params, grads[:2], optimizer)
    ORDINARY[change](optimizer)
    run(params, [grads[2], [None, *grads[3][1:]], [grads[4][0], None, grads[4][2]], grads[5]], optimizer)
    assert len(described) == 1


# --- Everything else is noticed


def replaced(state: dict[str, Any], key: str) -> None:
    state[key] = state[key].clone()


def moved(state: dict[str, Any], key: str) -> None:
    state[key].data = state[key].data.clone()


@pytest.mark.parametrize("change", [replaced, moved])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"master_weights": True}, {"ema_decay": 0.5}], ids=str)
def test_all_tensors_of_the_state_are_watched(
    options: dict[str, Any], change: Callable[..., None], described: list[Snapshot]
) -> None:
    """Whatever keys there are: a tensor that is added to the state is watched too."""
    params = random_params(SHAPES, torch.bfloat16 if "master_weights" in options else torch.float32)
    optimizer = FusedAdamS(params, backend="cpu", **options)
    run(params, random_grads(SHAPES, 1, params[0].dtype), optimizer)
    keys = list(optimizer.state[params[1]])
    assert len(keys) == 3 + len(options)
    for count, key in enumerate(keys, start=1):
        if key == "step" and change is moved:
            continue  # written in place by each step, wherever it is
        before = len(described)
        change(optimizer.state[params[1]], key)
        run(params, random_grads(SHAPES, 1, params[0].dtype), optimizer)
        assert len(described) == before + 1, (count, key)


def test_a_parameter_in_another_group_is_noticed(described: list[Snapshot]) -> None:
    """Other tests show what comes of other changes: they go on as an optimizer that was built so."""
    params, grads = random_params(SHAPES), random_grads(SHAPES, 3)
    optimizer = FusedAdamS([{"params": params[:2]}, {"params": params[2:]}], backend="cpu")
    run(params, grads[:2], optimizer)
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())
    run(params, grads[2:], optimizer)
    assert len(described) == 2


OTHER = {name: change.value for name, change in EFFECTS.items()} | {"process_group": None, "largest_lr_so_far": 0.5}


@pytest.mark.parametrize("key", GROUP_OPTIONS)
def test_all_entries_of_a_group_are_watched(key: str) -> None:
    optimizer = FusedAdamS(random_params(SHAPES))
    values = GroupValues(optimizer.param_groups, "scheduled", kinds)
    table = values.on(CPU).table
    assert values.hold(optimizer.param_groups)
    optimizer.param_groups[0][key] = OTHER[key]
    holds = values.hold(optimizer.param_groups)
    assert holds == (key in SCHEDULED)
    if holds:  # it has followed, in the memory that kernels read
        expected = GroupValues(optimizer.param_groups, "scheduled", kinds)
        assert values.rows == values.on(CPU).rows == expected.rows
        assert values.on(CPU).table is table
        assert torch.equal(table, expected.on(CPU).table)


# --- A short way


def test_a_step_makes_few_calls_in_few_files() -> None:
    """Counted in a process of its own, which sets up torch's fake process group for the sharded step."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.step_calls"]
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(.+): (\d+) calls in (\d+) files", printed)
    calls, files = {name: int(calls) for name, calls, _ in found}, {name: int(files) for name, _, files in found}
    assert calls["exact"] <= 20
    assert files["exact"] <= 5
    assert calls["triton backend"] <= 40
    assert calls["FSDP2, lagged"] <= 60

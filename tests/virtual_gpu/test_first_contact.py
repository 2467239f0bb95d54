"""What a first run on a GPU meets: no compiler, a shared device, no cooperative launches, a host that waits."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import virtual_gpu as gpu

from swd_fused import FusedAdamS
from swd_fused.backends.triton import launch
from tests.runs import random_grads, random_params, run

# So many elements that a grid is as large as the device holds.
SHAPES = [(50_000,), (700,)]

WITHOUT_COMPILER = """
import torch
from swd_fused import FusedAdamS

param = torch.nn.Parameter(torch.ones(3, device="cuda"))
param.grad = torch.ones(3, device="cuda")
optimizer = FusedAdamS([param])
print(optimizer)
optimizer.step()
print(param.tolist())
FusedAdamS([param], backend="triton")
"""


def test_without_a_c_compiler_auto_falls_back_and_triton_says_what_is_missing(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "CC"}
    env |= {"PATH": str(Path(sys.executable).parent), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], env=env, capture_output=True, text=True)
    assert "backend: torch (Triton cannot launch kernels here (RuntimeError: Failed to find C compiler." in done.stdout
    assert "[0.99" in done.stdout
    error = done.stderr.splitlines()[-1]
    assert error.startswith('RuntimeError: backend="triton" cannot serve torch.float32 parameters on cuda:0: Triton ')
    assert "with a C compiler (gcc, clang or $CC)" in error


@pytest.fixture
def shared_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With half of the multiprocessors that its properties say."""
    monkeypatch.setattr(gpu.settings, "multiprocessors", gpu.settings.multiprocessors // 2)
    yield
    launch._can_wait.clear()


@pytest.mark.usefixtures("shared_device")
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_device_with_fewer_multiprocessors_than_it_says_gets_split_launches(amsgrad: bool) -> None:
    params, grads = random_params(SHAPES), random_grads(SHAPES, 3)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer = FusedAdamS(params, amsgrad=amsgrad, backend="triton")
    with pytest.warns(UserWarning, match="fewer multiprocessors than its properties say"):
        run(params, grads[:1], optimizer)
    first = len(gpu.launches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(params, grads[1:], optimizer)
    assert not any(launched.cooperative for launched in gpu.launches[first:])
    assert "backend: triton (in two launches" in repr(optimizer)
    run(twins, grads, FusedAdamS(twins, amsgrad=amsgrad, backend="torch"))
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"schedule": "lagged"}, {"skip_nonfinite": True}], ids=str)
def test_no_step_with_a_scaler_waits_or_copies_from_pageable_memory(options: dict[str, Any]) -> None:
    """The first one neither."""
    params, grads = random_params(SHAPES), random_grads(SHAPES, 3)
    optimizer = FusedAdamS(params, backend="triton", **options)
    optimizer.grad_scale = torch.ones(1)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad
        before = gpu.counts()
        optimizer.step()
        after = gpu.counts()
        assert {what: after[what] - before[what] for what in ("sync", "h2d_pageable")} == {"sync": 0, "h2d_pageable": 0}


@pytest.mark.parametrize("options", [{}, {"schedule": "lagged"}, {"amsgrad": True}], ids=str)
def test_each_grid_is_what_the_device_holds_of_that_kernel(options: dict[str, Any]) -> None:
    """More would run in a second, thin wave."""
    params, grads = random_params([(200_000,)]), random_grads([(200_000,)], 3)
    optimizer = FusedAdamS(params, backend="triton", **options)
    run(params, grads[:1], optimizer)  # the first one is taken in passes where the schedule is lagged
    first = len(gpu.launches)
    run(params, grads[1:], optimizer)
    steps = [launched for launched in gpu.launches[first:] if "step_kernel" in launched.name]
    assert len(steps) == 2
    for launched in steps:
        most = min(launched.resident, launch.PROGRAMS_PER_MULTIPROCESSOR)
        assert launched.grid == most * gpu.settings.multiprocessors
        assert launched.cooperative == ("exact_step" in launched.name)


@pytest.mark.parametrize("options", [{}, {"schedule": "lagged"}, {"amsgrad": True}], ids=str)
def test_gradients_that_come_and_go_change_only_addresses(options: dict[str, Any]) -> None:
    """One launch for each step, and two uploads at most besides the mask: addresses and limits. No pass over v."""
    shapes = [(700,), (40, 30), (3,), (0,), (1024,)]
    params, grads = random_params(shapes), random_grads(shapes, 7)
    twins = [torch.nn.Parameter(param.detach().cpu()) for param in params]
    optimizer, twin = FusedAdamS(params, backend="triton", **options), FusedAdamS(twins, backend="torch", **options)
    for t, step_grads in enumerate(grads):
        for i, (param, own, grad) in enumerate(zip(params, twins, step_grads, strict=True)):
            param.grad, own.grad = (None, None) if (i + t) % 3 == 0 else (grad, grad.cpu())
        twin.step()
        first, before = len(gpu.launches), gpu.counts()
        optimizer.step()
        if t >= 4:  # all have state, and each pattern was there once
            names = [launched.name for launched in gpu.launches[first:] if "kernel" in launched.name]
            assert names == [f"{options.get('schedule', 'exact')}_step_kernel"]
            after = gpu.counts()
            assert after["h2d_pinned"] - before["h2d_pinned"] <= 3
            assert after["sync"] == before["sync"]
    for param, own in zip(params, twins, strict=True):
        torch.testing.assert_close(param.cpu(), own, rtol=2e-6, atol=2e-6)

"""Which kernels are compiled and launched on devices that are not here. Nothing runs: launches are only noted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS, backends
from swd_fused.backends.triton import launch


class Noted:
    """Kernels, in the order in which they were compiled and launched."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.launched: list[str] = []


def amd_properties(architecture: str) -> SimpleNamespace:
    """As torch reports them, with half of the registers that these devices have."""
    return SimpleNamespace(
        gcnArchName=f"{architecture}:sramecc+:xnack-",
        warp_size=64,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        multi_processor_count=4,
    )


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """An AMD device that cannot launch cooperatively, as the driver says."""
    noted = Noted()

    def compiled(self: launch.Launcher) -> Any:
        noted.compiled.append(self._kernel.__name__)
        return SimpleNamespace(n_regs=64)

    def called(self: launch.Launcher, programs: int, *args: Any) -> None:
        noted.launched.append(self._kernel.__name__)

    properties = amd_properties("gfx942")
    monkeypatch.setattr(launch.Launcher, "compiled", compiled)
    monkeypatch.setattr(launch.Launcher, "__call__", called)
    monkeypatch.setattr(launch, "_can_wait", {torch.device("cpu"): False})
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(backends, "choose", lambda *_: backends.load_triton_backend())
    for cached in (launch.launcher_for, launch.programs_on):
        cached.cache_clear()
    yield noted
    for cached in (launch.launcher_for, launch.programs_on):
        cached.cache_clear()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_without_cooperative_launches_the_kernel_that_needs_them_is_not_loaded(noted: Noted, amsgrad: bool) -> None:
    param = torch.nn.Parameter(torch.ones(1000))
    param.grad = torch.ones(1000)
    FusedAdamS([param], amsgrad=amsgrad, decay="decoupled", max_grad_norm=1.0).step()
    assert "exact_step_kernel" not in noted.compiled + noted.launched
    passes = ["gradient_sums_kernel", *["max_exp_avg_sq_sum_kernel"] * amsgrad, "update_kernel"]
    assert noted.launched == ["stored_sums_kernel", *passes]


@pytest.mark.parametrize(
    ("architecture", "registers", "programs"),
    [
        ("gfx942", 111, 8),
        ("gfx942", 128, 8),
        ("gfx942", 136, 6),  # three waves on each SIMD: 131,072 registers divided by 136 * 128 would be 7 programs
        ("gfx942", 256, 4),
        ("gfx950", 128, 8),
        ("gfx90a", 128, 8),
    ],
)
def test_programs_on_amd_are_counted_by_registers_of_each_simd(
    monkeypatch: pytest.MonkeyPatch, architecture: str, registers: int, programs: int
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: amd_properties(architecture))
    compiled = SimpleNamespace(n_regs=registers)
    assert launch.resident_programs(compiled, torch.device("cuda")) == 4 * programs

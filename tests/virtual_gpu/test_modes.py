"""Every mode of FusedAdamS through Triton's real launcher, against the torch backend on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import virtual_gpu as gpu

from swd_fused import FusedAdamS

SHAPES = [(700,), (40, 30), (3,), (0,), (1024,)]
CODED_SHAPES = [(700,), (9, 512), (3,), (11, 402), (1, 4200)]  # matrices of at least 4096 elements have codes
LR = 1e-3
SCALE = 1024.0
BF16 = torch.bfloat16
LAGGED = {"schedule": "lagged"}

# Relative to the largest value of a tensor. In 16 bits one or two roundings may fall the other way.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


@dataclass
class Mode:
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    steps: int = 4
    tensor_lr: bool = False  # with another value in each step
    scaler: bool = False  # with an overflow in the second step
    groups: bool = False
    missing: bool = False  # each gradient is missing in some steps
    added: bool = False  # a group of parameters is added later


MODES = {
    "exact": Mode(),
    "lagged": Mode(LAGGED),
    "clip": Mode({"max_grad_norm": 0.5}),
    "amsgrad": Mode({"amsgrad": True}),
    "amsgrad clip": Mode({"amsgrad": True, "max_grad_norm": 0.5}),
    "bf16 masters": Mode({"master_weights": True}, BF16),
    "bf16 stochastic": Mode({"stochastic_rounding": True}, BF16),
    "bf16": Mode(dtype=BF16),
    "fp16": Mode(dtype=torch.float16),
    "fp64": Mode(dtype=torch.float64),
    "tensor lr": Mode(tensor_lr=True),
    "scaler": Mode(scaler=True),
    "scaler lagged": Mode(LAGGED, scaler=True),
    "scaler clip skip_nonfinite": Mode({"max_grad_norm": 0.5, "skip_nonfinite": True}, scaler=True),
    "groups": Mode(groups=True),
    "missing": Mode(missing=True, steps=5),
    "missing lagged": Mode(LAGGED, missing=True, steps=5),
    "added params": Mode(added=True),
    "added params lagged": Mode(LAGGED, added=True),
    "state bf16": Mode({"state_dtype": BF16}, BF16),
    "8 bits": Mode({"state_dtype": "8bit"}),
    "8 bits lagged": Mode({"state_dtype": "8bit", **LAGGED}),
    "8 bits amsgrad clip": Mode({"state_dtype": "8bit", "amsgrad": True, "max_grad_norm": 0.5}),
    "8 bits bf16 stochastic": Mode({"state_dtype": "8bit", "stochastic_rounding": True}, BF16),
    "8 bits bf16 masters lagged": Mode({"state_dtype": "8bit", "master_weights": True, **LAGGED}, BF16),
    "8 bits scaler missing": Mode({"state_dtype": "8bit"}, scaler=True, missing=True, steps=5),
    "decoupled": Mode({"decay": "decoupled"}),
    "l2": Mode({"decay": "l2"}),
}


class Training:
    """Trains the same parameters with the same gradients on any device."""

    def __init__(self, mode: Mode, device: str, backend: str) -> None:
        self.mode, self.device = mode, device
        random = torch.Generator("cpu").manual_seed(1)
        shapes = CODED_SHAPES if "state_dtype" in mode.options else SHAPES
        values = [torch.randn(shape, generator=random, device="cpu").to(mode.dtype) for shape in shapes]
        self.params = [torch.nn.Parameter(value.to(device)) for value in values]
        first: Any = self.params[:3] if mode.added else self.params
        if mode.groups:
            first = [
                {"params": first[:2], "lr": 2e-3, "betas": (0.8, 0.99)},
                {"params": first[2:], "weight_decay": 1e-2},
            ]
        self.lr: Any = torch.tensor(LR, device=device) if mode.tensor_lr else LR
        self.optimizer = FusedAdamS(first, lr=self.lr, backend=backend, **mode.options)

    def prepare(self, t: int) -> None:
        """Sets the gradients, and whatever else changes from step to step."""
        random = torch.Generator("cpu").manual_seed(100 + t)
        scale = SCALE if self.mode.scaler else 1.0
        for i, param in enumerate(self.params):
            grad = (torch.randn(param.shape, generator=random, device="cpu") * 0.1 * scale).to(param.dtype)
            param.grad = None if self.mode.missing and (i + t) % 3 == 0 else grad.to(self.device)
        if self.mode.added and t == 2:
            self.optimizer.add_param_group({"params": self.params[3:]})
        if self.mode.tensor_lr:
            self.lr.fill_(LR * (t + 1))
        if self.mode.scaler:
            self.optimizer.grad_scale = torch.tensor(SCALE, device=self.device)  # type: ignore[attr-defined]
            self.optimizer.found_inf = torch.tensor([float(t == 1)], device=self.device)  # type: ignore[attr-defined]

    def values(self) -> list[torch.Tensor]:
        """Parameters, state, logged numbers and the count of skipped steps, as float64 on the CPU."""
        states = [self.optimizer.state[param] for param in self.params]
        logged = [self.optimizer.exp_avg_sq_mean, self.optimizer.grad_norm, self.optimizer.skipped_steps]
        state = [value for own in states for _, value in sorted(own.items())]
        return [value.detach().cpu().double() for value in (*self.params, *state, *logged)]


@pytest.mark.parametrize("name", MODES)
def test_a_mode_agrees_with_plain_pytorch(name: str) -> None:
    mode = MODES[name]
    on_gpu, on_cpu = Training(mode, "cuda", "triton"), Training(mode, "cpu", "torch")
    first = len(gpu.launches)
    for t in range(mode.steps):
        for training in (on_gpu, on_cpu):
            training.prepare(t)
            training.optimizer.step()
    launched = gpu.launches[first:]
    for value, expected in zip(on_gpu.values(), on_cpu.values(), strict=True):
        if value.numel():
            tolerance = TOLERANCES[mode.dtype] * expected.abs().max().item()
            if mode.options.get("state_dtype") == "8bit":
                # A code on the other side of where it is rounded is another one, and moves its weight otherwise.
                far = (value - expected).abs() > tolerance
                assert far.sum() <= 1e-3 * far.numel()
            else:
                torch.testing.assert_close(value, expected, rtol=0, atol=tolerance)
    assert launched
    for launch in launched:
        assert launch.cooperative == ("exact_step" in launch.name)
        assert launch.grid <= launch.resident * gpu.settings.multiprocessors


@pytest.mark.parametrize("options", [{}, LAGGED, {"amsgrad": True}], ids=str)
def test_gradients_that_come_and_go_change_only_addresses(options: dict[str, Any]) -> None:
    """One launch for each step, and two uploads at most besides the mask: addresses and limits. No pass over v."""
    mode = Mode(options, missing=True, steps=7)
    on_gpu, on_cpu = Training(mode, "cuda", "triton"), Training(mode, "cpu", "torch")
    for t in range(mode.steps):
        for training in (on_gpu, on_cpu):
            training.prepare(t)
            first, before = len(gpu.launches), gpu.counts()
            training.optimizer.step()
            if training is on_gpu and t >= 4:  # all have state, and each pattern was there once
                names = [launched.name for launched in gpu.launches[first:] if "kernel" in launched.name]
                assert names == [f"{options.get('schedule', 'exact')}_step_kernel"]
                after = gpu.counts()
                assert after["h2d_pinned"] - before["h2d_pinned"] <= 3
                assert after["sync"] == before["sync"]
    for value, expected in zip(on_gpu.values(), on_cpu.values(), strict=True):
        if value.numel():
            torch.testing.assert_close(value, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_a_first_lagged_step_that_is_skipped_leaves_the_next_one_exact() -> None:
    mode = Mode(LAGGED, scaler=True, steps=4)
    on_gpu, on_cpu = Training(mode, "cuda", "triton"), Training(mode, "cpu", "torch")
    for t in range(mode.steps):
        for training in (on_gpu, on_cpu):
            training.prepare(t)
            training.optimizer.found_inf.fill_(float(t in (0, 2)))  # type: ignore[attr-defined]
            before = gpu.counts()["sync"]
            training.optimizer.step()
            assert training is on_cpu or gpu.counts()["sync"] == before
        for value, expected in zip(on_gpu.values(), on_cpu.values(), strict=True):
            if value.numel():
                torch.testing.assert_close(value, expected, rtol=0, atol=2e-6 * expected.abs().max().item())
    assert on_gpu.optimizer.skipped_steps == 2

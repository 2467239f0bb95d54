"""The modes of FusedAdamS on a GPU, and whether each agrees with plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle
from math import inf
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_times.harness import Step
from swd_fused import FusedAdamS

# Tails, several segments, nothing at all; and matrices that are large enough for 8-bit moments.
SHAPES = [(700,), (40, 30), (3,), (0,), (9, 512), (11, 402)]
STEPS = 4
LR = 1e-3

# Relative to the largest value of a tensor. In 16 bits one or two roundings may fall the other way.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
# A code on the other side of where it is rounded is another one, and moves its weight otherwise.
FEW_CODES = 1e-3

BF16 = torch.bfloat16


@dataclass(frozen=True, eq=False)
class Mode:
    """`bytes_per_element` are those that docs/notes/gpu.md has, counted in the emulator."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    bytes_per_element: float = 32.0
    overflows: bool = False  # in the second step
    captured: bool = False  # replayed from a CUDA graph, from the third step on
    other_dtype: torch.dtype | None = None  # of every second parameter

    @property
    def is_measured(self) -> bool:
        """Whether the memory's rate is what limits a step, and no other mode's step is the same."""
        return not (self.overflows or self.captured or self.other_dtype)


MODES = (
    Mode("exact"),
    Mode("lagged", {"schedule": "lagged"}, bytes_per_element=28.0),
    Mode("clipping", {"max_grad_norm": 0.5}),
    Mode("amsgrad", {"amsgrad": True}, bytes_per_element=52.0),
    Mode("bfloat16, masters", {"master_weights": True}, BF16, 28.0),
    Mode("bfloat16, stochastic rounding", {"stochastic_rounding": True}, BF16, 24.0),
    Mode("8-bit moments", {"state_dtype": "8bit"}, bytes_per_element=20.06),
    Mode("8-bit moments, lagged", {"state_dtype": "8bit", "schedule": "lagged"}, bytes_per_element=16.06),
    Mode("8-bit moments, bfloat16", {"state_dtype": "8bit", "stochastic_rounding": True}, BF16, 12.06),
    Mode("averages of weights", {"ema_decay": 0.9}, bytes_per_element=40.0),
    Mode("skip_nonfinite", {"skip_nonfinite": True}, overflows=True),
    Mode("graph capture", captured=True),
    Mode("graph capture, lagged", {"schedule": "lagged"}, bytes_per_element=28.0, captured=True),
    Mode("two dtypes", {"max_grad_norm": 0.5}, other_dtype=BF16),
)


class Training:
    """Trains the same parameters with the same gradients on any device."""

    def __init__(self, mode: Mode, device: str, backend: str) -> None:
        self._mode, self._device = mode, device
        random = torch.Generator("cpu").manual_seed(1)
        values = [torch.randn(shape, generator=random, device="cpu") for shape in SHAPES]
        dtypes = cycle((mode.dtype, mode.other_dtype or mode.dtype))
        self._params = [torch.nn.Parameter(value.to(next(dtypes)).to(device)) for value in values]
        self.optimizer = FusedAdamS(self._params, lr=LR, backend=backend, **mode.options)
        self._step: Step = self.optimizer.step

    def take(self, t: int) -> None:
        random = torch.Generator("cpu").manual_seed(100 + t)
        for param in self._params:
            grad = (0.1 * torch.randn(param.shape, generator=random, device="cpu")).to(param.dtype)
            if self._mode.overflows and t == 1:
                grad[..., :1] = inf
            if param.grad is None:
                param.grad = grad.to(self._device)
            else:
                param.grad.copy_(grad)
        self._step()

    def capture(self) -> None:
        """Has further steps replayed. Capturing takes none."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.optimizer.step()
        self._step = graph.replay

    def values(self) -> list[Tensor]:
        """Returns parameters, state and what users log, as float64 on the CPU."""
        states = [value for param in self._params for _, value in sorted(self.optimizer.state[param].items())]
        logged = [self.optimizer.exp_avg_sq_mean, self.optimizer.grad_norm, self.optimizer.skipped_steps]
        return [value.detach().cpu().double() for value in (*self._params, *states, *logged)]


def difference(mode: Mode, device: str = "cuda", backend: str = "triton") -> float:
    """Returns how far a mode is from the torch backend on the CPU, as a multiple of what is allowed."""
    own, plain = Training(mode, device, backend), Training(mode, "cpu", "torch")
    for t in range(STEPS):
        if mode.captured and t == 2:
            own.capture()
        for training in (own, plain):
            training.take(t)
    tolerance = TOLERANCES[mode.other_dtype or mode.dtype]
    far = [
        (value - expected).abs() / max(expected.abs().max().item(), 1e-30) / tolerance
        for value, expected in zip(own.values(), plain.values(), strict=True)
        if value.numel()
    ]
    if not all(each.isfinite().all() for each in far):
        return inf
    if mode.options.get("state_dtype") == "8bit":
        return max((each > 1).double().mean().item() for each in far) / FEW_CODES
    return max(each.max().item() for each in far)


def step_of(mode: Mode, elements: int) -> Step:
    """Returns a step of one matrix, and takes one, which compiles the kernels."""
    shape = 64, elements // 64  # vectors would have to be larger for 8-bit moments
    param = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=mode.dtype))
    param.grad = torch.randn_like(param) * elements**-0.5
    step = FusedAdamS([param], weight_decay=1e-5, backend="triton", **mode.options).step
    step()
    torch.cuda.synchronize()
    return step

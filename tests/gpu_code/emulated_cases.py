"""Short trainings for compiled kernels: options, dtypes, two groups that differ in everything, and awkward places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.runs import fused, random_grads, random_params, run

STEPS = 3

BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
LAGGED = {"schedule": "lagged"}


@dataclass
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    cautious: bool = False
    offset: int = 0  # by how many elements parameters and gradients are away from an aligned address
    device: dict[str, int] = field(default_factory=dict)

    def start(self, shapes: list[tuple[int, ...]]) -> tuple[list[torch.nn.Parameter], list[list[Tensor]]]:
        params = random_params(shapes, self.dtype)
        return [self.placed(param) for param in params], random_grads(shapes, STEPS, self.grad_dtype or self.dtype)

    def placed(self, param: torch.nn.Parameter) -> torch.nn.Parameter:
        room = torch.empty(param.numel() + self.offset, dtype=param.dtype)[self.offset :].view(param.shape)
        own = torch.nn.Parameter(room.copy_(param.detach()))
        if self.grad_dtype is not None:
            own.grad_dtype = self.grad_dtype
        return own

    def groups(self, count: int) -> list[dict[str, Any]]:
        """Two that differ in everything, one of them maximized, and without decay unless the other's is cautious."""
        first = {"lr": 1e-2, "weight_decay": 2e-3, "betas": (0.9, 0.99), "cautious_decay": self.cautious}
        second = {"lr": 3e-3, "weight_decay": 1e-3 * self.cautious, "betas": (0.8, 0.95), "eps": 1e-6, "maximize": True}
        return [{"params": [*range(i, count, 2)], **group} for i, group in enumerate((first, second))]

    def trained(
        self, params: list[torch.nn.Parameter], grads: list[list[Tensor]], backend: str = "triton"
    ) -> tuple[list[torch.nn.Parameter], FusedAdamS]:
        """Trains copies of the parameters."""
        copies = [self.placed(param) for param in params]
        optimizer = fused(copies, self.groups(len(copies)), backend=backend, **self.options)
        run(copies, grads, optimizer)
        return copies, optimizer


CASES = {
    "fp32": Case(),
    "bf16": Case(dtype=BF16),
    "fp16": Case(dtype=F16),
    "fp64": Case(dtype=F64),
    "fp32, bf16 gradients": Case(grad_dtype=BF16),
    "bf16 masters": Case({"master_weights": True}, BF16),
    "fp16 masters": Case({"master_weights": True}, F16),
    "bf16 exp_avg": Case({"state_dtype": BF16}, BF16),
    "cautious": Case(cautious=True),
    "amsgrad clipped": Case({"amsgrad": True, "max_grad_norm": 0.5}),
    "clipped": Case({"max_grad_norm": 0.5}),
    "not aligned": Case(offset=1),
    "bf16 not aligned, clipped": Case({"max_grad_norm": 0.5}, BF16, offset=1),
    "one program": Case(device={"programs": 1}),
    "lagged": Case(LAGGED),
    "lagged bf16 not aligned": Case(LAGGED, BF16, offset=1),
    "lagged amsgrad": Case({**LAGGED, "amsgrad": True}),
}

# Shorter and longer than blocks of 256, 512 and 1024, and than the 4096 to 8192 elements that pass 1 takes at once.
SHAPES = [(1,), (513,), (1031,), (0,), (8192 + 1024 + 7,), (8192,)]
# With codes: whole blocks, shorter ones at the end of rows that are aligned and that are not, vectors that end with a
# whole access and within one, and small tensors between.
CODED = [(9, 512), (7,), (8, 600), (11, 402), (513,), (5000,), (3, 5, 300), (4099,)]

CODED_CASES = {
    "fp32": Case(),
    "bf16": Case({"stochastic_rounding": True, "seed": 7}, BF16),
    "bf16 masters": Case({"master_weights": True, "seed": 7}, BF16),
    "fp32 amsgrad": Case({"amsgrad": True}),
}

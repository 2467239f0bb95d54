"""A small model of odd sizes, trained in the same way by the definition, on one process, and sharded on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from tests.definition import AdamS, Group
from tests.runs import to_numpy

STEPS = 12
LR = 1e-2
MAX_GRAD_NORM = 0.4
# With amsgrad, since either concerns other lines of the update.
VARIANTS = {"amsgrad": True, "corrected_decay": True, "cautious_decay": True}
GROUPS = ({"weight_decay": 5e-3}, {"weight_decay": 0.0, "eps": 1e-7})


class Net(nn.Module):
    """`side` has a gradient in some steps only. `head` is so small that some ranks have nothing of it.

    Only what tensor parallelism cuts, the 12, must be divisible by the number of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 11)
        self.norm = nn.LayerNorm(11)
        self.up = nn.Linear(11, 12)
        self.down = nn.Linear(12, 11)
        self.side = nn.Linear(11, 11, bias=False)
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor, with_side: bool) -> Tensor:
        h = self.norm(self.enter(x))
        h = h + self.down(nn.functional.gelu(self.up(h)))
        if with_side:
            h = h + self.side(h)
        return self.head(h)  # type: ignore[no-any-return]


def new_model(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def with_side(t: int) -> bool:
    return t % 3 != 1


def lr_factor(t: int) -> float:
    return (t + 1) / 4 if t < 4 else 1 - t / (2 * STEPS)


def batch(t: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Targets that grow by output, so that gradients differ in size from tensor to tensor."""
    generator = torch.Generator().manual_seed(100 + t)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(16, 3, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 1.0, 5.0])
    return x.to(dtype), y.to(dtype)


def loss_of(model: nn.Module, t: int, part: slice = slice(None), dtype: torch.dtype = torch.float64) -> Tensor:
    x, y = batch(t, dtype)
    return (model(x[part], with_side(t)) - y[part]).square().mean()


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    decaying = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    return [{"params": params, **options} for params, options in zip((decaying, others), GROUPS, strict=True)]


class Record:
    """What each step of a run told, and the parameters at its end."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.grad_norms: list[float] = []
        self.params: dict[str, np.ndarray] = {}
        self.travelling: list[int] = []
        self.rms_grads: list[float] = []  # at the end

    def finish(self, model: nn.Module) -> Record:
        self.params = {name: whole(param).clone().numpy() for name, param in model.named_parameters()}
        return self


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range = range(STEPS),
    part: slice = slice(None),
    dtype: torch.dtype = torch.float64,
    step: Callable[[Any], object] = lambda optimizer: optimizer.step(),
) -> Record:
    record = Record()
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", LR)
    scheduler = LambdaLR(optimizer, lr_factor, last_epoch=steps.start - 1 if steps.start else -1)
    for t in steps:
        optimizer.zero_grad()
        loss_of(model, t, part, dtype).backward()
        step(optimizer)
        scheduler.step()
        inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own
        record.means.append(float(getattr(inner, "exp_avg_sq_mean", np.nan)))
        record.grad_norms.append(float(getattr(inner, "grad_norm", np.nan)))
    return record.finish(model)


def defined(
    max_grad_norm: float | None = MAX_GRAD_NORM,
    lagged: bool = False,
    steps: range = range(STEPS),
    **of_groups: bool,
) -> Record:
    """The definition in long double, with gradients from one process in float64."""
    model, record = new_model(), Record()
    params = list(model.parameters())
    indices = [[i for i, p in enumerate(params) if (p.dim() > 1) == decaying] for decaying in (True, False)]
    groups = [Group(params=i, lr=LR, **of_groups, **options) for i, options in zip(indices, GROUPS, strict=True)]
    adams = AdamS([to_numpy(param) for param in params], groups, max_grad_norm, lagged=lagged)
    for count, t in enumerate(steps, steps.start):
        with torch.no_grad():
            for param, value in zip(params, adams.params, strict=True):
                param.copy_(torch.from_numpy(value.astype(np.float64)))
        model.zero_grad()
        loss_of(model, t).backward()
        for group in groups:
            group.lr = LR * lr_factor(count)
        adams.step([None if param.grad is None else to_numpy(param.grad) for param in params])
        record.means.append(float(adams.exp_avg_sq_mean))
        record.grad_norms.append(float(adams.grad_norm))
    names = [name for name, _ in model.named_parameters()]
    record.params = {name: value.astype(np.float64) for name, value in zip(names, adams.params, strict=True)}
    record.rms_grads = [float(adams.exp_avg_sq_hat(group, i).mean() ** 0.5) for group in groups for i in group.params]
    return record


def distance(record: Record, other: Record) -> float:
    return max(float(np.abs(record.params[name] - other.params[name]).max()) for name in other.params)

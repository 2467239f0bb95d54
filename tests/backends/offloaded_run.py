"""A model whose gradients are told, the same on a GPU with offload and on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swd_fused import FusedAdamS
from tests.device import DEVICE

SHAPES = [(40, 30), (7,), (0,), (5, 5, 5), (), (300,)]


class Gradients(torch.autograd.Function):
    """Gives parameters the gradients that it is told, one after another."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return torch.zeros((), device=param.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0].clone(), None


class Run:
    """A model on a device, its optimizer, and gradients that do not depend on the device.

    Of a model on the CPU tensors with fewer elements than `least_on_cpu` are on the GPU.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype = torch.float32,
        shapes: list[tuple[int, ...]] = SHAPES,
        least_on_cpu: int = 0,
        **options: Any,
    ) -> None:
        self._least_on_cpu = least_on_cpu
        generator = torch.Generator("cpu").manual_seed(0)
        self.device, self.dtype, self.shapes, self.options = device, dtype, shapes, options
        self.params = [nn.Parameter(self.random(generator, shape)) for shape in shapes]
        with torch.no_grad():
            if self.params[0].dim() == 2:
                self.params[0].data = self.params[0].t().contiguous().t()  # strides are kept
        self.optimizer = self.new_optimizer()

    def groups(self) -> list[dict[str, Any]]:
        half = len(self.params) // 2
        return [
            {"params": self.params[:half], "lr": 1e-2, "weight_decay": 2e-3},
            {"params": self.params[half:], "lr": 3e-3, "weight_decay": 0.0, "eps": 1e-6},
        ]

    def new_optimizer(self) -> FusedAdamS:
        return FusedAdamS(self.groups(), offload=self.device != "cpu", **self.options)

    def random(self, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(self.dtype).to(self.device_for(shape))

    def device_for(self, shape: tuple[int, ...]) -> str:
        return DEVICE if torch.Size(shape).numel() < self._least_on_cpu else self.device

    def grads(self, t: int) -> list[Tensor | None]:
        """Gradients of different sizes. Some come and go, and one comes late."""
        generator = torch.Generator("cpu").manual_seed(1000 + t)
        grads = [self.random(generator, shape) * 10.0 ** -(i % 3) for i, shape in enumerate(self.shapes)]
        return [None if (i == 1 and t % 3 == 1) or (i == 3 and t < 2) else grad for i, grad in enumerate(grads)]

    def backward(self, grads: list[Tensor | None]) -> None:
        pairs = [(param, grad) for param, grad in zip(self.params, grads, strict=True) if grad is not None]
        losses = [Gradients.apply(param, grad).to(self.device) for param, grad in pairs]
        torch.stack(losses).sum().backward()

    def train(self, steps: range) -> list[tuple[float, float]]:
        logged = []
        for t in steps:
            self.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + t)
            self.backward(self.grads(t))
            self.step()
            logged.append((float(self.optimizer.exp_avg_sq_mean), float(self.optimizer.grad_norm)))
        return logged

    def step(self) -> None:
        """Takes a step. That of CPU tensors is given sums of squares as a GPU would take them: the CPU's kernels add in
        float32 within rows, and agree with it to 1e-8 only."""
        if self.device != "cpu":
            self.optimizer.step()
        else:
            with torch.no_grad():
                grad_sqs = [sum_of_squares(param.grad) if param.is_cpu else None for param in self.params]
                optimizer = self.optimizer
                optimizer._stepper.take(optimizer.param_groups, optimizer.state, grad_sqs=grad_sqs)
            self.optimizer.zero_grad()


def sum_of_squares(grad: Tensor | None) -> float | None:
    return None if grad is None else float(torch._foreach_norm([grad], 2, dtype=torch.float64)[0].square())


def assert_same_bits(run: Run, other: Run) -> None:
    for param, twin in zip(run.params, other.params, strict=True):
        assert torch.equal(param.cpu(), twin.cpu())
        state, twin_state = run.optimizer.state[param], other.optimizer.state[twin]
        assert state.keys() == twin_state.keys()
        for key in state:
            assert state[key].device == twin_state[key].device
            assert torch.equal(state[key].cpu(), twin_state[key].cpu()), key

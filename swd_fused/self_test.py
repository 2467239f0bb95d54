"""Compares every backend that this machine has with the definition of AdamS, in about a second."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swd_fused.backends import BEST
from swd_fused.optimizer import FusedAdamS
from swd_fused.options import BackendName

SHAPES = [(1000,), (33, 17), ()]
# By tensor. Gradients differ by tensor and halve from step to step, so that no wrong mean looks right.
WEIGHT_DECAYS = [2e-2, 0.0, 2e-2]
GRAD_SCALES = [0.1, 1.0, 10.0]
STEPS = 4
LR, BETAS, EPS, MAX_GRAD_NORM, MAX_DECAY = 1e-2, (0.9, 0.999), 1e-8, 10.0, 0.1
# Weights are below 4, so float32 stores each result to 1.2e-7 and loses up to 1e-6 in all steps. Each wrong mean that
# the tests know moves weights ten times as far as this.
TOLERANCE = 2e-6


@dataclass
class Result:
    """Holds the outcome of one backend's self-test on one device."""

    backend: BackendName
    device: str
    missing: str | None = None  # why the backend cannot be used
    raised: Exception | None = None
    error: float = math.nan  # largest difference from the definition

    @property
    def failed(self) -> bool:
        """Says whether the backend differs from the definition, or is missing where it would be the best one."""
        if self.missing is not None:
            return BEST.get(self.device) == self.backend
        return not self.error <= TOLERANCE  # so that NaN fails

    def __str__(self) -> str:
        if self.missing is not None:
            # Where another backend is the best one, advice on how to get this one would be noise.
            unused = "not used: its kernels are for CUDA and ROCm GPUs"
            outcome = f"MISSING: {self.missing}" if self.failed else unused
        elif self.raised is not None:
            outcome = f"FAILED with {type(self.raised).__name__}: {self.raised}"
        else:
            verdict = "FAILED" if self.failed else "ok"
            outcome = f"{verdict}, largest difference {self.error:.1e} from the definition in {STEPS} steps"
        return f"{self.backend:<6} on {self.device}: {outcome}"


def devices() -> list[str]:
    """Returns the devices to test: the CPU, and the current accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def run() -> list[Result]:
    """Returns a result for each backend on each device."""
    params, grads = _random_training()
    expected = defined(params, grads)
    return [
        _tested(Result(backend, device), params, grads, expected)
        for device in devices()
        for backend in (("cpu", "triton", "torch") if device == "cpu" else ("triton", "torch"))
    ]


def _tested(result: Result, params: list[Tensor], grads: list[list[Tensor]], expected: list[Tensor]) -> Result:
    weights = [torch.nn.Parameter(param.to(result.device, copy=True)) for param in params]
    try:
        optimizer = new_optimizer(weights, result.backend)
    except RuntimeError as error:
        result.missing = str(error)
        return result
    try:
        for of_step in grads:
            for weight, grad in zip(weights, of_step, strict=True):
                weight.grad = grad.to(result.device)
            optimizer.step()
        pairs = zip(weights, expected, strict=True)
        result.error = max((weight.detach().cpu().double() - value).abs().max().item() for weight, value in pairs)
    except Exception as error:  # whatever a broken driver or compiler raises belongs into the report
        result.raised = error
    return result


def _random_training() -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    params = [random(shape) for shape in SHAPES]
    scaled = list(zip(SHAPES, GRAD_SCALES, strict=True))
    return params, [[random(shape) * scale / 2**t for shape, scale in scaled] for t in range(STEPS)]


def defined(params: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
    """Returns the weights after all steps, by the paper's algorithm written out in float64."""
    weights = [param.double() for param in params]
    m = [torch.zeros_like(weight) for weight in weights]
    v = [torch.zeros_like(weight) for weight in weights]
    numel = sum(weight.numel() for weight in weights)
    for t, of_step in enumerate(grads, start=1):
        g = [grad.double() for grad in of_step]
        norm = sum(x.square().sum() for x in g) ** 0.5
        g = [x * min(1.0, MAX_GRAD_NORM / (norm + 1e-6)) for x in g]
        m = [BETAS[0] * a + (1 - BETAS[0]) * x for a, x in zip(m, g, strict=True)]
        v = [BETAS[1] * a + (1 - BETAS[1]) * x.square() for a, x in zip(v, g, strict=True)]
        v_hat = [a / (1 - BETAS[1] ** t) for a in v]
        rms = (sum(a.sum() for a in v_hat) / numel) ** 0.5
        shrink = [min(LR * decay / (rms + EPS), MAX_DECAY) for decay in WEIGHT_DECAYS]
        weights = [
            (1 - shrink[i]) * weight - LR / (1 - BETAS[0] ** t) * m[i] / (v_hat[i].sqrt() + EPS)
            for i, weight in enumerate(weights)
        ]
    return weights


def new_optimizer(weights: list[torch.nn.Parameter], backend: BackendName) -> FusedAdamS:
    """Returns an optimizer of the same settings. Raises RuntimeError if the backend cannot be used."""
    groups = [{"params": [weight], "weight_decay": decay} for weight, decay in zip(weights, WEIGHT_DECAYS, strict=True)]
    return FusedAdamS(
        groups, lr=LR, betas=BETAS, eps=EPS, max_grad_norm=MAX_GRAD_NORM, max_decay=MAX_DECAY, backend=backend
    )

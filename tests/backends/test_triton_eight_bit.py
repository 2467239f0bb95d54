"""Moments in 8 bits on the Triton backend: layouts, numbers of blocks, and gradients that are not finite.

tests/core/test_eight_bit.py compares their codes with those of plain PyTorch in all modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.core import bucket
from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import CODES, SCALES, BlockNumbers
from tests.backends.triton_launches import launches

STEPS = 3

# With codes: whole blocks, rows with a shorter last one that are aligned and that are not, a vector, more dimensions.
# The last three have none, since they have too few elements or too short rows.
SHAPES = [(3, 512), (2, 600), (4, 402), (1101,), (3, 11, 40), (2, 3, 17, 19), (30,), (), (200, 8)]
CODED = 6
LEAST_NUMEL = 1000  # smaller than it is, for the interpreter, which takes milliseconds for each block

# The share of elements that may be apart, by one code: quotients and roots may differ in the last bit, and then a code
# is on the other side of where it is rounded.
SHARE = 1e-3


def start(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Small, so that the last bit of a parameter is little against its movement."""
    return [torch.randn(shape) * 0.01 for shape in shapes]


def gradients(values: list[Tensor], step: int) -> list[Tensor]:
    """Of different sizes within a block, so that codes differ."""
    random = torch.Generator("cpu").manual_seed(step)
    return [
        (torch.randn(v.shape, generator=random) * torch.rand(v.shape, generator=random).exp2() / 4).to(v.dtype)
        for v in values
    ]


def train(
    backend: str, values: list[Tensor], steps: int, **options: Any
) -> tuple[list[torch.nn.Parameter], FusedAdamS]:
    params = [torch.nn.Parameter(value.clone()) for value in values]
    groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "betas": (0.8, 0.95)}]
    optimizer = FusedAdamS(groups, lr=3e-3, weight_decay=1e-3, backend=backend, state_dtype="8bit", **options)
    for step in range(steps):
        for param, grad in zip(params, gradients(values, step), strict=True):
            param.grad = grad
        optimizer.step()
    return params, optimizer


@pytest.fixture(autouse=True)
def _small_tensors_have_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LEAST_NUMEL", "LEAST_VECTOR"):
        monkeypatch.setattr(eight_bit, name, LEAST_NUMEL)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        yield


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(300, 5).t(),
    "channels-last": lambda: torch.randn(4, 20, 5, 5).contiguous(memory_format=torch.channels_last),
    "every other": lambda: torch.randn(3, 1024)[:, ::2],
    "not aligned": lambda: torch.randn(2 * 768 + 1)[1:].view(2, 768),
    "a row": lambda: torch.randn(1, 2001),
}


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "schedule": "lagged"}], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_has_the_codes_of_the_contiguous_tensor(name: str, options: dict[str, Any]) -> None:
    value = LAYOUTS[name]() * 0.01
    params = [torch.nn.Parameter(value), torch.nn.Parameter(value.clone(memory_format=torch.contiguous_format))]
    assert params[0].stride() == value.stride()
    optimizers = [FusedAdamS([param], backend="triton", state_dtype="8bit", **options) for param in params]
    for step in range(2):
        for param, optimizer in zip(params, optimizers, strict=True):
            (param.grad,) = gradients([value], step)
            optimizer.step()
    assert torch.equal(*params)
    states = [optimizer.state[param] for param, optimizer in zip(params, optimizers, strict=True)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert len(states[0]) == (6 if "amsgrad" in options else 5)


@pytest.mark.parametrize("split", [False, True], ids=["one launch", "split"])
def test_blocks_are_numbered_as_in_the_whole_tensor(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards, along the first dimension and along the second, and ranks that are far apart."""
    monkeypatch.setattr(bucket, "block_numbers", lambda param, _: BlockNumbers((1 << 39) + 12345, param.numel() + 77))
    values = start(SHAPES)
    with launches(split):
        params, optimizer = train("triton", values, STEPS)
    others, plain = train("torch", values, STEPS)
    for param, other in zip(params[:CODED], others[:CODED], strict=True):
        for key in CODES.values():
            apart = (optimizer.state[param][key].int() - plain.state[other][key].int()).abs()
            assert apart.max() <= 1, key
            assert apart.double().mean() <= SHARE, key
    (kept,) = optimizer._stepper._kept[0].buckets
    assert len(kept.coded) == CODED
    assert kept.plan.n_parts == 1  # with those that have no codes


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_within_its_block(wrong: float) -> None:
    """A block that has NaN has a scale of NaN: nothing hides it."""
    value = start([(3, 512)])[0]
    both = []
    for backend in ("triton", "torch"):
        param = torch.nn.Parameter(value.clone())
        optimizer = FusedAdamS([param], backend=backend, state_dtype="8bit")
        for step in range(2):
            (param.grad,) = gradients([value], step)
            if step == 0:
                param.grad[1, 300] = wrong
            optimizer.step()
        both.append((param, optimizer.state[param]))
    (param, state), (wanted, wanted_state) = both
    assert torch.equal(param.isnan(), wanted.isnan())
    assert param.isnan().sum() == (256 if wrong != wrong or param.isnan().sum() > 1 else 1)
    for key in CODES.values():
        assert ((state[key].int() - wanted_state[key].int()).abs() <= 1).all()
    for key in SCALES.values():
        torch.testing.assert_close(state[key], wanted_state[key], rtol=1e-6, atol=0, equal_nan=True)
        assert state[key].isfinite().sum() == 5

"""Moments in 8 bits on the Triton backend: the same codes as the definition in plain PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.core import bucket
from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import CODES, SCALES, BlockNumbers
from tests.backends.triton_launches import launches, rebuilt_sums

BF16 = torch.bfloat16
STEPS = 3

# With codes: whole blocks, rows with a shorter last one that are aligned and that are not, a vector, more dimensions.
# The last three have none, since they have too few elements or too short rows.
SHAPES = [(3, 512), (2, 600), (4, 402), (1101,), (3, 11, 40), (2, 3, 17, 19), (30,), (), (200, 8)]
CODED = 6
LEAST_NUMEL = 1000  # smaller than it is, for the interpreter, which takes milliseconds for each block

# The share of elements that may be apart, by one code: quotients and roots may differ in the last bit, and then a code
# is on the other side of where it is rounded.
SHARE = 1e-3


@dataclass
class Mode:
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    group: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False  # with an overflow in the second step
    missing: bool = False
    is_infinite: bool = False  # in the second step


MODES = {
    "exact": Mode(),
    "lagged, missing": Mode({"schedule": "lagged"}, missing=True),
    "amsgrad clipped": Mode({"amsgrad": True, "max_grad_norm": 0.5}),
    "amsgrad lagged": Mode({"amsgrad": True, "schedule": "lagged"}),
    "masters": Mode({"master_weights": True}, BF16),
    "fp16 lagged": Mode({"schedule": "lagged"}, torch.float16),
    "bf16 rounded by chance": Mode({"stochastic_rounding": True, "seed": 1 << 40}, BF16),
    "l2 maximized": Mode({"decay": "l2"}, group={"maximize": True, "weight_decay": 0.1}),
    "scaled": Mode(scaled=True),
    "skipped": Mode({"skip_nonfinite": True}, is_infinite=True),
}


def start(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Small, so that the last bit of a parameter is little against its movement."""
    return [(torch.randn(shape) * 0.01).to(dtype) for shape in shapes]


def gradients(values: list[Tensor], step: int) -> list[Tensor]:
    """Of different sizes within a block, so that codes differ."""
    random = torch.Generator("cpu").manual_seed(step)
    return [
        (torch.randn(v.shape, generator=random) * torch.rand(v.shape, generator=random).exp2() / 4).to(v.dtype)
        for v in values
    ]


def train(
    backend: str, values: list[Tensor], mode: Mode, steps: int = STEPS
) -> tuple[list[torch.nn.Parameter], FusedAdamS]:
    params = [torch.nn.Parameter(value.clone()) for value in values]
    groups = [{"params": params[::2], "lr": 1e-2, **mode.group}, {"params": params[1::2], "betas": (0.8, 0.95)}]
    optimizer = FusedAdamS(groups, lr=3e-3, weight_decay=1e-3, backend=backend, state_dtype="8bit", **mode.options)
    for step in range(steps):
        take_step(optimizer, params, mode, step)
    return params, optimizer


def take_step(optimizer: FusedAdamS, params: list[torch.nn.Parameter], mode: Mode, step: int) -> None:
    for i, (param, grad) in enumerate(zip(params, gradients([p.detach() for p in params], step), strict=True)):
        param.grad = None if mode.missing and (i + step) % 3 == 0 else grad * (1024 if mode.scaled else 1)
        if mode.is_infinite and step == 1 and i == 2:
            param.grad[3, 4] = torch.inf  # type: ignore[index]
    if mode.scaled:
        optimizer.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor([float(step == 1)])  # type: ignore[attr-defined]
    optimizer.step()


@pytest.fixture(autouse=True)
def _small_tensors_have_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LEAST_NUMEL", "LEAST_VECTOR"):
        monkeypatch.setattr(eight_bit, name, LEAST_NUMEL)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        yield


def with_masters(optimizer: FusedAdamS, param: torch.nn.Parameter) -> dict[str, Tensor]:
    """A parameter's state, with the master in place of what that has beyond bfloat16."""
    state = dict(optimizer.state[param])
    if state.pop("master_remainder", None) is not None:
        state["master_param"] = optimizer.master_param(param)
    return state


def assert_same(
    triton: tuple[list[torch.nn.Parameter], FusedAdamS], plain: tuple[list[torch.nn.Parameter], FusedAdamS], values: Any
) -> None:
    for i, (param, wanted, before) in enumerate(zip(triton[0], plain[0], values, strict=True)):
        state, wanted_state = triton[1].state[param], plain[1].state[wanted]
        assert state.keys() == wanted_state.keys()
        assert (CODES["exp_avg"] in state) == (i < CODED)
        resolution = {torch.float32: 2**-22, BF16: 2**-8, torch.float16: 2**-11}[param.dtype]
        movement = (wanted.detach() - before).abs().max().item()
        assert_close(param, wanted, atol=1e-6 * movement, rtol=resolution)
        state, wanted_state = with_masters(triton[1], param), with_masters(plain[1], wanted)
        for key, tensor in state.items():
            other = wanted_state[key]
            if key in CODES.values():
                apart = (tensor.int() - other.int()).abs()
                assert apart.max() <= 1, key
                assert apart.double().mean() <= SHARE, key
            else:
                assert_close(tensor, other, atol=1e-6 * other.abs().max().item() if other.numel() else 0, rtol=0)
    torch.testing.assert_close(triton[1].exp_avg_sq_mean, plain[1].exp_avg_sq_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(triton[1].grad_norm, plain[1].grad_norm, rtol=1e-6, atol=0, equal_nan=True)


def assert_close(tensor: Tensor, wanted: Tensor, atol: float, rtol: float) -> None:
    """But for the share that has another code in a step before."""
    tensor, wanted = tensor.detach().double(), wanted.detach().double()
    far = (tensor - wanted).abs() > atol + rtol * wanted.abs()
    assert far.double().sum() <= SHARE * far.numel(), ((tensor - wanted).abs().max(), atol)


@pytest.mark.parametrize("split", [False, True], ids=["one launch", "split"])
@pytest.mark.parametrize("name", MODES)
def test_codes_are_those_of_plain_pytorch(name: str, split: bool) -> None:
    mode = MODES[name]
    values = start(SHAPES, mode.dtype)
    with launches(split):
        triton = train("triton", values, mode)
    assert_same(triton, train("torch", values, mode), values)
    (bucket,) = triton[1]._stepper._kept[0].buckets
    assert len(bucket.coded) == CODED
    assert bucket.plan.n_parts == 1  # with those that have no codes


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


def test_blocks_are_numbered_as_in_the_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards, along the first dimension and along the second, and ranks that are far apart."""
    monkeypatch.setattr(bucket, "block_numbers", lambda param, _: BlockNumbers((1 << 39) + 12345, param.numel() + 77))
    values = start(SHAPES)
    for split in (False, True):
        with launches(split):
            assert_same(train("triton", values, Mode()), train("torch", values, Mode()), values)


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


# --- Sums


@pytest.mark.parametrize("split", [False, True], ids=["one launch", "split"])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"schedule": "lagged"}], ids=str)
def test_sums_are_the_same_whether_emitted_or_rebuilt(options: dict[str, Any], split: bool) -> None:
    with launches(split):
        _, optimizer = train("triton", start(SHAPES), Mode(options), steps=2)
        bucket, by_tensor = rebuilt_sums(optimizer, programs=3 if split else 1)
    exact = [
        eight_bit.sum_of_squares(averaged, bucket.state.exp_avg_sq_scales[i], torch.float64)
        if averaged.dtype == torch.uint8
        else averaged.double().sum()
        for i, averaged in enumerate(bucket.averaged)
    ]
    rtol = 1e-6 if "amsgrad" in options else 1e-13
    torch.testing.assert_close(by_tensor[bucket.coded], torch.stack(exact)[bucket.coded], rtol=rtol, atol=0)
    torch.testing.assert_close(by_tensor, torch.stack(exact), rtol=1e-6, atol=0)

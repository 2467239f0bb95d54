"""Stochastic rounding by the numbers of elements: layouts, shards and backends draw the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.backends import torch_backend
from swd_fused.core import bucket
from swd_fused.state.rounding import ElementNumbers, element_numbers
from tests.runs import run

SEED = 5
SHAPE = (6, 5, 4, 7)
BELOW_2_32 = 2**32 - 300


def scrambled(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finaliser."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def random_bits(numbers: np.ndarray, tensor: int, step: int) -> np.ndarray:
    """16 bits for each element, from seed, tensor, step and the two halves of its number."""
    with np.errstate(over="ignore"):
        start = scrambled(np.uint32([SEED]) ^ scrambled(np.uint32([1])))
        key = scrambled(scrambled(start + np.uint32(tensor)) + np.uint32(step))
        keys = key + scrambled((numbers >> 32).astype(np.uint32))
        return scrambled(keys ^ (numbers.astype(np.uint32) * np.uint32(0x9E3779B9))) >> np.uint32(16)


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


# What a step of this size adds to a weight of 1 is exact in float32 on every backend, and lies between two bfloat16s.
LR = 0x4CCC * 2.0**-23
EXACT: dict[str, Any] = {"lr": LR, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0, "maximize": True}


def rounded_up(backend: str, layout: str) -> np.ndarray:
    """Whether the elements of the second of two tensors are rounded up in the first step."""
    params = [torch.nn.Parameter(in_layout(torch.ones(SHAPE, dtype=torch.bfloat16), layout)) for _ in range(2)]
    optimizer = FusedAdamS(params, **EXACT, stochastic_rounding=True, seed=SEED, backend=backend)
    run(params, [[torch.ones(SHAPE, dtype=torch.bfloat16)] * 2], optimizer)
    result: np.ndarray = (params[1].detach().float() > 1).cpu().numpy()
    return result


def wanted(numbers: ElementNumbers) -> np.ndarray:
    indices = np.indices(SHAPE, dtype=np.int64)
    whole = numbers.first + sum(index * stride for index, stride in zip(indices, numbers.strides, strict=True))
    result: np.ndarray = random_bits(whole, tensor=1, step=1) + 0x4CCC >= 1 << 16
    return result


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last"])
def test_bits_follow_from_the_row_major_index(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = wanted(ElementNumbers(0, (140, 28, 7, 1)))
    np.testing.assert_array_equal(rounded_up(backend, layout), expected)
    monkeypatch.setattr(torch_backend, "CPU_PIECE", 100)  # in which the torch backend cuts pieces
    np.testing.assert_array_equal(rounded_up(backend, layout), expected)


PARTS = {
    "along the first dimension": ElementNumbers(1234, (140, 28, 7, 1)),
    "along the second": ElementNumbers(56, (1400, 28, 7, 1)),
    "along the last": ElementNumbers(7, (1400, 280, 70, 1)),
    "along the first and the last": ElementNumbers(2807, (1400, 280, 70, 1)),
    "above 2^32": ElementNumbers(BELOW_2_32, (140, 28, 7, 1)),
    "in rows above 2^32": ElementNumbers(BELOW_2_32, (1400, 280, 70, 1)),
    "beyond 2^40": ElementNumbers(3 * 2**40 + 5, (140, 28, 7, 1)),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("part", PARTS)
def test_bits_of_a_part_are_those_of_the_whole(
    backend: str, layout: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "element_numbers", lambda param, sharding: PARTS[part])
    np.testing.assert_array_equal(rounded_up(backend, layout), wanted(PARTS[part]))


def test_parts_along_two_inner_dimensions(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels, which divide once, number these from their first element on."""
    numbers = ElementNumbers(9, (10_000, 500, 20, 1))
    monkeypatch.setattr(bucket, "element_numbers", lambda param, sharding: numbers)
    followed = ElementNumbers(9, (140, 28, 7, 1)) if backend == "triton" else numbers
    assert numbers.rows(SHAPE) is None
    np.testing.assert_array_equal(rounded_up(backend, "contiguous"), wanted(followed))


@pytest.mark.backends(split=True)
def test_state_resumed_in_another_layout_draws_the_same_bits(backend: str) -> None:
    """As `.contiguous()` state from a checkpoint is, next to a transposed weight."""
    finals = []
    for resumed in (False, True):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(31, 20).to(torch.bfloat16).t())
        grads = [[torch.randn(20, 31).to(torch.bfloat16)] for _ in range(4)]
        # No mean in this: sums of v in another order have other last bits.
        options: dict[str, Any] = {"decay": "decoupled", "stochastic_rounding": True, "backend": backend}
        optimizer = FusedAdamS([param], **options)
        run([param], grads[:2], optimizer)
        if resumed:
            state_dict = optimizer.state_dict()
            for key in ("exp_avg", "exp_avg_sq"):
                state_dict["state"][0][key] = state_dict["state"][0][key].contiguous()
            optimizer = FusedAdamS([param], **options)
            optimizer.load_state_dict(state_dict)
        run([param], grads[2:], optimizer)
        finals.append(param.detach())
    assert torch.equal(*finals)


def test_complex_elements_are_numbered_as_pairs() -> None:
    numbers = element_numbers(torch.zeros(2, 3, dtype=torch.complex64), ())
    assert numbers == ElementNumbers(0, (6, 2, 1))
    assert torch.equal(numbers.tensor((2, 3, 2), torch.device("cpu")).flatten(), torch.arange(12))
    assert element_numbers(torch.zeros(()), ()) == ElementNumbers(0, ())

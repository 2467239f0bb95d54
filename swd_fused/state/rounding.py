"""Stochastic rounding to bfloat16 in plain PyTorch: the mean of many roundings is right, so small updates are not lost.

The bits come from a hash of seed, tensor, step and element number (see element_numbers.py), so a run is the same each
time.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from swd_fused.state.element_numbers import ElementNumbers

LOW_32_BITS = 0xFFFFFFFF

Number = TypeVar("Number", int, Tensor)


def scrambled(x: Number) -> Number:
    """The finaliser of MurmurHash3 on the lower 32 bits of int64 numbers, or of one number."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW_32_BITS
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW_32_BITS
    return x ^ (x >> 16)


def as_int32(x: Tensor) -> Tensor:
    """The lower 32 bits of int64 numbers."""
    return (((x + (1 << 31)) & LOW_32_BITS) - (1 << 31)).to(torch.int32)


def scrambled_int32_(x: Tensor) -> Tensor:
    """`scrambled` of int32 numbers in place, whose products wrap around. Shifts copy the sign, which is masked."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - (1 << 32))
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def rounding_start(seed: int) -> int:
    """32 bits that depend on all 64 of the seed."""
    low, high = seed & LOW_32_BITS, seed >> 32
    return scrambled(low ^ scrambled((high + 1) & LOW_32_BITS))


def rounding_keys(seed: int, tensor_ids: Tensor, steps: Tensor) -> Tensor:
    """Returns the key of each tensor in this step, on the device."""
    keys = scrambled((tensor_ids + rounding_start(seed)) & LOW_32_BITS)
    return scrambled((keys + steps.to(torch.int64)) & LOW_32_BITS)


def stochastically_rounded(values: Tensor, key: Tensor, numbers: ElementNumbers) -> Tensor:
    """Values in bfloat16, by way of float32."""
    values = values.to(torch.float32)
    elements = numbers.tensor(values.shape, values.device)
    if numbers.last(values.shape) > LOW_32_BITS:
        key = (key + scrambled(elements >> 32)) & LOW_32_BITS
    noise = scrambled(key ^ ((elements * 0x9E3779B9) & LOW_32_BITS)) >> 16
    bits = values.contiguous().view(torch.int32)
    rounded = ((bits + noise.to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)

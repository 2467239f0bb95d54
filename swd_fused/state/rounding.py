"""Stochastic rounding to bfloat16 in plain PyTorch. The mean of many roundings is right, so small updates are not lost.

The bits come from a hash of seed, tensor, step and element number, so a run can be repeated exactly. An element's
number is its row-major index in the whole tensor; a complex tensor counts as pairs of reals. So a transposed weight, a
moment in another memory format, and the shards of a DTensor are rounded as the contiguous whole tensor is, on every
backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from swd_fused.distributed.sharding import Sharding, is_dtensor

LOW_32_BITS = 0xFFFFFFFF

# The distance between the element numbers of two ranks whose shards do not know their place in the whole tensor: more
# than a shard has elements.
RANK_DISTANCE = 1 << 40

Number = TypeVar("Number", int, Tensor)


class ElementNumbers(NamedTuple):
    """Numbers a tensor's elements: the first one's number, and the step of the number along each dimension."""

    first: int
    strides: tuple[int, ...]

    def within(self, cut: Sequence[slice]) -> ElementNumbers:
        """Returns the numbers of a part, given slices of the first dimensions."""
        starts = ((part.start or 0) * stride for part, stride in zip(cut, self.strides, strict=False))
        return self._replace(first=self.first + sum(starts))

    def last(self, shape: Sequence[int]) -> int:
        """Returns the largest number in a tensor of this shape."""
        return self.first + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))

    def tensor(self, shape: Sequence[int], device: torch.device) -> Tensor:
        numbers = torch.full((), self.first, dtype=torch.int64, device=device)
        for size, stride in zip(shape, self.strides, strict=True):
            numbers = numbers[..., None] + stride * torch.arange(size, dtype=torch.int64, device=device)
        return numbers

    def rows(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Returns (first, length, pitch), if element i of a contiguous tensor has the number first + i // length *
        pitch + i % length. Returns None if one division is not enough: shards along two later dimensions."""
        runs: list[tuple[int, int]] = []  # merged dimensions: their number of elements, and the stride
        for size, stride in zip(shape, self.strides, strict=True):
            if runs and runs[-1][1] == size * stride:
                runs[-1] = runs[-1][0] * size, stride
            elif size != 1:
                runs.append((size, stride))
        if not runs or runs[-1][1] != 1:
            runs.append((1, 1))
        if len(runs) > 2:
            return None
        return self.first, max(1, runs[-1][0]), runs[0][1] if len(runs) == 2 else 0


def element_numbers(param: Any, sharding: Sharding) -> ElementNumbers:
    """Returns the numbers of the elements that this rank has.

    Shards that are plain tensors do not know their place in the whole. Each rank's elements have numbers of their own,
    so that no two ranks draw the same bits.
    """
    strides = [1] if param.dim() else []
    for size in param.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    first = 0
    if is_dtensor(param):
        # As in torch.distributed.checkpoint: each shard is one box of the whole, even with FSDP above tensor
        # parallelism, where placements are strided.
        (chunk,) = param.__create_chunk_list__()
        first = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    if param.is_complex():
        first, strides = 2 * first, [*(2 * stride for stride in strides), 1]
    return ElementNumbers(first + ranks_before(param, sharding) * RANK_DISTANCE, tuple(strides))


def ranks_before(param: Any, sharding: Sharding) -> int:
    """Returns this rank's number within the groups that the parameter, unlike a DTensor's mesh, does not know."""
    own = param.device_mesh.get_all_groups() if is_dtensor(param) else []
    return sum(group.rank() for group in sharding if group not in own)


# --- The random bits


def scrambled(x: Number) -> Number:
    """Applies the finaliser of MurmurHash3 to the lower 32 bits of int64 numbers, or of one number."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW_32_BITS
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW_32_BITS
    return x ^ (x >> 16)


def as_int32(x: Tensor) -> Tensor:
    """Returns the lower 32 bits of int64 numbers."""
    return (((x + (1 << 31)) & LOW_32_BITS) - (1 << 31)).to(torch.int32)


def scrambled_int32_(x: Tensor) -> Tensor:
    """Applies `scrambled` to int32 numbers in place. Products wrap around; the sign that shifts copy is masked."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - (1 << 32))
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def rounding_start(seed: int) -> int:
    """Returns 32 bits that depend on all 64 bits of the seed."""
    low, high = seed & LOW_32_BITS, seed >> 32
    return scrambled(low ^ scrambled((high + 1) & LOW_32_BITS))


def rounding_keys(seed: int, tensor_ids: Tensor, steps: Tensor) -> Tensor:
    """Returns the key of each tensor in this step, on the device."""
    keys = scrambled((tensor_ids + rounding_start(seed)) & LOW_32_BITS)
    return scrambled((keys + steps.to(torch.int64)) & LOW_32_BITS)


def stochastically_rounded(values: Tensor, key: Tensor, numbers: ElementNumbers) -> Tensor:
    """Rounds values, first to float32, then stochastically to bfloat16."""
    values = values.to(torch.float32)
    elements = numbers.tensor(values.shape, values.device)
    if numbers.last(values.shape) > LOW_32_BITS:
        key = (key + scrambled(elements >> 32)) & LOW_32_BITS
    noise = scrambled(key ^ ((elements * 0x9E3779B9) & LOW_32_BITS)) >> 16
    bits = values.contiguous().view(torch.int32)
    rounded = ((bits + noise.to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)

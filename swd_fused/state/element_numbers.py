"""The numbers of a tensor's elements, which stochastic rounding draws its random bits by.

An element's number is its row-major index in the whole tensor, in the pairs of reals that a complex one consists of. So
a transposed weight, a moment in another memory format, and the shards of a DTensor are rounded as the contiguous whole
tensor is, on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.distributed.sharding import Sharding, is_dtensor

# How far apart the numbers of two ranks are whose shards do not say where in the whole tensor they belong: more than a
# shard has elements.
RANK_DISTANCE = 1 << 40


class ElementNumbers(NamedTuple):
    """The number of the first element, and by how much it grows from one index to the next along each dimension."""

    first: int
    strides: tuple[int, ...]

    def from_index(self, dim: int, index: int) -> ElementNumbers:
        """The numbers of the part that begins at this index."""
        return self._replace(first=self.first + (index * self.strides[dim] if index else 0))

    def last(self, shape: Sequence[int]) -> int:
        """The largest number in a tensor of this shape."""
        return self.first + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))

    def tensor(self, shape: Sequence[int], device: torch.device) -> Tensor:
        numbers = torch.full((), self.first, dtype=torch.int64, device=device)
        for size, stride in zip(shape, self.strides, strict=True):
            numbers = numbers[..., None] + stride * torch.arange(size, dtype=torch.int64, device=device)
        return numbers

    def rows(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """(first, length, pitch), if element i of a contiguous tensor has the number first + i // length * pitch +
        i % length. None where that takes more than one division: shards along two dimensions, neither the first."""
        runs: list[tuple[int, int]] = []  # dimensions that count as one: elements, and how far apart
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
    """The numbers of the elements that this rank has.

    Shards that are plain tensors do not say of what. Their elements are numbered apart on each rank, so that no two
    ranks draw the same bits.
    """
    strides = [1] if param.dim() else []
    for size in param.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    first = 0
    if is_dtensor(param):
        # As torch.distributed.checkpoint asks: each shard is one box of the whole, with FSDP above tensor parallelism
        # too, whose placements are strided.
        (chunk,) = param.__create_chunk_list__()
        first = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    if param.is_complex():
        first, strides = 2 * first, [*(2 * stride for stride in strides), 1]
    return ElementNumbers(first + ranks_before(param, sharding) * RANK_DISTANCE, tuple(strides))


def ranks_before(param: Any, sharding: Sharding) -> int:
    """Returns this rank's number among those that hold shards of which the parameter does not say where they belong."""
    own = param.device_mesh.get_all_groups() if is_dtensor(param) else []
    return sum(group.rank() for group in sharding if group not in own)

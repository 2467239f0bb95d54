"""Batches of tensors that plain operations process at once, and the pieces that large tensors are cut into."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused.state import eight_bit

# Elements that are processed at once. On the CPU temporaries then need no fresh pages, which for a large tensor cost
# more than the whole update; smaller batches, that fit the cache better, lost more to the operators' own overhead
# (2^17: 1.4 times as long). Elsewhere each batch is a round of launches.
CPU_BATCH = 1 << 20
DEVICE_BATCH = 1 << 26


def batch_limit(device: torch.device) -> int:
    return CPU_BATCH if device.type == "cpu" else DEVICE_BATCH


class Cut(NamedTuple):
    """Names a part of a tensor: from `begin` to `end` along `dim`."""

    dim: int
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.begin, self.end - self.begin)


class Batch(NamedTuple):
    """Names tensors of one parameter group, by their indices in a list, whose moments are all in 8 bits or all not."""

    group: int
    is_coded: bool
    indices: list[int]
    cuts: list[Cut | None]  # None stands for the whole tensor

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.indices, self.cuts, strict=True)
        return [tensors[index] if cut is None else cut.of(tensors[index]) for index, cut in pairs]

    def coded_rows(self) -> list[tuple[int, Cut]]:
        """Returns the pieces of tensors whose moments are in 8 bits: these are always cut, if only once."""
        return [(index, cut) for index, cut in zip(self.indices, self.cuts, strict=True) if cut is not None]


def batches(
    tensors: Sequence[Tensor], indices: Iterable[int], groups: Sequence[int], coded: Collection[int] = ()
) -> Iterator[Batch]:
    """Yields the tensors at some indices, given the group of each tensor. Empty ones are in no batch."""
    limit = batch_limit(tensors[0].device)
    for (group, is_coded), members in groupby(indices, lambda index: (groups[index], index in coded)):
        batch, numel = Batch(group, is_coded, [], []), 0
        for index in members:
            cuts = cuts_in_rows(tensors[index], limit) if is_coded else cuts_of(tensors[index], limit)
            for cut in cuts:
                if numel >= limit:
                    yield batch
                    batch, numel = Batch(group, is_coded, [], []), 0
                batch.indices.append(index)
                batch.cuts.append(cut)
                numel += tensors[index].numel() // len(cuts)
        if batch.indices:
            yield batch


def cuts_of(tensor: Tensor, limit: int) -> Sequence[Cut | None]:
    """Cuts a tensor along its longest dimension, if it has more elements than the limit."""
    numel = tensor.numel()
    if numel <= limit:
        return (None,) if numel else ()
    length = max(tensor.shape)
    dim, step = tensor.shape.index(length), max(1, limit * length // numel)
    return [Cut(dim, begin, min(begin + step, length)) for begin in range(0, length, step)]


def cuts_in_rows(tensor: Tensor, limit: int) -> list[Cut]:
    """Cuts a tensor whose moments are in 8 bits into whole rows, and a vector into whole blocks."""
    if not tensor.numel():
        return []
    pieces = eight_bit.pieces(tensor.shape, limit)
    return [Cut(0, rows.start, min(rows.stop, tensor.shape[0])) for rows, _ in pieces]


def in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a flat view of a dense tensor, and one of any other tensor whose dimensions are sorted by stride."""
    if not tensor.is_contiguous():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
    return tensor.view(-1) if tensor.is_contiguous() else tensor

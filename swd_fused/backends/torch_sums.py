"""Sums of tensors' elements and of their squares, by tensor, and the pieces that tensors are cut into.

On the CPU float32 numbers are added in rows of 256, and rows in float64. torch's own norm of 2^20 equal numbers is off
by 4e-4; by rows it is off by 8e-8, and takes half as long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused.tensors.hyper import scalar_dtype
from swd_fused.tensors.transfer import from_host

# Elements that are processed at once. On the CPU temporaries then need no fresh pages, which for a large tensor cost
# more than the whole update; smaller batches, that fit the cache better, lost more to the operators' own overhead
# (2^17: 1.4 times as long). Elsewhere each batch is a round of launches.
CPU_BATCH = 1 << 20
DEVICE_BATCH = 1 << 26

# Tensors of one shape up to this many elements are copied together and summed by one call, which takes 10 us.
SMALL = 1 << 14

# Elements whose squares are added in float32.
ROW = 256

# Of a piece. Up to 2^20 squares, each of which may have lost 2^-126, then lose no more than float32's resolution.
LEAST_SUM_OF_SQUARES = 2.0**-80

TensorList = list[Tensor] | tuple[Tensor, ...]


def sums_of_squares(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the sum of each tensor's squared elements, 0 where there is none."""
    sums = SumsByTensor(len(tensors), device)
    present = [index for index, tensor in enumerate(tensors) if tensor is not None]
    if not present:
        return sums.total()
    first = tensors[present[0]]
    if type(first) is Tensor and first.is_cpu:
        for indices, matrix in matrices(tensors):
            sums.add(indices, squared_norms(matrix))
        return sums.total()
    # Which sums are out of float32's range could not be seen without waiting. In float64, on the CPU 30 times as slow.
    wide = scalar_dtype(sums.device)
    for batch in batches([tensors[index] for index in present]):
        norms = torch._foreach_norm(widened(batch.lists[0]), 2, dtype=wide)
        sums.add([present[index] for index in batch.indices], torch.stack(norms).square())
    return sums.total()


class SumsByTensor:
    """Values for pieces of tensors, added up for each tensor in float64."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self.device = device
        self._indices: list[int] = []
        self._values: list[Tensor] = []

    def add(self, indices: list[int], values: Tensor) -> None:
        """Adds one value for each of these tensors, among which one may occur several times."""
        self._indices += indices
        self._values.append(values)

    def add_elements(self, tensors: Sequence[Tensor | None]) -> None:
        """Adds the elements of each tensor. The same numbers always give the same bits."""
        for indices, matrix in matrices(tensors):
            self.add(indices, row_sums(matrix))

    def total(self) -> Tensor:
        dtype = scalar_dtype(self.device)
        values = [value.to(dtype) for value in self._values]
        if self._indices == list(range(self._count)) and values:
            return values[0] if len(values) == 1 else torch.cat(values)
        total = torch.zeros(self._count, dtype=dtype, device=self.device)
        if values:
            indices = from_host(torch.tensor(self._indices, device="cpu"), self.device)
            total.index_add_(0, indices, torch.cat(values))
        return total


def row_sums(matrix: Tensor) -> Tensor:
    """Adds in 32 bits at least, in which torch adds pairwise: in float64 from the start it took four times as long."""
    return matrix.sum(1, dtype=torch.promote_types(matrix.dtype, torch.float32))


def squared_norms(matrix: Tensor) -> Tensor:
    """Returns the sum of each row's squares, on the CPU.

    Squares of numbers below 1e-19 or above 1e19 are lost in 32 bits: such rows are summed once more, scaled by a power
    of two.
    """
    (matrix,) = widened([matrix])
    sums = squared_norms_in_own_dtype(matrix)
    for row, value in enumerate(sums.tolist()):
        if not LEAST_SUM_OF_SQUARES <= value < math.inf:
            scale = 2.0**-100 if value >= LEAST_SUM_OF_SQUARES else 2.0**100
            sums[row] = squared_norms_in_own_dtype(matrix[row : row + 1] * scale)[0] / scale / scale
    return sums


def squared_norms_in_own_dtype(matrix: Tensor) -> Tensor:
    whole = matrix.shape[1] // ROW * ROW
    if whole < matrix.shape[1]:
        tail: Tensor = torch.linalg.vector_norm(matrix[:, whole:], dim=1).double().square_()
        return tail if not whole else squared_norms_in_own_dtype(matrix[:, :whole]) + tail
    sums: Tensor = torch.linalg.vector_norm(matrix.view(len(matrix), -1, ROW), dim=2).double().square_().sum(1)
    return sums


def widened(tensors: TensorList) -> list[Tensor]:
    """Returns the tensors in at least 32 bits."""
    if all(dtype.itemsize >= torch.float32.itemsize for dtype in set(dtypes_of(tensors))):
        return list(tensors)
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def dtypes_of(tensors: TensorList) -> list[torch.dtype]:
    return list(map(attrgetter("dtype"), tensors))


# --- Pieces of tensors


def matrices(tensors: Sequence[Tensor | None]) -> Iterator[tuple[list[int], Tensor]]:
    """Yields all elements of tensors as matrices whose rows are small tensors of one shape, or a piece of a large one,
    each with the indices of the tensors that its rows belong to."""
    small: defaultdict[tuple[torch.Size, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor is None or not (numel := tensor.numel()):
            continue
        if numel <= SMALL:
            small[tensor.shape, tensor.dtype].append(index)
        else:
            for piece in pieces_of(tensor):
                yield [index], piece.reshape(1, -1)
    for (shape, _), indices in small.items():
        count = max(1, CPU_BATCH // shape.numel())
        for start in range(0, len(indices), count):
            part = indices[start : start + count]
            yield part, torch.stack([tensors[index] for index in part]).reshape(len(part), -1)  # type: ignore[misc]


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """Cuts a tensor in the order of its memory, if it is dense, so that no piece has to be copied."""
    limit = batch_limit(tensor)
    ordered = tensor if tensor.is_contiguous() else in_memory_order(tensor)
    if ordered.is_contiguous():
        flat = ordered.view(-1)
        yield from [flat] if flat.numel() <= limit else torch.split(flat, limit)
    else:
        yield from (piece for _, (piece,) in slabs((ordered,), limit))


def in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a view whose dimensions are sorted by their strides: contiguous if the tensor is dense."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


def batch_limit(tensor: Tensor) -> int:
    return CPU_BATCH if tensor.is_cpu else DEVICE_BATCH


class Batch(NamedTuple):
    group: int
    indices: list[int]  # of the tensor that each piece belongs to
    starts: list[tuple[int, int]]  # the dimension that it is cut along, and the index where the piece begins
    lists: list[list[Tensor]]


def batches(*lists: list[Tensor] | list[Tensor | None], groups: list[int] | None = None) -> Iterator[Batch]:
    """Cuts parallel lists of tensors into parallel lists of pieces, those of one group at a time.

    Leaves out places where one of them has None: parameters without a gradient.
    """
    first_list: list[Tensor] = lists[0]  # type: ignore[assignment]  # of parameters or moments
    limit = batch_limit(first_list[0])
    groups = groups or [0] * len(lists[0])
    numels = list(map(Tensor.numel, first_list))
    is_whole = all(all(map(is_not, tensors, repeat(None))) for tensors in lists)
    if is_whole and sum(numels) <= limit and all(numels) and len(set(groups)) == 1:
        whole: list[list[Tensor]] = [list(tensors) for tensors in lists]  # type: ignore[arg-type]
        yield Batch(groups[0], list(range(len(numels))), [(0, 0)] * len(numels), whole)
        return
    batch, numel = Batch(groups[0], [], [], [[] for _ in lists]), 0
    for index, (group, *tensors) in enumerate(zip(groups, *lists, strict=True)):
        if not is_whole and any(tensor is None for tensor in tensors):
            continue
        for start, slab in slabs(tuple(tensors), limit):
            if batch.indices and (batch.group != group or numel >= limit):
                yield batch
                numel = 0
            if numel == 0:
                batch = Batch(group, [], [], [[] for _ in lists])
            batch.indices.append(index)
            batch.starts.append(start)
            for pieces, piece in zip(batch.lists, slab, strict=True):
                pieces.append(piece)
            numel += slab[0].numel()
    if batch.indices:
        yield batch


def slabs(tensors: tuple[Tensor, ...], limit: int) -> Iterator[tuple[tuple[int, int], tuple[Tensor, ...]]]:
    """Tensors of one shape, cut along their longest dimension: it and the index of each cut, and the pieces. Empty ones
    have none."""
    shape, numel = tensors[0].shape, tensors[0].numel()
    if numel == 0:
        return
    if numel <= limit:
        yield (0, 0), tensors
        return
    dim = shape.index(max(shape))
    rows = max(1, limit * shape[dim] // numel)
    pieces = zip(*(torch.split(tensor, rows, dim) for tensor in tensors), strict=True)
    yield from (((dim, number * rows), piece) for number, piece in enumerate(pieces))

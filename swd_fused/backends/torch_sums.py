"""Sums of tensors' elements and of their squares, by tensor, in float64 where the device has it.

On the CPU float32 numbers are added in rows of 256, and rows in float64. torch's own norm of 2^20 equal numbers is off
by 4e-4; by rows it is off by 8e-8, and takes half as long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swd_fused.backends.torch_batches import batch_limit, cuts_of, in_memory_order
from swd_fused.tensors.hyper import scalar_dtype
from swd_fused.tensors.transfer import from_host

# Tensors of one shape up to this many elements are copied together and summed by one call, which takes 10 us.
SMALL = 1 << 14
COPIED_TOGETHER = 1 << 20

# Elements whose squares are added in float32.
ROW = 256

# Of a piece. Up to 2^20 squares, each of which may have lost 2^-126, then lose no more than float32's resolution.
LEAST_SUM_OF_SQUARES = 2.0**-80

# A sum of elements for each tensor at these indices, among which one may occur several times.
PartialSums = tuple[list[int], Tensor]


def sums_of_squares(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the sum of each tensor's squared elements, 0 where there is none."""
    present = {index: tensor for index, tensor in enumerate(tensors) if tensor is not None}
    parts: list[PartialSums] = []
    if device.type == "cpu" and type(next(iter(present.values()), None)) is Tensor:
        parts = [(indices, squared_norms(matrix)) for indices, matrix in matrices(tensors)]
    elif present:
        # Which sums are out of float32's range could not be seen without waiting. In float64 this would take 30 times
        # as long on the CPU.
        norms = torch._foreach_norm(list(present.values()), 2, dtype=scalar_dtype(device))
        parts = [(list(present), torch.stack(norms).square())]
    return sums_by_tensor(parts, len(tensors), device)


def sums_of_elements(tensors: Sequence[Tensor | None]) -> list[PartialSums]:
    """Returns sums of elements. The same numbers always give the same bits."""
    return [(indices, row_sums(matrix)) for indices, matrix in matrices(tensors)]


def sums_by_tensor(parts: list[PartialSums], count: int, device: torch.device) -> Tensor:
    """Adds up what there is for each of `count` tensors."""
    dtype = scalar_dtype(device)
    indices = [index for members, _ in parts for index in members]
    values = [sums.to(dtype) for _, sums in parts]
    if values and indices == list(range(count)):
        return torch.cat(values)
    total = torch.zeros(count, dtype=dtype, device=device)
    if values:
        total.index_add_(0, from_host(torch.tensor(indices, device="cpu"), device), torch.cat(values))
    return total


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
            ordered = in_memory_order(tensor)
            for cut in cuts_of(ordered, batch_limit(tensor.device)):
                yield [index], (ordered if cut is None else cut.of(ordered)).reshape(1, -1)
    for (shape, _), indices in small.items():
        count = COPIED_TOGETHER // shape.numel()
        for start in range(0, len(indices), count):
            part = indices[start : start + count]
            yield part, torch.stack([tensors[index] for index in part]).reshape(len(part), -1)  # type: ignore[misc]


def row_sums(matrix: Tensor) -> Tensor:
    """Adds in 32 bits at least, in which torch adds pairwise: in float64 from the start it took four times as long."""
    return matrix.sum(1, dtype=torch.promote_types(matrix.dtype, torch.float32))


def squared_norms(matrix: Tensor) -> Tensor:
    """Returns the sum of each row's squares, on the CPU.

    Squares of numbers below 1e-19 or above 1e19 are lost in 32 bits: such rows are summed once more, scaled by a power
    of two.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
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

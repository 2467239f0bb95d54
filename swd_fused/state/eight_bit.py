"""Moments in 8 bits: which tensors have them, how tensors are cut into blocks, and the codec in plain PyTorch.

A tensor counts as a matrix with a row for each index of its first dimension (a vector as one row), and rows are cut
into blocks of 256 elements, of which the last may be shorter. So blocks do not depend on strides in memory, nor on how
a tensor is sharded along its first dimension. Each block has a float32 scale:

    exp_avg     code * scale        int8 codes from -127 to 127
    exp_avg_sq  (code * scale)^2    uint8 codes of the root; after an update none is 0, since a weight whose second
                                    moment vanished would take a step divided by eps

An update uses moments before rounding, and rounds them stochastically to store them. Rounded to nearest, most codes of
the second moment would not change, since a step changes it by a thousandth: after 400 steps its sum was 3 to 7% low.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.distributed.sharding import Sharding, is_dtensor
from swd_fused.state.rounding import LOW_32_BITS, RANK_DISTANCE, as_int32, ranks_before, scrambled, scrambled_int32_

BLOCK = 256
PAIRS = BLOCK // 2  # pairs of elements in a block
GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio: spreads consecutive numbers

# Smaller tensors are a small share of a model and keep float32. Vectors such as biases and norms keep it too: they must
# if they are sharded, and a checkpoint should not depend on that. So do tensors with rows so short that scales would
# take more than a quarter as much memory as codes.
LEAST_NUMEL = 4096
LEAST_VECTOR = 65536
LEAST_ROW = 16

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CODES: dict[str, str] = {"exp_avg": "exp_avg_codes", "exp_avg_sq": "exp_avg_sq_root_codes"}
SCALES: dict[str, str] = {"exp_avg": "exp_avg_scales", "exp_avg_sq": "exp_avg_sq_root_scales"}
CODE_DTYPES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
STORED_DTYPES = {
    **{CODES[key]: dtype for key, dtype in CODE_DTYPES.items()},
    **dict.fromkeys(SCALES.values(), torch.float32),
}
LARGEST_CODE = {"exp_avg": 127, "exp_avg_sq": 255}

# Codes are rounded from fixed-point numbers with 8 bits of fraction, after adding 8 random bits.
FRACTION_BITS = 8
TO_NEAREST = 1 << FRACTION_BITS >> 1

# A block whose scale is not above this has codes of 0, and root codes of 1, since the inverse of its scale would
# overflow. The root of a second moment that float32 can hold is never so small.
LEAST_SCALE = 1e-35

# How many elements are converted at once, which limits the size of temporary tensors.
PIECE = 1 << 20


def fits(param: Any) -> bool:
    """Returns whether a parameter's moments can be kept in 8 bits. All ranks of a DTensor get the same answer."""
    least = LEAST_VECTOR if param.dim() == 1 else LEAST_NUMEL
    if param.dtype not in DTYPES or param.numel() < least or rows_and_columns(param.shape)[1] < LEAST_ROW:
        return False
    return not is_dtensor(param) or _shards_have_whole_blocks(param)


def _shards_have_whole_blocks(param: Any) -> bool:
    """Returns whether each block is on one rank: with shards along the first dimension, or along the second if their
    rows are whole blocks."""
    if param.dim() == 1:
        return all(placement.is_replicate() for placement in param.placements)
    parts = 1
    for dim, placement in enumerate(param.placements):
        if placement.is_replicate() or placement.dim == 0:
            continue
        if placement.dim > 1:
            return False
        parts *= param.device_mesh.size(dim)
    columns = rows_and_columns(param.shape)[1]
    return parts == 1 or (param.shape[1] % parts == 0 and columns // parts % BLOCK == 0)


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


def scales_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a tensor or a shard. It keeps the first dimension, so scales shard alike."""
    rows, columns = rows_and_columns(shape)
    blocks = blocks_of_row(columns)
    return (rows, blocks) if len(shape) > 1 else (blocks,)


def blocks_of_row(columns: int) -> int:
    return -(-columns // BLOCK)


def pieces(shape: Sequence[int], numel: int = PIECE) -> Iterator[tuple[slice, slice]]:
    """Cuts a tensor into pieces of about `numel` elements: whole rows, or whole blocks of a vector. Yields slices of
    the first dimension of the tensor and of its scales."""
    if len(shape) <= 1:
        step = max(1, numel // BLOCK) * BLOCK
        for begin in range(0, prod(shape), step):
            yield slice(begin, begin + step), slice(begin // BLOCK, (begin + step) // BLOCK)
        return
    step = max(1, numel // max(1, prod(shape[1:])))
    for begin in range(0, shape[0], step):
        yield slice(begin, begin + step), slice(begin, begin + step)


# --- The random bits


class BlockNumbers(NamedTuple):
    """Numbers a tensor's blocks, row-major in the whole tensor: the first block's number, and how much a row adds to
    it."""

    first: int
    pitch: int

    def of_rows(self, begin: int, end: int, blocks: int, device: torch.device) -> Tensor:
        rows = torch.arange(begin, end, dtype=torch.int64, device=device)
        return self.first + self.pitch * rows[:, None] + torch.arange(blocks, dtype=torch.int64, device=device)


def block_numbers(param: Any, sharding: Sharding) -> BlockNumbers:
    """Returns the numbers of the blocks that this rank has, so that shards are rounded as the whole tensor is.

    Shards that are plain tensors do not know their place in the whole. Each rank's blocks have numbers of their own.
    """
    pitch = scales_shape(param.shape)[-1]
    first = ranks_before(param, sharding) * (RANK_DISTANCE // BLOCK)
    if is_dtensor(param) and param.dim() > 1:
        (chunk,) = param.__create_chunk_list__()
        first += chunk.offsets[0] * pitch + chunk.offsets[1] * prod(param.shape[2:]) // BLOCK
    return BlockNumbers(first, pitch)


def moment_keys(rounding_keys: Tensor) -> Tensor:
    """Returns each tensor's key for rounding its moments, made from the key for rounding its parameter."""
    return scrambled((rounding_keys + 1) & LOW_32_BITS)


def noise_of_blocks(key: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 8 random bits for each of the two moments of each element. Two neighbours share a hash of 32 bits.

    A pair's number is PAIRS times its block's number, plus its place. All pairs of a block share the upper 32 bits, so
    only the lower ones are computed by pair, as int32: half the memory of int64, and no bits to mask after a product.
    """
    places = as_int32(torch.arange(PAIRS, dtype=torch.int64, device=numbers.device) * GOLDEN)
    keys = as_int32(key + scrambled(numbers * PAIRS >> 32))
    bits = scrambled_int32_((as_int32(numbers * (PAIRS * GOLDEN))[..., None] + places).bitwise_xor_(keys[..., None]))
    both = bits.view(torch.uint8).view(*numbers.shape, BLOCK, 2)  # little-endian: the lowest 8 bits come first
    return both[..., 0], both[..., 1]


# --- The codec


def decoded(key: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Returns a moment in float32, decoded from codes and scales."""
    rows, columns = rows_and_columns(codes.shape)
    blocks = blocks_of_row(columns)
    values = codes.to(torch.float32)
    if values.is_contiguous() and columns == blocks * BLOCK:
        values.view(rows, blocks, BLOCK).mul_(scales.reshape(rows, blocks, 1))
    else:
        values *= scales.reshape(rows, blocks).repeat_interleave(BLOCK, 1)[:, :columns].reshape(codes.shape)
    return values.mul_(values) if key == "exp_avg_sq" else values


def encoded(key: str, values: Tensor, noise: Tensor | int = TO_NEAREST) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of a moment in float32. `noise` has 8 bits for each element of whole blocks."""
    rows, columns = rows_and_columns(values.shape)
    blocks = blocks_of_row(columns)
    matrix = values.reshape(rows, columns)
    in_blocks = whole_blocks(matrix.sqrt() if key == "exp_avg_sq" else matrix).view(rows, blocks, BLOCK)
    scales = matrix.new_zeros(rows, blocks)
    if columns:  # the largest absolute value of each block, without a copy of all
        largest = torch.maximum(in_blocks.amax(-1), in_blocks.amin(-1).neg_()).abs_()
        scales = largest * (1 / LARGEST_CODE[key])
    inverse = torch.where(scales > LEAST_SCALE, (1 << FRACTION_BITS) / scales, 0.0)
    codes = (in_blocks * inverse[..., None]).round_().nan_to_num_(0.0).to(torch.int32)
    codes = codes.add_(noise).bitwise_right_shift_(FRACTION_BITS)
    codes = codes.clamp_(1 if key == "exp_avg_sq" else -LARGEST_CODE[key], LARGEST_CODE[key])
    codes = codes.to(CODE_DTYPES[key]).view(rows, blocks * BLOCK)[:, :columns].reshape(values.shape)
    return codes, scales.view(scales_shape(values.shape))


def whole_blocks(matrix: Tensor) -> Tensor:
    """Fills the last block of each row with zeros. `pad` alone would copy even if there is nothing to fill."""
    missing = -matrix.shape[1] % BLOCK
    return torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix.contiguous()


def sum_of_squares(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of a second moment. It is exact within a block: a sum of whole numbers that stays below 2^24."""
    rows, columns = rows_and_columns(codes.shape)
    parts = torch.split(whole_blocks(codes.reshape(rows, columns)).view(-1, BLOCK), PIECE // BLOCK)
    wide = (part.to(torch.float32) for part in parts)
    squares = torch.cat([part.mul_(part).sum(-1) for part in wide])
    return (squares.to(dtype) * scales.flatten().to(dtype).square()).sum()

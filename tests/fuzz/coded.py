"""Moments in 8 bits: the numbers that they stand for, and the scales and codes that a moment may have."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.definition import Array
from tests.eight_bit_definition import BLOCK, moments_key, random_bytes
from tests.fuzz.layouts import to_wide

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Of float32, in which scales and codes are computed: a product, a division and a root.
ROUNDING = 4 * float(np.finfo(np.float32).eps) / 2
QUANTUM = float(np.finfo(np.float32).smallest_subnormal)

# The inverse of a smaller scale is not to be had in float32: the codes of such a block are 0.
LEAST_SCALE = 1e-35

TO_NEAREST = np.array(128)


class Codec(NamedTuple):
    codes: str
    scales: str
    dtype: torch.dtype
    least: int
    largest: int


CODECS = {
    "exp_avg": Codec("exp_avg_codes", "exp_avg_scales", torch.int8, -127, 127),
    "exp_avg_sq": Codec("exp_avg_sq_root_codes", "exp_avg_sq_root_scales", torch.uint8, 1, 255),
}


def is_coded(state: Mapping[str, Any], key: str) -> bool:
    return key in CODECS and CODECS[key].codes in state


def numbers(state: Mapping[str, Any], key: str) -> Array:
    """A moment as it is stored, in long double."""
    if not is_coded(state, key):
        return to_wide(state[key])
    codes, scales = to_wide(state[CODECS[key].codes]), to_wide(state[CODECS[key].scales])
    values = codes * for_elements(scales, codes.shape)
    return values if key == "exp_avg" else values**2


# --- Blocks


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of a tensor that has elements."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, prod(shape) // rows


def in_blocks(values: Array) -> Array:
    """By row and block. Zeros fill up the last block of each row."""
    rows, columns = rows_and_columns(values.shape)
    return np.pad(values.reshape(rows, columns), ((0, 0), (0, -columns % BLOCK))).reshape(rows, -1, BLOCK)


def for_elements(of_blocks: Array, shape: tuple[int, ...]) -> Array:
    """Repeats what each block has for all of its elements."""
    rows, columns = rows_and_columns(shape)
    return np.repeat(of_blocks.reshape(rows, -1), BLOCK, axis=1)[:, :columns].reshape(shape)


def noises(seed: int, tensor: int, step: int, shape: tuple[int, ...]) -> dict[str, Array]:
    """The random bits by which the definition rounds both moments of each element."""
    rows, columns = rows_and_columns(shape)
    row, column = np.divmod(np.arange(rows * columns).reshape(shape), columns)
    block = row * -(-columns // BLOCK) + column // BLOCK
    return dict(zip(CODECS, random_bytes(moments_key(seed, tensor, step), block, column % BLOCK), strict=True))


# --- What may be stored


class Interval(NamedTuple):
    """What is to be coded, but for the error of the computation: a first moment, or the root of a second one."""

    lower: Array
    upper: Array

    @classmethod
    def of(cls, key: str, wanted: Array, bound: Array) -> Interval:
        lower, upper = wanted - bound, wanted + bound
        return cls(lower, upper) if key == "exp_avg" else cls(np.sqrt(np.maximum(lower, 0)), np.sqrt(upper))

    def scales(self, key: str) -> tuple[Array, Array]:
        """The smallest and the largest scale of each block."""
        smallest = np.maximum(np.maximum(self.lower, -self.upper), 0)
        largest = np.maximum(abs(self.lower), abs(self.upper))
        least, most = (in_blocks(sizes).max(-1) / CODECS[key].largest for sizes in (smallest, largest))
        return least * (1 - ROUNDING) - QUANTUM, most * (1 + ROUNDING) + QUANTUM

    def codes(self, key: str, scales: Array, noise: Array) -> tuple[Array, Array]:
        """The smallest and the largest code of each element. More random bits never make a code smaller, nor does a
        larger number, so that in most places there is but one."""
        factors = for_elements(np.where(scales > LEAST_SCALE, 256 / scales, 0), self.lower.shape)
        least, most = (
            np.clip((np.rint(fixed + way * abs(fixed)).astype(np.int64) + noise) >> 8, *CODECS[key][-2:])
            for fixed, way in ((self.lower * factors, -ROUNDING), (self.upper * factors, ROUNDING))
        )
        return np.where(factors == 0, 0, least), most

"""Instructions that move bits within a register."""

from __future__ import annotations

import numpy as np

from .ptx_compute import apply
from .ptx_parser import Instruction
from .ptx_state import Execute, Operands
from .ptx_types import TYPES, Array, type_of


def compile_shift(instruction: Instruction, operands: Operands) -> Execute:
    """A shift by the width or more leaves zeros, or the sign."""
    kind = type_of(instruction.opcode)
    left = instruction.base == "shl"

    def shift(x: Array, by: Array) -> Array:
        most = np.minimum(by, kind.width - 1).astype(x.dtype)
        shifted = x << most if left else x >> most
        if not left and kind.kind == "signed":
            return shifted
        return np.where(by >= kind.width, x.dtype.type(0), shifted)

    return apply(instruction, operands, shift, kind, kind, TYPES["u32"])


def compile_bit_field(instruction: Instruction, operands: Operands) -> Execute:
    """bfe.u32: some bits of a number."""
    if instruction.opcode != "bfe.u32":
        raise NotImplementedError(instruction.text)

    def extract(x: Array, position: Array, length: Array) -> Array:
        shifted = x.astype(np.uint64) >> (position & 255).astype(np.uint64)
        return (shifted & ((np.uint64(1) << (length & 255).astype(np.uint64)) - np.uint64(1))).astype(np.uint32)

    return apply(instruction, operands, extract, *[TYPES["u32"]] * 4)


def compile_permute(instruction: Instruction, operands: Operands) -> Execute:
    """prmt: four bytes out of eight, chosen by four digits; a digit's top bit repeats the byte's sign."""
    if len(instruction.parts) > 2:
        raise NotImplementedError(instruction.text)

    def permute(a: Array, b: Array, selector: Array) -> Array:
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint32)
        for i in range(4):
            digit = (selector >> np.uint32(4 * i)) & np.uint32(15)
            byte = (both >> ((digit & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
            result |= np.where(digit >= 8, sign, byte).astype(np.uint32) << np.uint32(8 * i)
        return result

    word = TYPES["b32"]
    return apply(instruction, operands, permute, word, word, word, word)

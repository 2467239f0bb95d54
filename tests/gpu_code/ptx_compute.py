"""Instructions that only calculate. Each compiler returns a function of the state and the executing lanes.

Known is what the package's kernels are compiled to. Whatever else turns up is refused rather than ignored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from .ptx_parser import Instruction, elements
from .ptx_rounding import fma
from .ptx_state import Execute, Lanes, Operands, State
from .ptx_types import SIGNED, TYPES, UNSIGNED, Array, Type, type_of, types_in

Calculate = Callable[..., Array]

UNARY: dict[str, Calculate] = {"sqrt": np.sqrt, "neg": np.negative, "abs": np.abs, "not": np.invert, "mov": lambda x: x}

BINARY: dict[str, Calculate] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _unordered(compare: Calculate) -> Calculate:
    return lambda a, b: compare(a, b) | (a != a) | (b != b)


COMPARE: dict[str, Calculate] = {
    "eq": operator.eq,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "equ": _unordered(operator.eq),
    "neu": operator.ne,
    "ltu": _unordered(operator.lt),
    "leu": _unordered(operator.le),
    "gtu": _unordered(operator.gt),
    "geu": _unordered(operator.ge),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}

TO_INTEGRAL: dict[str, Calculate] = {"rni": np.rint, "rzi": np.trunc}

# To nearest even is what NumPy and the types do.
OTHER_MODES = {"rz", "rm", "rp", "rmi", "rpi", "rna", "sat", "relu", "ftz", "approx", "hi", "NaN"}


def apply(instruction: Instruction, operands: Operands, calculate: Calculate, *kinds: Type) -> Execute:
    """The first of `kinds` is the result's, the others are those of the sources."""
    if not OTHER_MODES.isdisjoint(instruction.parts):
        raise NotImplementedError(f"only rounding to nearest even is known: {instruction.text}")
    wider = instruction.base == "cvt"
    write = operands.write(instruction.operands[0], kinds[0], wider=wider)
    sources = instruction.operands[1:]
    if len(sources) != len(kinds) - 1:
        raise NotImplementedError(f"{len(kinds) - 1} sources are wanted: {instruction.text}")
    reads = [operands.read(operand, kind, wider=wider) for operand, kind in zip(sources, kinds[1:], strict=True)]
    if len(reads) == 1:
        (only,) = reads
        return lambda state, lanes: write(state, lanes, calculate(only(state, lanes)))
    if len(reads) == 2:
        left, right = reads
        return lambda state, lanes: write(state, lanes, calculate(left(state, lanes), right(state, lanes)))
    return lambda state, lanes: write(state, lanes, calculate(*(read(state, lanes) for read in reads)))


def compile_unary(instruction: Instruction, operands: Operands) -> Execute:
    kind = type_of(instruction.opcode)
    return apply(instruction, operands, UNARY[instruction.base], kind, kind)


def compile_binary(instruction: Instruction, operands: Operands) -> Execute:
    kind = type_of(instruction.opcode)
    return apply(instruction, operands, BINARY[instruction.base], kind, kind, kind)


def compile_move(instruction: Instruction, operands: Operands) -> Execute:
    """Also packs several registers into one and takes one apart."""
    kind = type_of(instruction.opcode)
    target, source = instruction.operands
    if target.startswith("{"):
        parts = elements(target)
        part = TYPES[f"b{kind.width // len(parts)}"]
        writes = [operands.write(p, part) for p in parts]
        read = operands.read(source, kind)

        def unpack(state: State, lanes: Lanes) -> None:
            pieces = np.ascontiguousarray(read(state, lanes)).view(UNSIGNED[part.width]).reshape(-1, len(parts)).copy()
            for i, write in enumerate(writes):
                write(state, lanes, pieces[:, i])

        return unpack
    if source.startswith("{"):
        parts = elements(source)
        part = TYPES[f"b{kind.width // len(parts)}"]
        reads = [operands.read(p, part) for p in parts]
        write = operands.write(target, kind)

        def pack(state: State, lanes: Lanes) -> None:
            pieces = np.empty((state.lane[lanes].size, len(parts)), UNSIGNED[part.width])
            for i, read in enumerate(reads):
                pieces[:, i] = read(state, lanes)
            write(state, lanes, kind.values(pieces.view(UNSIGNED[kind.width]).reshape(-1)))

        return pack
    return compile_unary(instruction, operands)


def compile_multiply(instruction: Instruction, operands: Operands) -> Execute:
    """mul, mad and fma: floats round once, integers keep the low half or both.

    On sm_100 fma.f32.bf16 multiplies bf16 and adds fp32.
    """
    three = instruction.base != "mul"
    if three and len(types_in(instruction.opcode)) == 2:
        wide, narrow = types_in(instruction.opcode)
        return apply(instruction, operands, fma, wide, narrow, narrow, wide)
    kind = type_of(instruction.opcode)
    if kind.is_float:
        return apply(instruction, operands, fma if three else np.multiply, *[kind] * (4 if three else 3))
    if "wide" in instruction.parts:
        prefix = "s" if kind.kind == "signed" else "u"
        wide = TYPES[f"{prefix}{2 * kind.width}"]
        dtype = (SIGNED if kind.kind == "signed" else UNSIGNED)[wide.width]

        def multiply_wide(a: Array, b: Array, c: Array | None = None) -> Array:
            product = a.astype(dtype) * b.astype(dtype)
            return product if c is None else product + c

        return apply(instruction, operands, multiply_wide, wide, kind, kind, *([wide] if three else []))
    calculate = (lambda a, b, c: a * b + c) if three else np.multiply
    return apply(instruction, operands, calculate, *[kind] * (4 if three else 3))


def compile_divide(instruction: Instruction, operands: Operands) -> Execute:
    """Integers go toward zero; division by zero gives all ones, as on the GPU."""
    kind = type_of(instruction.opcode)

    def divide_integers(a: Array, b: Array) -> Array:
        safe = np.where(b == 0, b.dtype.type(1), b)
        quotient = a // safe
        if kind.kind == "signed":
            quotient += ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
        return np.where(b == 0, ~np.zeros_like(b), quotient)

    return apply(instruction, operands, np.divide if kind.is_float else divide_integers, kind, kind, kind)


def compile_compare(instruction: Instruction, operands: Operands) -> Execute:
    kind = type_of(instruction.opcode)
    return apply(instruction, operands, COMPARE[instruction.parts[1]], TYPES["pred"], kind, kind)


def compile_select(instruction: Instruction, operands: Operands) -> Execute:
    kind = TYPES[f"b{type_of(instruction.opcode).width}"]
    return apply(instruction, operands, lambda a, b, p: np.where(p, a, b), kind, kind, kind, TYPES["pred"])


def compile_convert(instruction: Instruction, operands: Operands) -> Execute:
    target, source = types_in(instruction.opcode)
    if target.is_packed:
        if source.is_packed:
            raise NotImplementedError(instruction.text)
        return apply(instruction, operands, lambda high, low: _side_by_side(low, high), target, source, source)
    to_integral = next((TO_INTEGRAL[p] for p in instruction.parts if p in TO_INTEGRAL), None)
    if source.is_float and not target.is_float:
        if to_integral is None:
            raise NotImplementedError(f"no rounding named: {instruction.text}")
        return apply(instruction, operands, lambda x: _saturate(to_integral(x), target), target, source)
    if to_integral is not None:
        return apply(instruction, operands, to_integral, target, source)
    if target.is_float or source.width >= target.width:
        return apply(instruction, operands, lambda x: x, target, source)
    wide = (SIGNED if source.kind == "signed" else UNSIGNED)[target.width]
    return apply(instruction, operands, lambda x: x.astype(wide), target, source)


def _side_by_side(low: Array, high: Array) -> Array:
    return np.stack(np.broadcast_arrays(low, high), axis=1)


def _saturate(x: Array, target: Type) -> Array:
    """Floats beyond an integer's range become its ends, NaN becomes zero."""
    dtype = (SIGNED if target.kind == "signed" else UNSIGNED)[target.width]
    lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
    x = np.where(np.isnan(x), 0, x.astype(np.float64))
    inside = np.clip(x, float(lowest), np.nextafter(float(highest) + 1, 0))
    return np.where(x > highest, dtype(highest), inside.astype(dtype))

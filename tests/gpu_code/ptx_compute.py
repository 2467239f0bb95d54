"""Instructions that only calculate. Each compiler returns a function of the state and the executing lanes.

Approximate division, square root, reciprocal, exponential and logarithm are taken as correctly rounded: a GPU may be an
ulp or two away. `.ftz` flushes as on the GPU. A rounding other than to nearest is refused rather than ignored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from .ptx_parser import Instruction, elements
from .ptx_rounding import flush_subnormals, fma
from .ptx_state import WARP, Execute, Lanes, Operands, State
from .ptx_types import SIGNED, TYPES, UNSIGNED, Array, Type, types_in

Calculate = Callable[..., Array]

UNARY: dict[str, Calculate] = {
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
    "rcp": lambda x: x.dtype.type(1) / x,
    "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(x.dtype),
    "lg2": lambda x: np.log2(x.astype(np.float64)).astype(x.dtype),
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "popc": np.bitwise_count,
    "mov": lambda x: x,
    "cvta": lambda x: x,
}

BINARY: dict[str, Calculate] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "rem": np.fmod,
    "copysign": lambda sign, magnitude: np.copysign(magnitude, sign),
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
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
    "equ": _unordered(operator.eq),
    "neu": operator.ne,
    "ltu": _unordered(operator.lt),
    "leu": _unordered(operator.le),
    "gtu": _unordered(operator.gt),
    "geu": _unordered(operator.ge),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}

TO_INTEGRAL: dict[str, Calculate] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def refuse_other_roundings(instruction: Instruction) -> None:
    if not {"rz", "rm", "rp", "rna", "sat", "relu"}.isdisjoint(instruction.parts):
        raise NotImplementedError(f"only rounding to nearest even is known: {instruction.text}")


def _apply(instruction: Instruction, operands: Operands, calculate: Calculate, *kinds: Type) -> Execute:
    """The first of `kinds` is the result's, the others are those of the sources."""
    refuse_other_roundings(instruction)
    write = operands.write(instruction.operands[0], kinds[0])
    reads = [operands.read(o, k) for o, k in zip(instruction.operands[1:], kinds[1:], strict=False)]
    if "ftz" in instruction.parts:
        exact = calculate

        def calculate(*sources: Array) -> Array:
            return flush_subnormals(exact(*map(flush_subnormals, sources)).astype(np.float32))

    if len(reads) == 1:
        (only,) = reads
        return lambda state, lanes: write(state, lanes, calculate(only(state, lanes)))
    if len(reads) == 2:
        left, right = reads
        return lambda state, lanes: write(state, lanes, calculate(left(state, lanes), right(state, lanes)))
    return lambda state, lanes: write(state, lanes, calculate(*(read(state, lanes) for read in reads)))


def compile_unary(instruction: Instruction, operands: Operands) -> Execute:
    kind = types_in(instruction.opcode)[-1]
    result = TYPES["u32"] if instruction.base == "popc" else kind
    return _apply(instruction, operands, UNARY[instruction.base], result, kind)


def compile_binary(instruction: Instruction, operands: Operands) -> Execute:
    kind = types_in(instruction.opcode)[-1]
    calculate = BINARY[instruction.base]
    if "NaN" in instruction.parts:
        calculate = {"min": np.minimum, "max": np.maximum}[instruction.base]
    return _apply(instruction, operands, calculate, kind, kind, kind)


def compile_move(instruction: Instruction, operands: Operands) -> Execute:
    """Also packs several registers into one and takes one apart."""
    kind = types_in(instruction.opcode)[-1]
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
    """mul, mad and fma: floats round once, integers keep the low half, the high half or both."""
    kind = types_in(instruction.opcode)[-1]
    three = instruction.base != "mul"
    if kind.is_float:
        return _apply(instruction, operands, fma if three else np.multiply, *[kind] * (4 if three else 3))
    if "wide" in instruction.parts:
        prefix = "s" if kind.kind == "signed" else "u"
        wide = TYPES[f"{prefix}{2 * kind.width}"]
        dtype = (SIGNED if kind.kind == "signed" else UNSIGNED)[wide.width]

        def multiply_wide(a: Array, b: Array, c: Array | None = None) -> Array:
            product = a.astype(dtype) * b.astype(dtype)
            return product if c is None else product + c

        return _apply(instruction, operands, multiply_wide, wide, kind, kind, *([wide] if three else []))
    if "hi" in instruction.parts:

        def multiply_high(a: Array, b: Array, c: Array | None = None) -> Array:
            high = ((a.astype(object) * b.astype(object)) >> kind.width).astype(a.dtype)
            return high if c is None else high + c

        return _apply(instruction, operands, multiply_high, *[kind] * (4 if three else 3))
    calculate = (lambda a, b, c: a * b + c) if three else np.multiply
    return _apply(instruction, operands, calculate, *[kind] * (4 if three else 3))


def compile_divide(instruction: Instruction, operands: Operands) -> Execute:
    """Integers go toward zero; division by zero gives all ones, as on the GPU."""
    kind = types_in(instruction.opcode)[-1]

    def divide_integers(a: Array, b: Array) -> Array:
        safe = np.where(b == 0, b.dtype.type(1), b)
        quotient = a // safe
        if kind.kind == "signed":
            quotient += ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
        return np.where(b == 0, ~np.zeros_like(b), quotient)

    return _apply(instruction, operands, np.divide if kind.is_float else divide_integers, kind, kind, kind)


def compile_shift(instruction: Instruction, operands: Operands) -> Execute:
    """A shift by the width or more leaves zeros, or the sign."""
    kind = types_in(instruction.opcode)[-1]
    left = instruction.base == "shl"

    def shift(x: Array, by: Array) -> Array:
        most = np.minimum(by, kind.width - 1).astype(x.dtype)
        shifted = x << most if left else x >> most
        if not left and kind.kind == "signed":
            return shifted
        return np.where(by >= kind.width, x.dtype.type(0), shifted)

    return _apply(instruction, operands, shift, kind, kind, TYPES["u32"])


def compile_funnel_shift(instruction: Instruction, operands: Operands) -> Execute:
    """shf: 32 bits out of two registers."""
    left, wrap = "l" in instruction.parts, "wrap" in instruction.parts

    def shift(low: Array, high: Array, by: Array) -> Array:
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        by = (by & np.uint32(31)) if wrap else np.minimum(by, np.uint32(32))
        by = by.astype(np.uint64)
        return ((both << by) >> np.uint64(32) if left else both >> by).astype(np.uint32)

    word = TYPES["b32"]
    return _apply(instruction, operands, shift, word, word, word, word)


def compile_bit_field(instruction: Instruction, operands: Operands) -> Execute:
    """bfe: some bits of a number, with the sign of the highest for signed types."""
    kind = types_in(instruction.opcode)[-1]

    def extract(x: Array, position: Array, length: Array) -> Array:
        wide = x.astype(object)
        position, length = (position & 255).astype(object), (length & 255).astype(object)
        field = (wide >> position) & ((1 << length) - 1)
        if kind.kind == "signed":
            top = np.minimum(position + length - 1, kind.width - 1)
            sign = (wide >> top) & 1 & (length > 0)
            field = field - (sign << length)
        return field.astype(x.dtype)

    return _apply(instruction, operands, extract, kind, kind, TYPES["u32"], TYPES["u32"])


def compile_logic(instruction: Instruction, operands: Operands) -> Execute:
    """lop3: any function of three bits, given as a table of eight."""
    table = operands.constant(instruction.operands[4])

    def look_up(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result

    word = TYPES["b32"]
    return _apply(instruction, operands, look_up, word, word, word, word)


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
    return _apply(instruction, operands, permute, word, word, word, word)


def compile_compare(instruction: Instruction, operands: Operands) -> Execute:
    """setp p|q, a, b and its form with and, or, xor of a further predicate."""
    kind = types_in(instruction.opcode)[-1]
    compare = COMPARE[instruction.parts[1]]
    combine = next((BINARY[p] for p in instruction.parts[2:] if p in ("and", "or", "xor")), None)
    targets = [operands.write(t.strip(), TYPES["pred"]) for t in instruction.operands[0].split("|")]
    left, right = (operands.read(o, kind) for o in instruction.operands[1:3])
    further = read_predicate(operands, instruction.operands[3]) if combine else None
    flush = flush_subnormals if "ftz" in instruction.parts else (lambda x: x)

    def execute(state: State, lanes: Lanes) -> None:
        result = compare(flush(left(state, lanes)), flush(right(state, lanes)))
        for write, outcome in zip(targets, (result, ~result), strict=False):
            write(state, lanes, outcome if combine is None else combine(outcome, further(state, lanes)))

    return execute


def read_predicate(operands: Operands, operand: str) -> Callable[[State, Lanes], Array]:
    read = operands.read(operand.lstrip("!"), TYPES["pred"])
    return (lambda state, lanes: ~read(state, lanes)) if operand.startswith("!") else read


def compile_select(instruction: Instruction, operands: Operands) -> Execute:
    kind = TYPES[f"b{types_in(instruction.opcode)[-1].width}"]
    return _apply(instruction, operands, lambda a, b, p: np.where(p, a, b), kind, kind, kind, TYPES["pred"])


def compile_convert(instruction: Instruction, operands: Operands) -> Execute:
    target, source = types_in(instruction.opcode)
    if target.is_packed:
        if source.is_packed:
            raise NotImplementedError(instruction.text)
        return _apply(instruction, operands, lambda high, low: _side_by_side(low, high), target, source, source)
    to_integral = next((TO_INTEGRAL[p] for p in instruction.parts if p in TO_INTEGRAL), None)
    if source.is_float and not target.is_float:
        if to_integral is None:
            raise NotImplementedError(f"no rounding named: {instruction.text}")
        return _apply(instruction, operands, lambda x: _saturate(to_integral(x), target), target, source)
    if to_integral is not None:
        return _apply(instruction, operands, to_integral, target, source)
    if target.is_float or source.width >= target.width:
        return _apply(instruction, operands, lambda x: x, target, source)
    wide = (SIGNED if source.kind == "signed" else UNSIGNED)[target.width]
    return _apply(instruction, operands, lambda x: x.astype(wide), target, source)


def _side_by_side(low: Array, high: Array) -> Array:
    return np.stack(np.broadcast_arrays(low, high), axis=1)


def _saturate(x: Array, target: Type) -> Array:
    """Floats beyond an integer's range become its ends, NaN becomes zero."""
    dtype = (SIGNED if target.kind == "signed" else UNSIGNED)[target.width]
    lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
    x = np.where(np.isnan(x), 0, x.astype(np.float64))
    inside = np.clip(x, float(lowest), np.nextafter(float(highest) + 1, 0))
    return np.where(x > highest, dtype(highest), inside.astype(dtype))


def compile_shuffle(instruction: Instruction, operands: Operands) -> Execute:
    """shfl.sync: read a register of another lane of the warp, which must execute the same instruction now."""
    mode = next(p for p in instruction.parts if p in ("up", "down", "bfly", "idx"))
    target, *predicate = [t.strip() for t in instruction.operands[0].split("|")]
    word = TYPES["b32"]
    write = operands.write(target, word)
    write_predicate = operands.write(predicate[0], TYPES["pred"]) if predicate else None
    source, distance, clamp = (operands.read(o, word) for o in instruction.operands[1:4])

    def execute(state: State, lanes: Lanes) -> None:
        lane = state.lane[lanes]
        own = lane % WARP
        b = distance(state, lanes).astype(np.int64) & 31
        c = clamp(state, lanes).astype(np.int64)
        segment = (c >> 8) & 31
        last = (own & segment) | (c & 31 & ~segment)
        other = {"up": own - b, "down": own + b, "bfly": own ^ b, "idx": (own & segment) | (b & ~segment)}[mode]
        inside = other >= last if mode == "up" else other <= last
        chosen = lane - own + np.where(inside, other, own)
        _require_active(state, lanes, chosen, instruction)
        everywhere = np.broadcast_to(source(state, slice(None)), state.lane.shape)
        write(state, lanes, everywhere[chosen])
        if write_predicate is not None:
            write_predicate(state, lanes, inside)

    return execute


def _require_active(state: State, lanes: Lanes, chosen: Array, instruction: Instruction) -> None:
    if isinstance(lanes, slice) and lanes.start % WARP == 0 and lanes.stop % WARP == 0:
        return
    active = np.zeros(state.lane.size, bool)
    active[lanes] = True
    if not active[chosen].all():
        raise RuntimeError(f"a lane is read that does not take part: {instruction.text}")


def compile_nothing(instruction: Instruction, operands: Operands) -> Execute:
    """Fences and hints: execution here is sequentially consistent, and nothing is cached."""
    return lambda state, lanes: None


def compile_policy(instruction: Instruction, operands: Operands) -> Execute:
    """createpolicy: a cache hint, which loads and stores here ignore."""
    write = operands.write(instruction.operands[0], TYPES["b64"])
    return lambda state, lanes: write(state, lanes, np.zeros(1, np.uint64))

"""PTX types: how the bits in a register become numbers that NumPy can calculate with, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


@dataclass(frozen=True)
class Type:
    """`values` reads register bits as numbers, `bits` is the way back, with one rounding to nearest even."""

    name: str
    width: int
    kind: str  # "pred", "bits", "unsigned", "signed" or "float"
    values: Callable[[Array], Array]
    bits: Callable[[Array], Array]

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_packed(self) -> bool:
        return self.name.endswith("x2")


def truncate_to_float32(x: Array) -> Array:
    """float64 rounded toward zero."""
    y = x.astype(np.float32)
    return (y.view(np.uint32) - (np.abs(y.astype(np.float64)) > np.abs(x)).astype(np.uint32)).view(np.float32)


def round_to_odd_float32(x: Array) -> Array:
    """Toward zero, with the last bit set if anything was lost: a second rounding to 22 bits or fewer is then exact."""
    y = truncate_to_float32(x)
    lost = (y.astype(np.float64) != x) & np.isfinite(x)
    return (y.view(np.uint32) | lost.astype(np.uint32)).view(np.float32)


def bf16_bits(x: Array) -> Array:
    if x.dtype == np.float64:
        x = round_to_odd_float32(x)
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_bits(x: Array) -> Array:
    return np.where(np.isnan(x), np.uint16(0x7FFF), np.ascontiguousarray(x, np.float16).view(np.uint16))


def _integer(name: str, width: int, dtype: type, kind: str) -> Type:
    return Type(name, width, kind, lambda b: b.view(dtype), lambda x: x.astype(dtype, copy=False).view(UNSIGNED[width]))


def _pair(name: str, half: Type) -> Type:
    """Two numbers in one register, the lower half first; values have the shape (lanes, 2)."""
    wide, narrow = UNSIGNED[2 * half.width], UNSIGNED[half.width]
    return Type(
        name,
        2 * half.width,
        "float",
        lambda b: half.values(np.ascontiguousarray(b).view(narrow).reshape(-1, 2)),
        lambda x: np.ascontiguousarray(half.bits(x)).view(wide).reshape(-1),
    )


def _types() -> dict[str, Type]:
    types = [Type("pred", 1, "pred", lambda b: b, lambda x: x)]
    for width in UNSIGNED:
        types.append(_integer(f"b{width}", width, UNSIGNED[width], "bits"))
        types.append(_integer(f"u{width}", width, UNSIGNED[width], "unsigned"))
        types.append(_integer(f"s{width}", width, SIGNED[width], "signed"))
    f16 = Type("f16", 16, "float", lambda b: b.view(np.float16), f16_bits)
    bf16 = Type("bf16", 16, "float", bf16_values, bf16_bits)
    f32 = Type(
        "f32", 32, "float", lambda b: b.view(np.float32), lambda x: np.ascontiguousarray(x, np.float32).view(np.uint32)
    )
    f64 = Type(
        "f64", 64, "float", lambda b: b.view(np.float64), lambda x: np.ascontiguousarray(x, np.float64).view(np.uint64)
    )
    types += [f16, bf16, f32, f64, _pair("f16x2", f16), _pair("bf16x2", bf16), _pair("f32x2", f32)]
    return {t.name: t for t in types}


TYPES = _types()


def types_in(opcode: str) -> list[Type]:
    """The types that an opcode names, in order: cvt.rn.bf16x2.f32 has two."""
    return [TYPES[part] for part in opcode.split(".")[1:] if part in TYPES]


def type_of(opcode: str) -> Type:
    """The only one: an instruction on two types must not be read as one on the last."""
    types = types_in(opcode)
    if len(types) != 1:
        raise NotImplementedError(f"{opcode}: one type is wanted, it names {[t.name for t in types]}")
    return types[0]

"""Make Triton's interpreter treat bf16 as a GPU does. Seen in Triton 3.6.0 to 3.9.0.

It cuts fp32 off to bf16 instead of rounding to nearest even, so that half of all values differ; takes fp64 to bf16 as
an integer; misreads subnormal numbers; and adds or multiplies bf16 numbers as the integers that store them. The patch
mends the conversions and refuses the arithmetic, which kernels do in fp32 anyway. Other types convert as they did, but
without NumPy's warning when fp16 overflows: a GPU gives none.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from .ptx_types import Array, bf16_bits, bf16_values

original_cast = interpreter.InterpreterBuilder.cast_impl
original_binary_op = interpreter.InterpreterBuilder.binary_op


def install() -> None:
    builder = interpreter.InterpreterBuilder
    builder.cast_impl = cast
    builder.create_fp_to_fp = lambda self, source, target, rounding: cast(self, source, target)
    builder.binary_op = binary_op


def cast(builder: object, source: interpreter.TensorHandle, target: tl.dtype) -> interpreter.TensorHandle:
    kind, wanted = source.dtype.scalar, target.scalar
    with np.errstate(over="ignore"):
        if tl.bfloat16 not in (kind, wanted) or kind == wanted:
            return original_cast(builder, source, target)
        numbers = bf16_values(source.data) if kind == tl.bfloat16 else _as_float(source.data)
        data = bf16_bits(numbers) if wanted == tl.bfloat16 else numbers.astype(interpreter._get_np_dtype(wanted))
    return interpreter.TensorHandle(data, wanted)


def _as_float(data: Array) -> Array:
    """fp64 stays, so that it is rounded once; so do integers, which float64 holds better than fp32."""
    return data.astype(np.float32 if data.dtype == np.float16 else np.result_type(data.dtype, np.float32))


def binary_op(
    builder: object, left: interpreter.TensorHandle, right: interpreter.TensorHandle, op: np.ufunc
) -> interpreter.TensorHandle:
    if tl.bfloat16 in (left.dtype.scalar, right.dtype.scalar):
        raise NotImplementedError(f"{op.__name__} of bf16 numbers: the interpreter has none; convert to fp32 first")
    return original_binary_op(builder, left, right, op)

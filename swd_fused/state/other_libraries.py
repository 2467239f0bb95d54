"""Converts saved state of bitsandbytes, torchao and TransformerEngine. None of these libraries is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swd_fused.distributed.sharding import local_tensor, sharded_like
from swd_fused.options import MASTER, REMAINDER

BITSANDBYTES = "__bnb_optimizer_quant_state__"


def as_adams(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns saved state with moments decoded, under Adam's names; other libraries' state stays as it is.

    TransformerEngine saves the remainder of a master under the name of a master, in int16.
    """
    result = {key: _dequantized(value) for key, value in state.items()}
    quantized = result.get(BITSANDBYTES)
    if isinstance(quantized, Mapping) and {"state1", "state2"} <= quantized.keys():
        del result[BITSANDBYTES]
        result["exp_avg"], result["exp_avg_sq"] = (_of_bitsandbytes(quantized, number) for number in "12")
    if isinstance(result.get(MASTER), Tensor) and result[MASTER].dtype == torch.int16:
        result[REMAINDER] = result.pop(MASTER)
    return result


def _dequantized(value: Any) -> Any:
    """Returns the numbers of a moment that torchao keeps in 8 or 4 bits, and anything else as it is."""
    local = local_tensor(value) if isinstance(value, Tensor) else value
    if not type(local).__module__.startswith("torchao."):
        return value
    return sharded_like(value, local.dequantize())


def _of_bitsandbytes(quantized: Mapping[str, Any], number: str) -> Any:
    """Returns a moment, decoded if it is stored as indices into a map of values, in blocks with a scale each."""
    codes, code_map, scales = (quantized.get(f"{name}{number}") for name in ("state", "qmap", "absmax"))
    if not (isinstance(codes, Tensor) and isinstance(code_map, Tensor) and isinstance(scales, Tensor)):
        return codes
    if code_map.numel() != 256 or not scales.numel():
        return codes  # damaged: the codes are refused later for their dtype
    least = -(-codes.numel() // scales.numel())
    block = 1 << (least - 1).bit_length()  # a power of two; the last block may be shorter
    scale = scales.repeat_interleave(block)[: codes.numel()]
    return (code_map[codes.flatten().long()] * scale).reshape(codes.shape)

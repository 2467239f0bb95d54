"""Masters in two bytes: a float32 master as its nearest bfloat16, which is the parameter, and a signed remainder of 16
bits, how many patterns of bits it lies above the parameter.

So a parameter that others write to takes its master along. Halfway between two parameters the upper one in magnitude is
taken: csrc/masters.h says why.
"""

from __future__ import annotations

import torch
from torch import Tensor


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """Returns the masters of bfloat16 parameters, in float32.

    Below zero and above infinity are no numbers. A remainder that would lead there counts as 0: it cannot belong to the
    parameter, so others have written to that.
    """
    bits = param.view(torch.int16).to(torch.int32) << 16
    masters = (bits + remainder).view(torch.float32)
    return torch.where(masters.isnan(), bits.view(torch.float32), masters)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 masters as bfloat16 parameters and remainders. NaN has none, or the parameter might be -0."""
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), 0x7FC00000, bits)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def remainder_of(param: Tensor, master: Tensor) -> Tensor:
    """Returns what a float32 master is beside its bfloat16 parameter, and 0 where it does not round to that.

    Of masters that torch has rounded halfway down to an even parameter the last bit is lost.
    """
    difference = master.view(torch.int32).to(torch.int64) - (param.view(torch.int16).to(torch.int64) << 16)
    rounds_to_param = difference.abs() <= 0x8000
    return difference.clamp(-0x8000, 0x7FFF).masked_fill(~rounds_to_param, 0).to(torch.int16)

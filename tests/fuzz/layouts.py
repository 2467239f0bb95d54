"""Tensors of any strides, exact copies of them, and their bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# Each gives the same values in other memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "reversed": lambda x: _reversed(_reversed(x).contiguous()),
    "second dimension last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 else x,
    "gapped": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


def _reversed(tensor: Tensor) -> Tensor:
    return tensor.permute(tuple(range(tensor.dim()))[::-1])


def laid_out(values: Tensor, layout: str) -> Tensor:
    return LAYOUTS[layout](values.detach().clone())


def exact_copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides in a storage of the same size: `clone` closes gaps."""
    copy = torch.empty(0, dtype=tensor.dtype)
    storage = tensor.detach().untyped_storage().clone()
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def as_real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """One NaN is as good as another."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat, other_flat = (
        as_real(tensor).flatten().clone(memory_format=torch.contiguous_format) for tensor in (one, other)
    )
    if flat.isnan().any() or other_flat.isnan().any():
        if not torch.equal(flat.isnan(), other_flat.isnan()):
            return False
        flat, other_flat = (values.masked_fill_(values.isnan(), 0) for values in (flat, other_flat))
    return torch.equal(flat.view(torch.uint8), other_flat.view(torch.uint8))


def to_wide(tensor: Tensor) -> np.ndarray:
    return as_real(tensor).double().numpy().astype(np.longdouble)

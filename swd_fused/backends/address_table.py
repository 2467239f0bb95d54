"""Addresses of a bucket's tensors, for kernels that take no tensors, and what must be compared before each step.

Writes through an address are not counted by torch, and kernels read memory that was freed as if it were still there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused.tensors.bucket import Bucket

# The address of a gradient that is not there. Not 0, which is the address of an empty one. As in csrc/cpu/operands.h.
NO_GRAD = -1


class Fingerprint(NamedTuple):
    """Holds all that kernels depend on, and apart from it the gradients' addresses, which change most often."""

    others: list[object]
    grads: list[int]


def fingerprint(bucket: Bucket) -> Fingerprint:
    """Describes the bucket's tensors so that two equal descriptions mean the same kernels on the same memory.

    Moments that are the same tensors at the same addresses have not changed otherwise, and of parameters the bucket
    knows the dtype. Written for speed: with a thousand parameters it is a third of what the host does. Column by column
    is faster than all of one kind at a time, and lists are made faster than arrays.
    """
    forms, params = bucket.grads_or_params, bucket.params
    try:
        grads = list(map(Tensor.data_ptr, forms))
        others: list[object] = [
            *(list(map(_DTYPE, forms)), list(map(Tensor.numel, forms)), list(map(Tensor.stride, forms))),
            *(list(map(Tensor.data_ptr, params)), list(map(Tensor.numel, params)), list(map(Tensor.stride, params))),
            list(map(Tensor.data_ptr, chain.from_iterable(bucket.state_tensors))),
        ]
    except RuntimeError:  # a sparse gradient, which `check` refuses with our own error message
        bucket.check()
        raise
    if not bucket.has_all_grads:
        pairs = zip(bucket.grads, grads, strict=True)
        grads = [NO_GRAD if grad is None else address for grad, address in pairs]
    return Fingerprint(others, grads)


def check_memory(bucket: Bucket) -> None:
    """Raises if memory that a step needs was freed. To be called where an address is 0."""
    bucket.check()
    for tensor in chain(bucket.params, bucket.present_grads, *bucket.state_tensors):
        if tensor.numel() and not tensor.data_ptr():
            raise RuntimeError(
                f"FusedAdamS got a tensor of shape {tuple(tensor.shape)} whose memory was freed, wanted one that still "
                "has its elements. Free gradients by setting param.grad = None, and parameters only after the step."
            )


def int64s(values: Iterable[int]) -> Tensor:
    """Returns whole numbers as a tensor, much faster than torch.tensor."""
    numbers = array("q", values)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64, device="cpu")


_DTYPE = attrgetter("dtype")

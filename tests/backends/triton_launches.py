"""Triton's step as one launch or split into passes of several programs, and the sums that it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.backends.triton import launch
from swd_fused.backends.triton.kernels.tables import SUM
from swd_fused.core.bucket import Bucket


@contextmanager
def launches(split: bool) -> Iterator[None]:
    if not split:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "INTERPRETED_PROGRAMS", 3)
        launch.programs_on.cache_clear()
        yield
    launch.programs_on.cache_clear()


def rebuilt_sums(optimizer: FusedAdamS, programs: int) -> tuple[Bucket, Tensor]:
    """Has the plan of the only bucket read its sums anew, and returns the bucket with the sums by tensor.

    Fails if one of them is not, to the bit, what the last step has left.
    """
    (snapshot,) = optimizer._stepper._kept[:1]
    (bucket,) = snapshot.buckets
    plan, parts = bucket.plan, bucket.plan._with_sums
    emitted = [part.sums.clone() for part in parts]
    assert snapshot._takes([param.grad for param in optimizer.numbered_params()])
    bucket.backend.begin(bucket)
    (kernel,) = (kernel for kernel, known in plan._parts.items() if known is parts)
    plan._parts.clear()
    by_tensor = torch.zeros(len(bucket.params), dtype=torch.float64)
    for part, sums in zip(plan.parts_for(kernel, bucket), emitted, strict=True):
        if optimizer.schedule == "lagged":
            plan.find_last(bucket, part, torch.empty(2, dtype=torch.float64))
        assert part.programs == programs
        kept = slice(SUM.weight + 1)  # what follows is for one pass
        assert torch.equal(part.sums[:, kept], sums[:, kept])
        by_tensor.index_add_(0, part.segments[:, 0], sums[:, 0])
    return bucket, by_tensor

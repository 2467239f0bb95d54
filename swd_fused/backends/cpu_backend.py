"""AdamS on the CPU: the C++ kernels of csrc/."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import swd_fused._C  # type: ignore[import-not-found]  # noqa: F401  registers the operators
from swd_fused.arguments import check_grads
from swd_fused.bucket import Bucket

ops = torch.ops.swd_fused


class CpuBackend:
    name = "cpu"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        moment = torch.empty_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)
        ops.advise_huge_pages(moment)
        return moment.zero_()

    def gradient_sums(self, bucket: Bucket) -> Tensor:
        return _checked(bucket, ops.gradient_sums, bucket.grads)

    def max_exp_avg_sq_sums(self, bucket: Bucket, scalars: Tensor) -> Tensor:
        sums: Tensor = ops.max_exp_avg_sq_sums(bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.grads, scalars)
        return sums

    def update(self, bucket: Bucket, scalars: Tensor) -> tuple[Tensor, Tensor]:
        lists = bucket.params, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.grads
        exp_avg_sq_sums, grad_sums = _checked(bucket, ops.update_, *lists, scalars)
        # A boxed operator does not count its writes, and autograd relies on the count to refuse a backward
        # through weights that have changed since the forward.
        torch.autograd.graph.increment_version(bucket.params)
        return exp_avg_sq_sums, grad_sums

    def exp_avg_sq_sums(self, exp_avg_sqs: list[Tensor]) -> Tensor:
        sums: Tensor = ops.exp_avg_sq_sums(exp_avg_sqs)
        return sums


def _checked(bucket: Bucket, op: Callable[..., Tensor], *args: object) -> Tensor:
    """Calls an operator, which checks gradients faster than Python could, and explains why it refused one."""
    try:
        result = op(*args)
    except (RuntimeError, NotImplementedError):
        check_grads(bucket.params, bucket.grads)
        raise
    if not result.is_cpu:  # a meta tensor among the gradients: the operator has computed nothing
        check_grads(bucket.params, bucket.grads)
    return result


# What the operators return where nothing is computed. A real meta tensor among real ones brings us here too: then the
# result is one as well, so that `_checked` notices.


def _fake_sums(*lists: list[Tensor]) -> Tensor:
    return _any_meta(*lists[:3]).new_empty(len(lists[0]), dtype=torch.float64)


def _fake_update(*lists: list[Tensor]) -> Tensor:
    return _any_meta(*lists[:5]).new_empty((2, len(lists[0])), dtype=torch.float64)


def _any_meta(*lists: list[Tensor]) -> Tensor:
    return next((tensor for tensors in lists for tensor in tensors if tensor.is_meta), lists[0][0])


torch.library.register_fake("swd_fused::gradient_sums")(_fake_sums)
torch.library.register_fake("swd_fused::exp_avg_sq_sums")(_fake_sums)
torch.library.register_fake("swd_fused::max_exp_avg_sq_sums")(_fake_sums)
torch.library.register_fake("swd_fused::update_")(_fake_update)
torch.library.register_fake("swd_fused::advise_huge_pages")(lambda tensor: None)

"""AdamS on the CPU: the C++ kernels of csrc/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import swd_fused._C  # type: ignore[import-not-found]  # noqa: F401  registers the operators
from swd_fused.bucket import Bucket
from swd_fused.loss_scale import LossScale

ops = torch.ops.swd_fused


class CpuBackend:
    def description(self, device: torch.device) -> str:
        return "cpu"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        moment = torch.empty_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)
        ops.advise_huge_pages(moment)
        return moment.zero_()

    def gradient_sums(self, bucket: Bucket) -> Tensor:
        scalars = bucket.sums, bucket.steps, bucket.groups, bucket.hyper.table
        sums = _checked(bucket, ops.gradient_sums, bucket.grads, *scalars)
        bucket.grad_sum = sums[0]
        return sums[1:]

    def carried_sum(self, bucket: Bucket) -> Tensor:
        return bucket.carried_sum()

    def max_exp_avg_sq_sum(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        lists = bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.grads
        total: Tensor = ops.max_exp_avg_sq_sum(*lists, bucket.steps, bucket.groups, bucket.hyper.table, grad_factor)
        return total[0]

    def last_exp_avg_sq_sum(self, bucket: Bucket) -> Tensor:
        sums: Tensor = ops.last_exp_avg_sq_sum(
            bucket.sums, bucket.steps, bucket.numels, bucket.groups, bucket.hyper.table
        )
        return sums

    def update(self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None) -> None:
        read = bucket.grads, bucket.groups, bucket.tensor_ids, bucket.hyper.table, exp_avg_sq_mean, grad_factor, skip
        grad_sum = _checked(bucket, ops.update_, *_written(bucket), *read, bucket.options.rounding_seed)
        # A boxed operator does not count its writes, and autograd relies on the count to refuse a backward
        # through weights that have changed since the forward.
        torch.autograd.graph.increment_version(bucket.params)
        if bucket.grad_sum is None:
            bucket.grad_sum = grad_sum[0]

    def step(
        self, bucket: Bucket, max_grad_norm: float | None, lagged: bool, loss_scale: LossScale
    ) -> tuple[Tensor, Tensor, Tensor]:
        read = bucket.grads, bucket.numels, bucket.groups, bucket.tensor_ids, bucket.hyper.table
        scalars = max_grad_norm, lagged, *loss_scale, bucket.options.rounding_seed
        exp_avg_sq_mean, grad_norm, skip = _checked(bucket, ops.step_, *_written(bucket), *read, *scalars).unbind()
        torch.autograd.graph.increment_version(bucket.params)
        return exp_avg_sq_mean, grad_norm, skip

    def exp_avg_sq_sums(self, exp_avg_sqs: list[Tensor]) -> Tensor:
        sums: Tensor = ops.exp_avg_sq_sums(exp_avg_sqs)
        return sums


def _written(bucket: Bucket) -> tuple[object, ...]:
    moments = bucket.exp_avgs, bucket.exp_avg_sqs, bucket.max_exp_avg_sqs
    return bucket.params, *moments, bucket.masters, bucket.sums, bucket.steps


def _checked(bucket: Bucket, op: Callable[..., Tensor], *args: object) -> Tensor:
    """Calls an operator, which checks gradients faster than Python could, and explains why it refused one."""
    try:
        result = op(*args)
    except RuntimeError:
        bucket.check()
        raise
    if not result.is_cpu:  # a meta tensor among the gradients: the operator has computed nothing
        bucket.check()
    return result


# What the operators return where nothing is computed. A real meta tensor among real ones brings us here too: then the
# result is one as well, so that `_checked` notices.


def _fake_sums(numbers: int | None = None) -> Callable[..., Tensor]:
    def fake(*args: Any) -> Tensor:
        tensors = [value for arg in args for value in (arg if isinstance(arg, list) else [arg])]
        tensors = [value for value in tensors if isinstance(value, Tensor)]
        where = next((tensor for tensor in tensors if tensor.is_meta), tensors[0])
        result: Tensor = where.new_empty(len(args[0]) if numbers is None else numbers, dtype=torch.float64)
        return result

    return fake


torch.library.register_fake("swd_fused::gradient_sums")(_fake_sums(3))
torch.library.register_fake("swd_fused::max_exp_avg_sq_sum")(_fake_sums(1))
torch.library.register_fake("swd_fused::last_exp_avg_sq_sum")(_fake_sums(2))
torch.library.register_fake("swd_fused::update_")(_fake_sums(1))
torch.library.register_fake("swd_fused::step_")(_fake_sums(3))
torch.library.register_fake("swd_fused::exp_avg_sq_sums")(_fake_sums())
torch.library.register_fake("swd_fused::advise_huge_pages")(lambda tensor: None)

"""AdamS on the CPU: the C++ kernels of csrc/."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

import swd_fused._C  # type: ignore[import-not-found]  # noqa: F401  registers the operators
from swd_fused.backends.address_table import int64s, noticed
from swd_fused.bucket import Bucket
from swd_fused.loss_scale import LossScale

ops = torch.ops.swd_fused


class CpuBackend:
    is_capturable = False

    def description(self, device: torch.device) -> str:
        return "cpu"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        moment = torch.empty_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)
        ops.advise_huge_pages(moment)
        return moment.zero_()

    def gradient_sums(self, bucket: Bucket) -> Tensor:
        sums = _checked(bucket, ops.gradient_sums, *_operands(bucket), bucket.sums, *_scalars(bucket))
        bucket.grad_sum = sums[0]
        return sums[1:]

    def carried_sum(self, bucket: Bucket) -> Tensor:
        return bucket.carried_sum()

    def max_exp_avg_sq_sum(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        return _checked(bucket, ops.max_exp_avg_sq_sum, *_operands(bucket), *_scalars(bucket), grad_factor)[0]

    def last_exp_avg_sq_sum(self, bucket: Bucket) -> Tensor:
        sums: Tensor = ops.last_exp_avg_sq_sum(
            bucket.sums, bucket.steps, bucket.numels, bucket.groups, bucket.hyper.table
        )
        return sums

    def update(self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None) -> None:
        number = exp_avg_sq_mean, grad_factor, skip
        grad_sum = _written(bucket, ops.update_, *number, bucket.options.rounding_seed)
        if bucket.grad_sum is None:
            bucket.grad_sum = grad_sum[0]

    def step(
        self, bucket: Bucket, max_grad_norm: float | None, lagged: bool, loss_scale: LossScale
    ) -> tuple[Tensor, Tensor, Tensor]:
        numbers = max_grad_norm, lagged, *loss_scale, bucket.options.rounding_seed
        exp_avg_sq_mean, grad_norm, skip = _written(bucket, ops.step_, *numbers).unbind()
        return exp_avg_sq_mean, grad_norm, skip

    def exp_avg_sq_sums(self, exp_avg_sqs: list[Tensor]) -> Tensor:
        sums: Tensor = ops.exp_avg_sq_sums(exp_avg_sqs)
        return sums


class Operands:
    """Where a bucket's tensors are. Described anew only when one has changed, but for the gradients' addresses."""

    layouts: Tensor
    addresses: Tensor
    grad_addresses: Tensor

    def __init__(self) -> None:
        self._seen: list[object] = []
        self._seen_grads: list[int] = []
        self._grads: list[Tensor] | None = None  # of the step that has begun

    def refresh(self, bucket: Bucket) -> None:
        """Before whichever pass is the first of a step."""
        if self._grads is bucket.grads:
            return
        seen, grads = noticed(bucket)
        if self._seen != seen:
            self._seen = []
            kept = bucket.params, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.masters
            self.layouts = _checked(bucket, ops.layouts, *kept, bucket.grads)
            self.addresses = int64s(map(Tensor.data_ptr, chain.from_iterable(kept)))
            self._seen = seen
        if self._seen_grads != grads:
            self.grad_addresses, self._seen_grads = int64s(grads), grads
        self._grads = bucket.grads

    def end(self) -> None:
        """After an update: lets go of the gradients."""
        self._grads = None


def _operands(bucket: Bucket) -> tuple[Tensor, Tensor, Tensor]:
    if bucket.plan is None:
        bucket.plan = Operands()
    operands: Operands = bucket.plan
    operands.refresh(bucket)
    return operands.layouts, operands.addresses, operands.grad_addresses


def _scalars(bucket: Bucket) -> tuple[Tensor, ...]:
    return bucket.steps, bucket.groups, bucket.hyper.table


def _written(bucket: Bucket, op: Callable[..., Tensor], *numbers: object) -> Tensor:
    """Calls an operator that writes to the bucket's tensors."""
    read = *_operands(bucket), bucket.groups, bucket.tensor_ids, bucket.hyper.table
    result = _checked(bucket, op, bucket.sums, bucket.steps, *read, *numbers)
    # Writes through addresses are not counted, and autograd relies on the count to refuse a backward through weights
    # that have changed since the forward.
    torch.autograd.graph.increment_version(bucket.params)
    bucket.plan.end()
    return result


def _checked(bucket: Bucket, op: Callable[..., Tensor], *args: object) -> Tensor:
    """Calls an operator, which checks tensors faster than Python could, and explains why it refused one."""
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
        return _fake(args, len(args[0]) if numbers is None else numbers, torch.float64)

    return fake


def _fake_layouts(*lists: list[Tensor]) -> Tensor:
    """As long as csrc/operands.cpp makes them."""
    numbers = sum(2 + 2 * tensor.dim() for tensors in lists for tensor in tensors)
    return _fake(lists, 3 + 2 * len(lists[0]) + numbers, torch.int64)


def _fake(args: Iterable[Any], numbers: int, dtype: torch.dtype) -> Tensor:
    tensors = [value for arg in args for value in (arg if isinstance(arg, list) else [arg])]
    tensors = [value for value in tensors if isinstance(value, Tensor)]
    where = next((tensor for tensor in tensors if tensor.is_meta), tensors[0])
    result: Tensor = where.new_empty(numbers, dtype=dtype)
    return result


torch.library.register_fake("swd_fused::layouts")(_fake_layouts)
torch.library.register_fake("swd_fused::gradient_sums")(_fake_sums(3))
torch.library.register_fake("swd_fused::max_exp_avg_sq_sum")(_fake_sums(1))
torch.library.register_fake("swd_fused::last_exp_avg_sq_sum")(_fake_sums(2))
torch.library.register_fake("swd_fused::update_")(_fake_sums(1))
torch.library.register_fake("swd_fused::step_")(_fake_sums(3))
torch.library.register_fake("swd_fused::exp_avg_sq_sums")(_fake_sums())
torch.library.register_fake("swd_fused::advise_huge_pages")(lambda tensor: None)

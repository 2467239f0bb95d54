"""AdamS on the CPU: the C++ kernels of csrc/."""

from __future__ import annotations

from array import array
from ctypes import c_int64
from itertools import chain

import torch
from torch import Tensor

import swd_fused._C  # type: ignore[import-not-found]  # noqa: F401  registers the operators
from swd_fused.core.backend import Backend, Plan
from swd_fused.core.bucket import Bucket
from swd_fused.core.schedule import Gate
from swd_fused.devices.transfer import int64s
from swd_fused.state.eight_bit import BLOCK, BlockNumbers, rows_and_columns

ops = torch.ops.swd_fused
HUGE_PAGE = 2 << 20  # bytes
HEADER = 7  # numbers of a description before the gradients' addresses
STEP, UPDATE = ops.step_.default, ops.update_.default


class CpuPlan(Plan):
    """Describes a bucket's tensors to the kernels: addresses and layouts, see csrc/cpu/operands.h."""

    def __init__(self, bucket: Bucket) -> None:
        lists = bucket.params, *bucket.state, bucket.grads_or_params
        numbers = chain.from_iterable((each.first, *each.strides) for each in bucket.element_numbers)
        none = BlockNumbers(0, 0)
        blocks = chain.from_iterable(bucket.block_numbers.get(index, none) for index in range(len(bucket.params)))
        self.description: Tensor = ops.description(
            *lists,
            bucket.groups,
            bucket.tensor_ids,
            int64s(numbers) if bucket.element_numbers else None,  # the numbers of elements
            int64s(blocks) if bucket.coded else None,  # the numbers of blocks
        )
        addresses = c_int64 * len(bucket.params)  # written in each step
        start = self.description.data_ptr() + HEADER * self.description.itemsize
        self.grad_addresses = memoryview(addresses.from_address(start)).cast("B").cast("q")


class CpuBackend(Backend):
    is_capturable = False
    is_atomic = True
    counts_writes = False

    def description(self, device: torch.device) -> str:
        return "cpu"

    def new_moment(self, like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        if like.numel() * dtype.itemsize < HUGE_PAGE:
            return torch.zeros_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)
        moment = torch.empty_like(like, dtype=dtype, device=device, memory_format=torch.preserve_format)
        ops.advise_huge_pages(moment)
        return moment.zero_()

    def plan(self, bucket: Bucket) -> CpuPlan:
        return CpuPlan(bucket)

    def begin(self, bucket: Bucket) -> None:
        plan: CpuPlan = bucket.plan
        plan.grad_addresses[:] = array("q", bucket.grad_addresses)

    def pass1(self, bucket: Bucket) -> Tensor:
        sums: Tensor = ops.gradient_sums(bucket.plan.description, bucket.known_sums(), bucket.steps, bucket.hyper.table)
        return sums

    def pass1_amsgrad(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        scalars = bucket.steps, bucket.hyper.table, grad_factor
        sums: Tensor = ops.max_exp_avg_sq_sum(bucket.plan.description, *scalars)
        return sums[0]

    def last_sum(self, bucket: Bucket) -> Tensor:
        # Uses the function that `step` uses, so that both give the same bits.
        scalars = bucket.steps, bucket.hyper.table
        total_and_count: Tensor = ops.last_exp_avg_sq_sum(bucket.plan.description, bucket.known_sums(), *scalars)
        return total_and_count

    def pass2(
        self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None, sum_grads: bool
    ) -> Tensor:
        scalars = bucket.hyper.table, exp_avg_sq_mean, grad_factor, skip, bucket.options.seed
        sums: Tensor = UPDATE(bucket.known_sums(), bucket.steps, bucket.plan.description, *scalars)
        torch._C._increment_version(bucket.written)
        return sums[0]

    def step(self, bucket: Bucket, gate: Gate, lagged: bool) -> Tensor:
        sums = bucket.known_sums() if bucket.sums is None else bucket.sums
        max_grad_norm, *scaling, _ = gate
        scalars = bucket.hyper.table, max_grad_norm, lagged, *scaling, bucket.options.seed
        results: Tensor = STEP(sums, bucket.steps, bucket.plan.description, *scalars)
        torch._C._increment_version(bucket.written)  # what torch.autograd.graph.increment_version calls
        return results

    def exp_avg_sq_sums(self, bucket: Bucket) -> Tensor:
        columns = [0] * len(bucket.params) if bucket.coded else []
        for index in bucket.coded:
            columns[index] = _columns(bucket, index)
        sums: Tensor = ops.exp_avg_sq_sums(bucket.averaged, bucket.state.exp_avg_sq_scales, columns)
        return sums


def _columns(bucket: Bucket, index: int) -> int:
    """Returns the row length that csrc/cpu/operands.cpp uses: the whole tensor's if its blocks are consecutive."""
    shape = bucket.params[index].shape
    columns = rows_and_columns(shape)[1]
    is_one_row = columns % BLOCK == 0 and bucket.block_numbers[index].pitch == columns // BLOCK
    return shape.numel() if is_one_row else columns

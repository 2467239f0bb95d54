"""AdamS on CUDA and ROCm devices: one launch for all tensors that share a combination of dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from swd_fused.backends.triton.kernels import kernels
from swd_fused.backends.triton.kernels.tables import SEGMENT, SLOT, SUM
from swd_fused.backends.triton.launch import INTERPRETED, can_wait, refuses_cooperation
from swd_fused.backends.triton.plan import PASSES, Plan
from swd_fused.core.backend import Backend
from swd_fused.core.bucket import Bucket
from swd_fused.core.schedule import Gate


class TritonBackend(Backend):
    is_capturable = True
    is_atomic = True  # one launch
    counts_writes = False

    def description(self, device: torch.device) -> str:
        if INTERPRETED:
            return "triton (interpreted)"
        return "triton" if can_wait(device) else "triton (in two launches: no cooperative ones here)"

    def plan(self, bucket: Bucket) -> Plan:
        return Plan(bucket)

    def begin(self, bucket: Bucket) -> None:
        bucket.plan.begin(bucket)

    def pass1(self, bucket: Bucket) -> Tensor:
        plan: Plan = bucket.plan
        return plan.launch_all(kernels.gradient_sums_kernel, bucket, {}).sum(0)[SLOT.grad_sum : SLOT.max_sum]

    def pass1_amsgrad(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        plan: Plan = bucket.plan
        factor = plan.one if grad_factor is None else grad_factor
        totals = plan.launch_all(kernels.max_exp_avg_sq_sum_kernel, bucket, {"grad_factor": factor})
        return totals[:, SLOT.max_sum].sum()

    def weighted_sum(self, bucket: Bucket, weights: Tensor) -> Tensor:
        plan: Plan = bucket.plan
        parts = plan.parts_for(PASSES, bucket)
        sums = [part.sums[: part.n_segments, SUM.total] * weights[part.segments[:, SEGMENT.tensor]] for part in parts]
        return torch.cat(sums).sum()

    def last_sum(self, bucket: Bucket) -> Tensor:
        plan: Plan = bucket.plan
        last = torch.empty(plan.n_parts, 2, dtype=torch.float64, device=bucket.device)
        for part, row in zip(plan.parts_for(PASSES, bucket), last, strict=True):
            plan.find_last(bucket, part, row)
        return last.sum(0)

    def pass2(
        self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None, sum_grads: bool
    ) -> Tensor:
        plan: Plan = bucket.plan
        read = {
            "limits": plan.limits(bucket),
            "exp_avg_sq_mean": exp_avg_sq_mean,
            "grad_factor": plan.one if grad_factor is None else grad_factor,
            "skip": plan.zero if skip is None else skip,
        }
        totals = plan.launch_all(kernels.update_kernel, bucket, read, sum_grads)
        advance = bucket.has_grad.to(torch.float32)
        bucket.steps += advance if skip is None else advance * (1 - skip)
        plan.last = None
        plan.end(bucket)
        return totals[:, SLOT.grad_sum].sum()

    def step(self, bucket: Bucket, gate: Gate, lagged: bool) -> Tensor | None:
        plan: Plan = bucket.plan
        if plan.n_parts > 1 or not (lagged or can_wait(bucket.device)):
            return None
        kernel = kernels.lagged_step_kernel if lagged else kernels.exact_step_kernel
        (part,) = plan.parts_for(kernel, bucket)
        results = torch.empty(3, dtype=torch.float64, device=bucket.device)
        given = {
            "results": results,
            "limits": plan.limits(bucket, gate.max_grad_norm),
            "grad_scale": plan.no_scale if gate.grad_scale is None else gate.grad_scale,
            "found_inf": plan.no_inf if gate.found_inf is None else gate.found_inf,
        }
        if lagged:
            corrections = [(row.beta2, row.corrects_bias) for row in bucket.hyper.rows]
            if plan.last is None or plan.corrections_of_last != corrections:
                plan.corrections_of_last = corrections
                plan.last = torch.empty(2, dtype=torch.float64, device=bucket.device)
                plan.find_last(bucket, part, plan.last)
            given["last"] = plan.last
        try:
            plan.launch(kernel, bucket, part, given)
        except RuntimeError as error:
            if lagged or not refuses_cooperation(error, bucket.device):
                raise
            return None
        plan.end(bucket)
        return results

    def exp_avg_sq_sums(self, bucket: Bucket) -> Tensor:
        plan: Plan = bucket.plan
        return plan.sums_by_tensor(bucket)

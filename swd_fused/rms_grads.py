"""The rms gradient of each parameter, from the sums that the last step has left."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from swd_fused.core.snapshot import Inputs, State
from swd_fused.core.step import Stepper
from swd_fused.core.values import Groups
from swd_fused.devices.transfer import scalar_dtype
from swd_fused.distributed.collective import Collective
from swd_fused.distributed.sharding import is_distributed, local_tensor, sharding_of
from swd_fused.state.storage import as_real, decoded_moment, has_moments


def sums_of_last_step(stepper: Stepper, groups: Groups, state: State) -> dict[int, Tensor]:
    """Returns the sum of v of each parameter, by its id. Empty if the last step's sums do not fit the present state."""
    snapshot, values = stepper.latest, stepper.values
    if values is None or not values.hold(groups):
        values = stepper.new_values(groups)
    params = [param for group in groups for param in group["params"]]
    inputs = Inputs(stepper.options_of_tensors, stepper.sharded_over, groups, values.kinds, state, params, [])
    if snapshot is None or snapshot.left_is_stale(inputs):
        return {}
    sums: dict[int, Tensor] = {}
    for bucket in snapshot.buckets:
        if bucket.copies_steps:
            bucket.begin()
        # Not `known_sums`, which would keep these sums in the bucket: Triton's backend has another form for them.
        by_tensor = bucket.backend.exp_avg_sq_sums(bucket) if bucket.sums is None else bucket.sums
        sums.update(zip((id(params[number]) for number in bucket.numbers), by_tensor.unbind(), strict=True))
    return sums


def rms_by_param(stepper: Stepper, groups: Groups, state: State) -> dict[str | int, float]:
    """Returns for each parameter that has taken a step the root of its mean of v^. Waits for the device."""
    pairs = [(param, group) for group in groups for param in group["params"]]
    device = pairs[0][0].device
    rows = torch.zeros(len(pairs), 2, dtype=scalar_dtype(device), device=device)  # the sum of v^, and its elements
    known = sums_of_last_step(stepper, groups, state)
    for row, (param, group) in zip(rows, pairs, strict=True):
        entry = state.get(param) or {}
        if has_moments(entry):
            total = known.get(id(param))
            if total is None:
                is_maximum = group["amsgrad"] and "max_exp_avg_sq" in entry
                v = as_real(decoded_moment(entry, "max_exp_avg_sq" if is_maximum else "exp_avg_sq"))
                total = v.sum(dtype=scalar_dtype(v.device))
            step = torch.as_tensor(entry["step"]).to(rows)
            bias_correction2 = 1 - group["bias_correction"] * float(group["betas"][1]) ** step
            numel = torch.full_like(step, as_real(local_tensor(param)).numel())
            v_hat = torch.stack([total.to(rows) / bias_correction2, numel])
            row.copy_(torch.where(step > 0, v_hat, 0.0))
    if is_distributed():
        # Over DTensors only: ranks of a process group may have shards of plain tensors, or other ones.
        shardings = [sharding_of(param, None) for param, _ in pairs]
        parts = {sharding: torch.zeros_like(rows) for sharding in shardings}
        for number, sharding in enumerate(shardings):
            parts[sharding][number] = rows[number]
        sums = [(sharding, part.flatten()) for sharding, part in parts.items()]
        rows = Collective(parts, [], device).total(sums, rows.numel()).view_as(rows)
    means = [total / numel if numel else None for total, numel in rows.tolist()]
    names = chain.from_iterable(group.get("param_names") or [None] * len(group["params"]) for group in groups)
    return {
        number if name is None else name: mean**0.5
        for number, (name, mean) in enumerate(zip(names, means, strict=True))
        if mean is not None
    }

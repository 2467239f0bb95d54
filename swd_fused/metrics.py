"""The numbers that users log, the rms gradient of each parameter, and the lines of `repr`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from swd_fused import backends
from swd_fused.checks import Check, is_whole
from swd_fused.clipping import ClippedSteps
from swd_fused.core.ranks import over_of
from swd_fused.core.snapshot import Inputs, State
from swd_fused.core.stepper import Stepper
from swd_fused.core.values import Groups
from swd_fused.decay.kinds import effective_decay
from swd_fused.devices.transfer import scalar_dtype
from swd_fused.distributed.collective import Collective
from swd_fused.distributed.sharding import ShardedOver, Sharding, is_distributed, local_tensor, sharding_of
from swd_fused.options import Options
from swd_fused.state.moments import decoded_moment, has_moments
from swd_fused.state.operands import as_real

EVERY = Check(lambda steps: is_whole(steps, 1), "a whole number > 0, or None not to log them").or_none()  # of callbacks


def effective_weight_decay(groups: Groups, exp_avg_sq_mean: Tensor) -> list[float]:
    """Returns for each group the `weight_decay` with which AdamW would shrink the weights as much. Waits for the
    device."""
    mean = float(exp_avg_sq_mean)
    return [effective_decay(group, mean, max(0.0, float(group["lr"]))) for group in groups]


def metrics(stepper: Stepper, groups: Groups, clipped: ClippedSteps) -> dict[str, float]:
    """Returns what is worth logging of the last step. Waits for the device."""
    exp_avg_sq_mean, grad_norm = stepper.last[0], stepper.last[1]
    names = [group.get("name", index) for index, group in enumerate(groups)]
    decays = list(zip(names, effective_weight_decay(groups, exp_avg_sq_mean), strict=True))
    shares = {name: float(group["lr"]) * decay for (name, decay), group in zip(decays, groups, strict=True)}
    return {
        "grad_norm": float(grad_norm),
        "rms_grad": float(exp_avg_sq_mean.sqrt()),
        **{f"effective_weight_decay/{name}": decay for name, decay in decays},
        **{f"decay_timescale/{name}": 1 / share for name, share in shares.items() if share != 0},
        **({} if stepper.options.max_grad_norm is None else {"clipped_share": clipped.share()}),
        "skipped_steps": float(stepper.skipped_steps),
    }


def options_in_use(stepper: Stepper, params: Sequence[Tensor]) -> str:
    """Returns a line for each option that says how steps are taken, and for each that was asked for."""
    options = stepper.options
    chosen = {backends.describe(param, options): None for param in params}
    shown: dict[str, object] = {
        "backend": " and ".join(chosen),
        "schedule": options.schedule,
        "max_grad_norm": options.max_grad_norm,
    }
    asked_for: Mapping[str, object] = dict(options._asdict().items() - Options()._asdict().items())
    shown.update((name, value) for name, value in sorted(asked_for.items()) if name not in shown)
    if stepper.sharded_over is not None:
        shown["process_group"] = str(stepper.sharded_over)
    return "\n".join(f"{name}: {value}" for name, value in shown.items())


# --- The rms gradient of each parameter, from the sums of second moments that the last step has left


def rms_by_param(stepper: Stepper, groups: Groups, state: State) -> dict[str | int, float]:
    """Returns the root of the mean of v^ of each parameter that has taken a step. Waits for the device."""
    pairs = [(param, group) for group in groups for param in group["params"]]
    device = pairs[0][0].device
    rows = torch.zeros(len(pairs), 2, dtype=scalar_dtype(device), device=device)  # the sum of v^, and its elements
    with_moments = [i for i, (param, _) in enumerate(pairs) if has_moments(state.get(param) or {})]
    if with_moments:
        known = _sums_of_last_step(stepper, groups, state)
        own = [(param, group, state[param]) for param, group in map(pairs.__getitem__, with_moments)]
        sums = [known.get(id(param)) for param, _, _ in own]
        totals = [
            _stored_sum(entry, group) if total is None else total
            for (_, group, entry), total in zip(own, sums, strict=True)
        ]
        steps = [torch.as_tensor(entry["step"]) for _, _, entry in own]
        constants = [
            (float(group["betas"][1]), group["bias_correction"], as_real(local_tensor(param)).numel())
            for param, group, _ in own
        ]
        total, step = (torch.stack([value.to(rows) for value in values]) for values in (totals, steps))
        beta2, corrects_bias, numel = torch.tensor(constants, dtype=rows.dtype).to(device).unbind(1)
        v_hat = torch.stack([total / (1 - corrects_bias * beta2**step), numel], dim=1)
        rows[with_moments] = torch.where((step > 0)[:, None], v_hat, 0.0)
    if is_distributed():
        shardings = [_shards_of(param, over_of(group, stepper.sharded_over)) for param, group in pairs]
        rows = Collective(shardings, [], device).each(rows, shardings)
    means = [total / numel if numel else None for total, numel in rows.tolist()]
    return {name: mean**0.5 for name, mean in zip(_names(groups), means, strict=True) if mean is not None}


def _names(groups: Groups) -> list[str | int]:
    names = chain.from_iterable(group.get("param_names") or [None] * len(group["params"]) for group in groups)
    return [number if name is None else name for number, name in enumerate(names)]


def _sums_of_last_step(stepper: Stepper, groups: Groups, state: State) -> dict[int, Tensor]:
    """Returns the sums of v by the ids of parameters; none if the last step's are not those of the present state."""
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
        by_tensor = bucket.backend.exp_avg_sq_sums(bucket) if bucket.sums is None else bucket.sums
        sums.update(zip((id(params[number]) for number in bucket.numbers), by_tensor.unbind(), strict=True))
    return sums


def _stored_sum(entry: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    is_maximum = group["amsgrad"] and "max_exp_avg_sq" in entry
    moment = as_real(decoded_moment(entry, "max_exp_avg_sq" if is_maximum else "exp_avg_sq"))
    return moment.sum(dtype=scalar_dtype(moment.device))


def _shards_of(param: Tensor, over: ShardedOver | None) -> Sharding:
    """Returns the process groups that have the other shards of a DTensor. Plain tensors do not say whether the ranks of
    a process group have shards of them or other parameters."""
    return tuple(group for group in sharding_of(param, over) if over is None or group is not over.group)

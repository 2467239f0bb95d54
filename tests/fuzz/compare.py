"""How far a step may be from the definition: bounds that follow from the dtypes, element by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.definition import AdamS, Array, Group
from tests.fuzz import coded
from tests.fuzz.layouts import as_real, to_wide
from tests.masters_definition import master_of, nearest

# Roundings that one result may have behind it. The kernels have up to six, and products of factors among them.
ROUNDINGS = 8

# Of moments in 8 bits, on top: a product with the scale, which for a second moment is squared.
DECODING = 3

# Sums are made in several lanes, in each of which one element is added after the other: in C++ up to a block's end, in
# torch up to the tensor's. If all elements are equal, as in an expanded gradient, so are the roundings.
CPP_LANES, TORCH_LANES = 16, 4
BLOCK = 4096


class DifferenceError(AssertionError):
    """What a failing case prints."""


class Start(NamedTuple):
    """Of one parameter, before the step: what it is computed from."""

    param: Array
    exp_avg: Array
    exp_avg_sq: Array
    ema_param: Array


def unit(dtype: torch.dtype) -> float:
    """Half a unit in the last place of 1."""
    return torch.finfo(dtype).eps / 2


def quantum(dtype: torch.dtype) -> float:
    """The smallest positive number."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps


def check_close(what: str, got: Tensor, wanted: Array, bound: Array) -> None:
    """`bound` is that of the computation; what storing in `got`'s dtype rounds comes on top."""
    dtype = as_real(got).dtype
    values = to_wide(got)
    limit = np.longdouble(torch.finfo(dtype).max)
    wanted = np.where(abs(wanted) > limit * (1 + unit(dtype)), np.sign(wanted) * np.inf, wanted)
    finite = np.isfinite(wanted)
    if np.isfinite(values[~finite]).any():  # infinity or NaN depends on how a sum is written
        raise DifferenceError(f"{what}: got {values[~finite][:3]} where {wanted[~finite][:3]} is right")
    allowed = bound + 1.001 * unit(dtype) * abs(wanted) + quantum(dtype)
    far = np.zeros(values.shape, dtype=bool)
    far[finite] = ~(abs(values - wanted)[finite] <= allowed[finite])  # a NaN is far from all
    if far.any():
        worst = tuple(int(i[0]) for i in np.nonzero(far))
        raise DifferenceError(
            f"{what}: {int(far.sum())} of {far.size} elements differ, the first at {worst}: got "
            f"{values[worst]:.9g}, the definition gives {wanted[worst]:.9g} +- {allowed[worst]:.2g}"
        )


def check_coded(what: str, key: str, state: Mapping[str, Any], wanted: Array, bound: Array, noise: Array) -> None:
    """Scales and codes of a moment that is rounded by random bits, see coded.py."""
    codec = coded.CODECS[key]
    codes, scales = state[codec.codes], state[codec.scales]
    if codes.dtype != codec.dtype or codes.shape != wanted.shape:
        raise DifferenceError(f"{what} has codes of {codes.dtype} and {tuple(codes.shape)}")
    of_blocks, of_elements = to_wide(scales).reshape(coded.in_blocks(wanted).shape[:2]), to_wide(codes)
    lost = ~(abs(coded.in_blocks(wanted)) <= torch.finfo(torch.float32).max).all(-1)  # with all of their elements
    if np.isfinite(of_blocks[lost]).any():
        raise DifferenceError(f"{what}: a block has the scale {of_blocks[lost][0]:.9g}, but not all of it is finite")
    kept = ~coded.for_elements(lost, wanted.shape)
    interval = coded.Interval.of(key, np.where(kept, wanted, 0), np.where(kept, bound, 0))
    of_blocks = np.where(lost, 0, of_blocks)
    _check_within(f"{what}: scales", of_blocks, *interval.scales(key), ~lost)
    _check_within(f"{what}: codes", of_elements, *interval.codes(key, of_blocks, noise), kept)


def _check_within(what: str, got: Array, least: Array, most: Array, judged: Array) -> None:
    far = ~((least <= got) & (got <= most)) & judged
    if far.any():
        first = tuple(int(i[0]) for i in np.nonzero(far))
        raise DifferenceError(
            f"{what}: {int(far.sum())} of {far.size} differ, the first at {first}: got {got[first]:.9g}, the "
            f"definition gives {least[first]:.9g} to {most[first]:.9g}"
        )


def check_number(what: str, got: Tensor, wanted: Array, relative: float) -> None:
    value = np.longdouble(float(got))
    both_infinite = not np.isfinite(wanted) and not np.isfinite(value)
    if not both_infinite and not abs(value - wanted) <= relative * abs(wanted):
        raise DifferenceError(f"{what}: got {float(value):.9g}, the definition gives {float(wanted):.9g}")


def sum_tolerance(params: Sequence[Tensor], backend: str) -> float:
    """Of the norm, relative; that of the mean is three times this, since a clip factor enters it by its square."""
    exact = all(param.dtype.to_real() == torch.float64 for param in params)
    numel = max(as_real(param).numel() for param in params)
    roundings = ROUNDINGS + (numel / TORCH_LANES if backend == "torch" else min(numel, BLOCK) / CPP_LANES)
    return roundings * unit(torch.float64 if exact else torch.float32)


def bias_correction_error(group: Group, steps: int) -> float:
    """Relative: 1 - beta^t is computed in float64, and most of it is cancelled while t is small."""
    return sum(ROUNDINGS * unit(torch.float64) / (1 - beta**steps) for beta in group.betas)


def check_stepped(
    judge: AdamS,
    i: int,
    group: Group,
    start: Start,
    param: Tensor,
    state: dict[str, Any],
    tolerance: float,
    noises: dict[str, Array] | None,
) -> None:
    """Parameter `i`, its master and its moments after a step that `judge` has taken too. `noises` are those that its
    moments are rounded by if they should have 8 bits."""
    name = f"parameter {i} ({tuple(param.shape)}, {param.dtype})"
    if float(state["step"]) != judge.steps[i]:
        raise DifferenceError(f"{name}: step is {float(state['step'])}, wanted {judge.steps[i]}")
    beta1, beta2 = group.betas
    size = judge.grad_size[i]
    computed = torch.promote_types(param.dtype.to_real(), torch.float32)
    u = (ROUNDINGS + DECODING * (noises is not None)) * unit(computed)
    bias_correction1, bias_correction2 = (judge.bias_correction(group, moment, i) for moment in (0, 1))
    cancelled = bias_correction_error(group, judge.steps[i])
    factor = 0.0 if judge.max_grad_norm is None else tolerance  # of the norm, by which gradients are clipped
    exp_avg_bound = u * abs(start.exp_avg) + (u + factor) * (1 - beta1) * size
    exp_avg_sq_bound = u * beta2 * abs(start.exp_avg_sq) + (u + 2 * factor) * (1 - beta2) * size**2
    exp_avg_sq_bound = exp_avg_sq_bound + (1 if noises is None else 2) * quantum(computed)
    for key, wanted, bound in (
        ("exp_avg", judge.exp_avg[i], exp_avg_bound),
        ("exp_avg_sq", judge.exp_avg_sq[i], exp_avg_sq_bound),
    ):
        if coded.is_coded(state, key) != (noises is not None):
            raise DifferenceError(
                f"{name}: has a state of {list(state)}, which should {'not ' * (noises is None)}be codes"
            )
        if noises is None:
            check_close(f"{name}: {key}", state[key], wanted, bound)
        else:
            check_coded(f"{name}: {key}", key, state, wanted, bound, noises[key])
    if group.amsgrad:
        maxima = judge.max_exp_avg_sq[i]
        bound = exp_avg_sq_bound + unit(computed) * maxima  # loaded in float64, they are read in float32
        check_close(f"{name}: max_exp_avg_sq", state["max_exp_avg_sq"], maxima, bound)
    second = judge.max_exp_avg_sq[i] if group.amsgrad else judge.exp_avg_sq[i]
    root = np.sqrt(second)
    denom = root / np.sqrt(bias_correction2) + group.eps
    root_bound = np.where(
        second > exp_avg_sq_bound, exp_avg_sq_bound / np.maximum(root, 1e-4000), exp_avg_sq_bound**0.5
    )
    ratio = abs(judge.exp_avg[i]) / bias_correction1 / denom
    ratio_bound = exp_avg_bound / bias_correction1 / denom
    ratio_bound = ratio_bound + ratio * (root_bound / np.sqrt(bias_correction2) / denom + u + cancelled)
    bound = group.lr * ratio_bound + group.max_decay * 2 * tolerance * abs(start.param)
    bound = bound + u * (abs(start.param) + group.lr * ratio)
    if group.cautious_decay:  # an update that is zero but for rounding may have either sign
        undecided = abs(judge.exp_avg[i]) <= exp_avg_bound + quantum(computed)
        bound = bound + undecided * judge.shrink(group, judge.exp_avg_sq_mean) * abs(start.param)
    if group.ema_decay is not None:
        weight = 1 - judge.ema_decay(group, judge.steps[i])
        average_bound = weight * bound + u * (abs(start.ema_param) + abs(judge.params[i]))
        check_close(f"{name}: its average", state["ema_param"], judge.ema_param[i], average_bound)
    master = master_of(param, state)
    if "master_param" not in state and "master_remainder" not in state:
        check_close(name, param, judge.params[i], bound)
        return
    check_close(f"{name}: its master", master, judge.params[i], bound)
    if not torch.equal(nearest(master, param.dtype).nan_to_num(), param.detach().nan_to_num()):
        raise DifferenceError(f"{name}: is not its master rounded")

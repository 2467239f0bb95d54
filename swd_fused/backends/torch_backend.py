"""AdamS in plain PyTorch, on any device: the paper's algorithm 2, in the paper's order.

    the paper                                      here
    g  = gradient of the loss                      grad, times grad_factor (the inverse loss scale, and clipping)
    m  = b1 m + (1 - b1) g                         exp_avg
    v  = b2 v + (1 - b2) g^2                       exp_avg_sq
    m^ = m / (1 - b1^t)                            bias_correction1 is 1 - b1^t
    v^ = v / (1 - b2^t)                            bias_correction2 is 1 - b2^t
    v_ = mean(v^)                                  exp_avg_sq_mean, over all tensors, from the sums of `pass1`
    p  = p - lr / (sqrt(v^) + eps) m^              param, in `update_`
           - lr / (sqrt(v_) + eps) lambda p        decay_factor, by which p is multiplied;
                                                   if cautious, where the update has the sign of p
    e  = e + (1 - d) (p - e)                       ema_param, if asked for; not in the paper

The mean must be known before the first tensor is written. `pass1` finds it without computing v, except for amsgrad: the
sum of v over a tensor is b2 times the sum that `pass2` of the step before has left, plus (1 - b2) times that of g^2.

Tensors are updated one by one, and large ones piece by piece, so that no temporary is as large as the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused.core.backend import Backend, Plan
from swd_fused.core.bucket import Bucket
from swd_fused.core.values import HyperRow
from swd_fused.decay.kinds import decay_factor
from swd_fused.devices.transfer import scalar_dtype
from swd_fused.state import eight_bit
from swd_fused.state.rounding import rounding_keys, stochastically_rounded
from swd_fused.state.weights import joined, split

# The number of elements in a piece. With this one, temporaries on the CPU need no fresh pages, which for a large tensor
# cost more than the whole update. Smaller pieces lost more to the operators' own overhead (2^17: 1.4 times as long).
CPU_PIECE = 1 << 20
DEVICE_PIECE = 1 << 26

Cut = tuple[slice, ...]


class TorchBackend(Backend):
    is_capturable = False
    is_atomic = False
    counts_writes = True

    def description(self, device: torch.device) -> str:
        return "torch"

    def plan(self, bucket: Bucket) -> Plan:
        return Plan()  # empty: operations take tensors as they are

    def begin(self, bucket: Bucket) -> None:
        """Does nothing: operations take gradients as they are."""

    def pass1(self, bucket: Bucket) -> Tensor:
        beta2 = bucket.hyper.column("beta2")[bucket.groups]
        bias_correction2 = bucket.hyper.bias_correction("beta2", bucket.groups, bucket.steps + 1)
        grad_sq = sums_of_squares(bucket.grads, bucket.device)
        carried = torch.where(bucket.has_grad, beta2 * bucket.known_sums() / bias_correction2, 0.0)
        fresh = (1 - beta2) * grad_sq / bias_correction2
        return torch.stack([grad_sq, carried, fresh]).sum(1)

    def pass1_amsgrad(self, bucket: Bucket, grad_factor: Tensor | None) -> Tensor:
        sums = torch.zeros_like(bucket.known_sums())
        for index, grad in present_grads(bucket):
            row = bucket.hyper.rows[bucket.group_indices[index]]
            for piece in pieces_of(bucket, index):
                exp_avg_sq = piece.exp_avg_sq().clone()
                advance_exp_avg_sq_(exp_avg_sq, scaled(piece.of(grad), grad_factor, row), row)
                sums[index] += sum_of(torch.maximum(exp_avg_sq, piece.averaged()))
        return (sums / bucket.hyper.bias_correction("beta2", bucket.groups, bucket.steps + 1)).sum()

    def last_sum(self, bucket: Bucket) -> Tensor:
        v_hats = bucket.known_sums() / bucket.hyper.bias_correction("beta2", bucket.groups, bucket.steps)
        return torch.where(bucket.steps > 0, torch.stack([v_hats, bucket.numels.to(v_hats)]), 0.0).sum(1)

    def pass2(
        self, bucket: Bucket, exp_avg_sq_mean: Tensor, grad_factor: Tensor | None, skip: Tensor | None, sum_grads: bool
    ) -> Tensor:
        grad_sq = sums_of_squares(bucket.grads, bucket.device).sum() if sum_grads else exp_avg_sq_mean
        if skip is not None and bool(skip):  # plain operations must read `skip`, as GradScaler does if not fused
            return grad_sq
        sums = bucket.known_sums()
        bucket.steps += bucket.has_grad
        hyper, decay_factors = bucket.hyper, decay_factor(exp_avg_sq_mean, bucket.hyper.column)
        keys = rounding_keys(bucket.options.seed, bucket.tensor_ids, bucket.steps)
        # Bias is corrected in scalars: lr m^ / (sqrt(v^) + eps) is (lr sqrt(c2) / c1) m / (sqrt(v) + sqrt(c2) eps).
        bias_correction1 = hyper.bias_correction("beta1", bucket.groups, bucket.steps)
        root = hyper.bias_correction("beta2", bucket.groups, bucket.steps).sqrt()
        step_sizes = -(hyper.column("lr")[bucket.groups] * root / bias_correction1)
        epss = hyper.column("eps")[bucket.groups] * root
        ema_weights = hyper.ema_weights(bucket.groups, bucket.steps) if bucket.state.ema_params else epss
        for index, grad in present_grads(bucket):
            group = bucket.group_indices[index]
            row, factor = hyper.rows[group], decay_factors[group]
            scalars = Scalars(row, factor, step_sizes[index], epss[index], ema_weights[index])
            sums[index].zero_()  # `= 0.0` would copy a number from the host, and wait for it
            for piece in pieces_of(bucket, index):
                operands = piece.operands()
                update_(operands, scaled(piece.of(grad), grad_factor, scalars.row), scalars)
                piece.store(operands, keys[index])
                sums[index] += sum_of(piece.averaged())
        return grad_sq

    def exp_avg_sq_sums(self, bucket: Bucket) -> Tensor:
        sums = torch.zeros(len(bucket.params), dtype=scalar_dtype(bucket.device), device=bucket.device)
        for index in range(len(bucket.params)):
            for piece in pieces_of(bucket, index):
                sums[index] += sum_of(piece.averaged())
        return sums


# --- The update of an element


class Operands(NamedTuple):
    """Holds the tensors of an update, in the second moment's dtype: the state's own tensors, or copies."""

    param: Tensor  # or its master
    exp_avg: Tensor
    exp_avg_sq: Tensor
    maximum: Tensor | None  # with amsgrad
    average: Tensor | None  # of the parameter or its master, if asked for


class Scalars(NamedTuple):
    """Holds the scalars of an update. All but `row`, the parameter group's, are on the device."""

    row: HyperRow
    decay_factor: Tensor
    step_size: Tensor
    eps: Tensor
    ema_weight: Tensor


def update_(tensors: Operands, grad: Tensor, scalars: Scalars) -> None:
    """Updates one tensor, or a piece of it, in place."""
    param, exp_avg, exp_avg_sq, maximum, average = tensors
    row, decay_factor, step_size, eps, ema_weight = scalars
    if row.l2:
        grad = grad.add(param, alpha=row.l2)
    grad = grad.to(exp_avg_sq.dtype)
    exp_avg.lerp_(grad, 1 - row.beta1)
    advance_exp_avg_sq_(exp_avg_sq, grad, row)
    if maximum is not None:
        torch.maximum(maximum, exp_avg_sq, out=maximum)
    denom = (exp_avg_sq if maximum is None else maximum).sqrt().add_(eps)
    param.mul_(cautious_factor(decay_factor, param, exp_avg) if row.cautious else decay_factor)
    param.addcmul_(exp_avg / denom, step_size)
    if average is not None:
        average.addcmul_(param - average, ema_weight)


def advance_exp_avg_sq_(exp_avg_sq: Tensor, grad: Tensor, row: HyperRow) -> None:
    exp_avg_sq.mul_(row.beta2).addcmul_(grad, grad, value=1 - row.beta2)


def cautious_factor(decay_factor: Tensor, param: Tensor, exp_avg: Tensor) -> Tensor:
    """Returns the factor of a parameter that decays only where the update does not point away from zero.

    The update subtracts a number of exp_avg's sign. Signs are compared, since a product of small numbers may be zero.
    """
    agrees = torch.where(param < 0, -exp_avg, exp_avg) >= 0
    return torch.where(agrees, decay_factor.to(param.dtype), 1.0)


def scaled(grad: Tensor, grad_factor: Tensor | None, row: HyperRow) -> Tensor:
    """Returns a gradient as in the paper: unscaled, clipped, and of a function that is minimized."""
    grad = widened(grad)
    if grad_factor is not None:
        return grad * (grad_factor * row.sign)
    return -grad if row.sign < 0 else grad


# --- Pieces of tensors, and their storage


def present_grads(bucket: Bucket) -> Iterator[tuple[int, Tensor]]:
    return ((index, grad) for index, grad in enumerate(bucket.grads) if grad is not None)


class Piece:
    """A part of a parameter and of its state, as views of the stored tensors."""

    def __init__(self, bucket: Bucket, index: int, cut: Cut, blocks: slice) -> None:
        self._bucket, self._index, self._cut, self._blocks, state = bucket, index, cut, blocks, bucket.state
        self._param, self._master = self.of(bucket.params[index]), self._part_of(state.masters)
        self._exp_avg, self._exp_avg_sq = self.of(state.exp_avgs[index]), self.of(state.exp_avg_sqs[index])
        self._maximum, self._average = self._part_of(state.max_exp_avg_sqs), self._part_of(state.ema_params)
        self._has_codes = index in bucket.block_numbers
        if self._has_codes:
            self._exp_avg_scales = state.exp_avg_scales[index][blocks]
            self._exp_avg_sq_scales = state.exp_avg_sq_scales[index][blocks]

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self._cut]

    def _part_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        return self.of(tensors[self._index]) if tensors else None

    def exp_avg_sq(self) -> Tensor:
        """Returns the second moment in at least 32 bits."""
        if self._has_codes:
            return eight_bit.decoded("exp_avg_sq", self._exp_avg_sq, self._exp_avg_sq_scales)
        return widened(self._exp_avg_sq)

    def averaged(self) -> Tensor:
        """Returns the second moment, or its maximum with amsgrad: the schedule follows from its mean."""
        return self.exp_avg_sq() if self._maximum is None else widened(self._maximum)

    def operands(self) -> Operands:
        exp_avg, exp_avg_sq = self._exp_avg, self.exp_avg_sq()
        if self._has_codes:
            exp_avg = eight_bit.decoded("exp_avg", exp_avg, self._exp_avg_scales)
        weight = self._param if self._master is None else self._master
        if weight.dtype == torch.int16:
            weight = joined(self._param, weight)
        optional = (None if each is None else each.to(exp_avg_sq.dtype) for each in (self._maximum, self._average))
        return Operands(weight.to(exp_avg_sq.dtype), exp_avg.to(exp_avg_sq.dtype), exp_avg_sq, *optional)

    def store(self, operands: Operands, rounding_key: Tensor) -> None:
        """Stores the results of an update. Each is rounded once, to the form in which it is stored."""
        weight, exp_avg, exp_avg_sq, maximum, average = operands
        if self._has_codes:
            self._encode(exp_avg, exp_avg_sq, rounding_key)
        else:
            keep(self._exp_avg, exp_avg)
            keep(self._exp_avg_sq, exp_avg_sq)
        keep(self._maximum, maximum)
        keep(self._average, average)
        if self._master is not None and self._master.dtype == torch.int16:
            weight, remainder = split(weight.to(torch.float32))
            keep(self._master, remainder)
        elif self._master is not None:
            keep(self._master, weight)
        elif self._bucket.options.stochastic_rounding and self._param.dtype == torch.bfloat16:
            numbers = self._bucket.element_numbers[self._index].within(self._cut)
            weight = stochastically_rounded(weight, rounding_key, numbers)
        keep(self._param, weight)

    def _encode(self, exp_avg: Tensor, exp_avg_sq: Tensor, rounding_key: Tensor) -> None:
        """Stores both moments in 8 bits, stochastically rounded."""
        numbers, begin = self._bucket.block_numbers[self._index], self._blocks.start
        length = len(self._exp_avg_scales)
        if self._param.dim() > 1:
            blocks = numbers.of_rows(begin, begin + length, self._exp_avg_scales.shape[1], self._param.device)
        else:
            blocks = numbers._replace(first=numbers.first + begin).of_rows(0, 1, length, self._param.device)
        noise, root_noise = eight_bit.noise_of_blocks(eight_bit.moment_keys(rounding_key), blocks)
        codes, scales = eight_bit.encoded("exp_avg", exp_avg, noise)
        keep(self._exp_avg, codes)
        keep(self._exp_avg_scales, scales)
        codes, scales = eight_bit.encoded("exp_avg_sq", exp_avg_sq, root_noise)
        keep(self._exp_avg_sq, codes)
        keep(self._exp_avg_sq_scales, scales)


def pieces_of(bucket: Bucket, index: int) -> Iterator[Piece]:
    cuts = cuts_of(bucket.params[index], index in bucket.block_numbers)
    return (Piece(bucket, index, cut, blocks) for cut, blocks in cuts)


def cuts_of(tensor: Tensor, has_codes: bool = False) -> Iterator[tuple[Cut, slice]]:
    """Cuts a tensor along its longest dimension, or between blocks of codes. Yields slices of it and of its scales."""
    shape, limit = tuple(tensor.shape), CPU_PIECE if tensor.device.type == "cpu" else DEVICE_PIECE
    dim = 0 if has_codes or not shape else shape.index(max(shape))
    rows_and_length = (shape[dim], tensor.numel() // max(1, shape[dim])) if len(shape) > 1 else shape
    for rows, blocks in eight_bit.pieces(rows_and_length, limit):
        yield (*(slice(None),) * dim, rows) if shape else (), blocks


def widened(tensor: Tensor) -> Tensor:
    """Returns a tensor in at least 32 bits: the same tensor, if it has them."""
    return tensor.float() if tensor.dtype.itemsize < torch.float32.itemsize else tensor


def keep(stored: Tensor | None, value: Tensor | None) -> None:
    """Stores a value, if there is one, unless it is the stored tensor itself."""
    if stored is not None and value is not None and stored is not value:
        stored.copy_(value)


# --- Sums, in float64 where the device has it


def sum_of(values: Tensor) -> Tensor:
    return values.sum(dtype=scalar_dtype(values.device))


def sums_of_squares(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the sum of each tensor's squared elements, 0 for a missing tensor.

    In float64 no square is out of range, and equal numbers are added as exactly as others. torch's own norm of 2^20
    equal numbers in float32 is off by 4e-4.
    """
    dtype = scalar_dtype(device)
    sums = torch.zeros(len(tensors), dtype=dtype, device=device)
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            for cut, _ in cuts_of(tensor):
                sums[index] += tensor[cut].to(dtype, copy=True).square_().sum()
    return sums

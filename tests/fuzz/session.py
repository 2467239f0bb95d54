"""A case as a training run: what happens between steps, and what must hold after each."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.outliers import KEY
from tests.definition import AdamS, Array, Group
from tests.eight_bit_definition import is_coded
from tests.fuzz import coded
from tests.fuzz.cases import MEASURED_STEPS, Case, StepSpec, TensorSpec
from tests.fuzz.compare import (
    DifferenceError,
    Start,
    bias_correction_error,
    check_number,
    check_stepped,
    sum_tolerance,
    unit,
)
from tests.fuzz.events import happen
from tests.fuzz.layouts import as_real, exact_copy, laid_out, same_bits, to_wide
from tests.fuzz.trained import Snapshot, Trained, same_state, weights
from tests.outliers_definition import Rule


class Session:
    """One optimizer under test, and now and then a copy of it that must take the next step to the same bits."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = case.rng
        self.generator = case.generator()
        self.groups = [
            Group(
                [i for i, tensor in enumerate(case.tensors) if tensor.group == g],
                bias_correction=case.options["bias_correction"],
                **_hyper(group),
            )
            for g, group in enumerate(case.groups)
        ]
        self.in_order = [i for group in self.groups for i in group.params]  # as the optimizer numbers parameters
        params = [torch.nn.Parameter(laid_out(self._values(tensor, 1.0), tensor.layout)) for tensor in case.tensors]
        self.trained = self.new(params)
        self.copies: list[tuple[str, Trained]] = []
        self.skipped = 0
        self.state_has_gaps = False  # loading closes them, and then sums may have another order

    def run(self) -> None:
        for number, step in enumerate(self.case.steps):
            self._advance(number, step)

    def _advance(self, number: int, step: StepSpec) -> None:
        try:
            for event in step.events:
                happen(self, event, step)
            self.step(step, self.gradients(step), skip=False)
        except DifferenceError as difference:
            events = ", ".join(step.events) or "nothing"
            raise DifferenceError(f"step {number}, after {events}: {difference}") from None

    # --- Steps

    def step(self, step: StepSpec, grads: list[Tensor | None], skip: bool) -> None:
        """With the gradients given, as they are, times the loss scale that `step` has."""
        before, judge = self.trained.snapshot(), self._judge()
        held = judge.params, judge.exp_avg, judge.exp_avg_sq, judge.ema_param
        starts = [Start(*start) for start in zip(*held, strict=True)]
        scale = np.longdouble(1.0 if step.loss_scale is None else step.loss_scale)
        rule, has_grads = self._rule(), any(grad is not None for grad in grads)
        with np.errstate(all="ignore"):
            scaled = [None if grad is None else to_wide(grad) / scale for grad in grads]
            is_outlier = has_grads and rule is not None and self._is_outlier(rule, judge, scaled, skip)
            judge.step(scaled)
        nonfinite = has_grads and not np.isfinite(judge.grad_norm)
        skip = has_grads and (skip or (nonfinite and bool(self.case.options.get("skip_nonfinite"))))
        found = None if step.loss_scale is None and not skip else torch.tensor(float(skip and not nonfinite))
        peer = self._peer() if self.case.options.get("stochastic_rounding") and not nonfinite else None
        self.take(self.trained, grads, step.loss_scale, found, self.case.threads)
        skip |= is_outlier
        self.skipped += skip
        if int(self.trained.optimizer.skipped_steps) != self.skipped:
            raise DifferenceError(
                f"skipped_steps is {int(self.trained.optimizer.skipped_steps)}, wanted {self.skipped}"
            )
        if skip:
            self.check_unchanged("a skipped step", before, zeros_are_nothing=True)
        else:
            with np.errstate(all="ignore"):
                self._check(judge, starts, before, grads)
        if peer is not None:
            self.take(peer, grads, step.loss_scale, found, self.case.threads)
            self._check_rounding(peer)
        for what, other in self.copies:
            # Any number of threads gives the same bits in C++; torch's sums depend on it.
            threads = 5 - self.case.threads if self.case.backend == "cpu" else self.case.threads
            self.take(other, [None if g is None else exact_copy(g) for g in grads], step.loss_scale, found, threads)
            self._check_same(what, other, stepped=any(grad is not None for grad in grads))
        if self.copies and self.rng.random() < 0.5:
            self.trained = self.copies[-1][1]
            self.skipped = int(self.trained.optimizer.skipped_steps)
        self.copies = []

    def take(
        self,
        trained: Trained,
        grads: list[Tensor | None],
        loss_scale: float | None,
        found_inf: Tensor | None,
        threads: int,
    ) -> None:
        """GradScaler's contract: it sets these two for a step, and takes them away afterwards."""
        params, optimizer = trained
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        if loss_scale is not None:
            optimizer.grad_scale = torch.tensor(loss_scale)  # type: ignore[attr-defined]
        if found_inf is not None:
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        torch.set_num_threads(threads)
        try:
            optimizer.step()
        finally:
            for name in ("grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)
            for param in params:
                param.grad = None

    def _judge(self) -> AdamS:
        """The definition, in the state that the optimizer is in: no rounding of the steps before counts, and whatever
        follows from anything else than the state is found out."""
        options, states = self.case.options, self.trained.states()
        judge = AdamS(
            [to_wide(weights(param, state)) for param, state in zip(self.trained.params, states, strict=True)],
            self.groups,
            options.get("max_grad_norm"),
            decay=options["decay"],
            lagged=options.get("schedule") == "lagged",
        )
        for group, own in zip(self.groups, self.trained.optimizer.param_groups, strict=True):
            group.largest_lr, group.largest_lr_so_far = own["largest_lr"], float(own["largest_lr_so_far"])
        for i, state in enumerate(states):
            if state:
                judge.steps[i] = int(state["step"])
                judge.exp_avg[i], judge.exp_avg_sq[i] = (coded.numbers(state, key) for key in ("exp_avg", "exp_avg_sq"))
                maxima = state.get("max_exp_avg_sq")
                judge.max_exp_avg_sq[i] = judge.exp_avg_sq[i] if maxima is None else to_wide(maxima)
                if "ema_param" in state:
                    judge.ema_param[i] = to_wide(state["ema_param"])
        return judge

    def _rule(self) -> Rule | None:
        """What decides whether the step stands out, with the numbers that the optimizer carries."""
        options = self.case.options
        if not options.get("outliers"):
            return None
        carried = self.trained.optimizer.param_groups[0].get(KEY, torch.zeros(6)).tolist()
        return Rule(options["outliers"], options["outlier_sigma"], MEASURED_STEPS, *carried)

    def _is_outlier(self, rule: Rule, judge: AdamS, grads: list[Array | None], skip: bool) -> bool:
        """Returns whether the step is skipped. If it is clipped, `judge` clips as much."""
        norm = judge.norm(grads)
        nonfinite = bool(self.case.options.get("skip_nonfinite")) and not np.isfinite(norm)
        taken = rule.step(float(norm), skip or nonfinite)
        if taken < norm and taken:
            limit = taken * (norm + np.longdouble(1e-6)) / norm
            judge.max_grad_norm = limit if judge.max_grad_norm is None else min(limit, judge.max_grad_norm)
        return taken == 0 != norm

    # --- What must hold

    def _check(self, judge: AdamS, starts: list[Start], before: Snapshot, grads: list[Tensor | None]) -> None:
        params, optimizer = self.trained
        tolerance = sum_tolerance(params, self.case.backend)
        mean_tolerance = (
            3 * tolerance
            + max(
                bias_correction_error(group, judge.steps[i])
                for group in self.groups
                for i in group.params
                if judge.steps[i]
            )
            if any(judge.steps)
            else 0.0
        )
        if any(grad is not None for grad in grads):
            check_number("grad_norm", optimizer.grad_norm, judge.grad_norm, tolerance)
            if self.case.options["decay"] == "scheduled":
                check_number("exp_avg_sq_mean", optimizer.exp_avg_sq_mean, judge.exp_avg_sq_mean, mean_tolerance)
        for group, own in zip(self.groups, optimizer.param_groups, strict=True):
            is_followed = group.corrected_decay or self.case.options["decay"] == "independent"
            if isinstance(own["lr"], Tensor):
                group.largest_lr_so_far = 0.0  # it is not followed: `largest_lr` is given
            if is_followed and float(own["largest_lr_so_far"]) != group.largest_lr_so_far:
                raise DifferenceError(f"the largest lr is {own['largest_lr_so_far']}, wanted {group.largest_lr_so_far}")
            for i in group.params:
                state = optimizer.state.get(params[i], {})
                if grads[i] is None:
                    same = same_bits(params[i], before[0][i]) and same_state(state, before[1][i])
                    if not same:
                        raise DifferenceError(f"parameter {i} has no gradient, but it or its state has changed")
                    continue
                rounds = self.case.options.get("stochastic_rounding") and params[i].dtype == torch.bfloat16
                start = starts[i]
                if rounds:  # up or down: a whole unit
                    judge.params[i] = _rounded_towards(judge.params[i], params[i])
                noises = self._noises(i, judge.steps[i]) if self._is_coded(i) else None
                check_stepped(judge, i, group, start, params[i], state, tolerance, noises)

    def check_unchanged(self, what: str, before: Snapshot, zeros_are_nothing: bool = False) -> None:
        """`zeros_are_nothing`: a skipped step may leave the state that a parameter starts with, and masters may take
        the values that someone has written to parameters."""
        for i, (param, state) in enumerate(zip(self.trained.params, self.trained.states(), strict=True)):
            if not same_bits(param, before[0][i]):
                raise DifferenceError(f"{what} has changed parameter {i}")
            if zeros_are_nothing and not before[1][i]:
                rest = [value for key, value in state.items() if key not in ("master_param", "ema_param")]
                if any(value.any() for value in rest):
                    raise DifferenceError(f"{what} has left state of parameter {i}: {state}")
            elif zeros_are_nothing:
                old = before[1][i]
                known = {key: value for key, value in state.items() if key in old}
                followed = {**old, "master_param": weights(before[0][i], old)} if "master_param" in old else old
                if not same_state(known, old) and not same_state(known, followed):
                    raise DifferenceError(f"{what} has changed the state of parameter {i}")
            elif not same_state(state, before[1][i]):
                raise DifferenceError(
                    f"{what} has changed the state of parameter {i}: {list(before[1][i])} to {list(state)}"
                )

    def _check_same(self, what: str, other: Trained, stepped: bool) -> None:
        for i, (one, two) in enumerate(zip(self.trained.params, other.params, strict=True)):
            if not same_bits(one, two):
                apart = (as_real(one).double() - as_real(two).double()).abs().max()
                raise DifferenceError(f"parameter {i} has other bits {what}, {float(apart):.3g} apart")
        for i, (one, two) in enumerate(zip(self.trained.states(), other.states(), strict=True)):
            if not same_state(one, two):
                raise DifferenceError(f"the state of parameter {i} has other bits {what}")
        means = self.trained.optimizer.exp_avg_sq_mean, other.optimizer.exp_avg_sq_mean
        if stepped and self.case.options["decay"] == "scheduled" and not means[0].isnan() and not same_bits(*means):
            raise DifferenceError(f"exp_avg_sq_mean is {float(means[0]):.17g}, but {float(means[1]):.17g} {what}")

    def _peer(self) -> Trained:
        """Plain PyTorch on contiguous copies: the bits of stochastic rounding belong to elements, not to memory."""
        params = [torch.nn.Parameter(param.detach().contiguous().clone()) for param in self.trained.params]
        peer = self.new(params, backend="torch")
        state_dict = copy.deepcopy(self.trained.optimizer.state_dict())
        for state in state_dict["state"].values():
            state.update({key: value.contiguous() for key, value in state.items()})
        peer.optimizer.load_state_dict(state_dict)
        return peer

    def _check_rounding(self, peer: Trained) -> None:
        """Another backend's last bit in float32 may take an element over the edge, once in 2^16 / ROUNDINGS."""
        for i, (param, other) in enumerate(zip(self.trained.params, peer.params, strict=True)):
            if param.dtype == torch.bfloat16:
                different = int(((param != other) & ~(param.isnan() & other.isnan())).sum())
                if different > 2 + param.numel() // 1000:
                    raise DifferenceError(
                        f"parameter {i} {tuple(param.shape)}: {different} of {param.numel()} elements are rounded "
                        'otherwise than by the "torch" backend on contiguous memory'
                    )

    # --- What it is made of

    def _is_coded(self, i: int) -> bool:
        tensor = self.case.tensors[i]
        state_dtype = self.case.groups[tensor.group].get("state_dtype", self.case.options.get("state_dtype"))
        fits = tensor.dtype in coded.DTYPES and is_coded(tensor.shape, self.case.least_coded)
        return bool(state_dtype == "8bit" and fits)

    def _noises(self, i: int, step: int) -> dict[str, Array]:
        return coded.noises(self.case.options.get("seed", 0), self.in_order.index(i), step, self.case.tensors[i].shape)

    def new(self, params: list[torch.nn.Parameter], backend: str | None = None, in_float32: bool = False) -> Trained:
        """Returns an optimizer as the case has it. `in_float32`: but for what it stores moments in."""
        options = {**self.case.options, "backend": backend or self.case.backend}
        own = ("state_dtype",)
        if in_float32:
            options["state_dtype"], own = None, ()
            if not options.get("stochastic_rounding"):
                options.pop("seed", None)  # it would be refused
        groups = [
            {
                **{key: value for key, value in vars(group).items() if key not in ("params", "largest_lr_so_far")},
                "params": [params[i] for i in group.params],
                "lr": torch.tensor(group.lr) if drawn["tensor_lr"] else group.lr,
                **{key: drawn[key] for key in own if key in drawn},
            }
            for group, drawn in zip(self.groups, self.case.groups, strict=True)
        ]
        return Trained(params, FusedAdamS(groups, **options))

    def _values(self, tensor: TensorSpec, size: float) -> Tensor:
        dtype = torch.complex128 if tensor.dtype.is_complex else torch.float64
        return (torch.randn(tensor.shape, dtype=dtype, generator=self.generator) * size).to(tensor.dtype)

    def gradient(self, tensor: TensorSpec, layout: str, scale: float = 1.0) -> Tensor:
        values = self._values(tensor, tensor.grad_size * scale)
        kind = self.rng.choice(["ordinary"] * 8 + ["zeros", "outliers"])  # within blocks of moments in 8 bits
        if kind == "zeros":
            values.view(-1)[: self.rng.choice([1, 256, 600])] = 0
        elif kind == "outliers":
            values = torch.where(torch.arange(values.numel()).view(values.shape) % 97 == 0, values, values * 1e-4)
        if layout != "expanded":
            return laid_out(values, layout)
        short = values.dim() and 0 < values.numel() <= 4097
        return values[:1].clone().expand(tensor.shape) if short else values

    def gradients(self, step: StepSpec) -> list[Tensor | None]:
        scale = 1.0 if step.loss_scale is None else step.loss_scale
        grads = [
            self.gradient(tensor, layout, scale) if present else None
            for tensor, layout, present in zip(self.case.tensors, step.grad_layouts, step.present, strict=True)
        ]
        filled = [grad for grad in grads if grad is not None and grad.numel()]
        if step.nonfinite is not None and filled:
            victim = self.rng.choice(filled)
            victim[tuple(self.rng.randrange(size) for size in victim.shape)] = step.nonfinite
        return grads


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    """What the definition knows of a group. A tensor is of float32."""
    lr = float(torch.tensor(group["lr"])) if group["tensor_lr"] else group["lr"]
    return {**{key: value for key, value in group.items() if key not in ("tensor_lr", "state_dtype")}, "lr": lr}


def _rounded_towards(values: np.ndarray, param: Tensor) -> np.ndarray:
    """Moves what is to be rounded by up to a unit of bfloat16 towards what it was rounded to: either way is right."""
    way = unit(torch.bfloat16) * abs(values)
    return values + np.clip(to_wide(param) - values, -way, way)

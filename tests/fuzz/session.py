"""A case as a training run: what happens between steps, and what must hold after each."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.definition import Group
from tests.fuzz.cases import Case, StepSpec, TensorSpec
from tests.fuzz.compare import (
    Difference,
    Start,
    bias_correction_error,
    check_number,
    check_stepped,
    sum_tolerance,
    unit,
)
from tests.fuzz.definition import OneStep
from tests.fuzz.layouts import as_real, exact_copy, laid_out, same_bits, to_wide

Snapshot = tuple[list[Tensor], list[dict[str, Tensor]], int]


class Trained(NamedTuple):
    params: list[torch.nn.Parameter]
    optimizer: FusedAdamS

    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state.get(param, {}) for param in self.params]

    def snapshot(self) -> Snapshot:
        states = [{key: exact_copy(value) for key, value in state.items()} for state in self.states()]
        return [exact_copy(param) for param in self.params], states, int(self.optimizer.skipped_steps)


class Session:
    """One optimizer under test, and now and then a copy of it that must take the next step to the same bits."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = case.rng
        self.generator = case.generator()
        self.groups = [
            Group([i for i, tensor in enumerate(case.tensors) if tensor.group == g], **_hyper(group))
            for g, group in enumerate(case.groups)
        ]
        params = [torch.nn.Parameter(laid_out(self._values(tensor, 1.0), tensor.layout)) for tensor in case.tensors]
        self.trained = self._new(params)
        self.copies: list[tuple[str, Trained]] = []
        self.skipped = 0

    def run(self) -> None:
        for number, step in enumerate(self.case.steps):
            try:
                for event in step.events:
                    self._happen(event, step)
                self._step(step, self._gradients(step), skip=False)
            except Difference as difference:
                raise Difference(f"step {number}, after {', '.join(step.events) or 'nothing'}: {difference}") from None

    # --- Steps

    def _step(self, step: StepSpec, grads: list[Tensor | None], skip: bool) -> None:
        """With the gradients given, as they are, times the loss scale that `step` has."""
        before, judge = self.trained.snapshot(), self._judge()
        starts = [Start(*start) for start in zip(judge.params, judge.exp_avg, judge.exp_avg_sq, strict=True)]
        scale = np.longdouble(1.0 if step.loss_scale is None else step.loss_scale)
        with np.errstate(all="ignore"):
            judge.step([None if grad is None else to_wide(grad) / scale for grad in grads])
        nonfinite = not np.isfinite(judge.grad_norm) and any(grad is not None for grad in grads)
        skip = any(grad is not None for grad in grads) and (
            skip or (nonfinite and bool(self.case.options.get("skip_nonfinite")))
        )
        found = None if step.loss_scale is None and not skip else torch.tensor(float(skip and not nonfinite))
        peer = self._peer() if self.case.options.get("stochastic_rounding") and not nonfinite else None
        self._take(self.trained, grads, step.loss_scale, found, self.case.threads)
        self.skipped += skip
        if int(self.trained.optimizer.skipped_steps) != self.skipped:
            raise Difference(f"skipped_steps is {int(self.trained.optimizer.skipped_steps)}, wanted {self.skipped}")
        if skip:
            self._check_unchanged("a skipped step", before, zeros_are_nothing=True)
        else:
            with np.errstate(all="ignore"):
                self._check(judge, starts, before, grads)
        if peer is not None:
            self._take(peer, grads, step.loss_scale, found, self.case.threads)
            self._check_rounding(peer)
        for what, other in self.copies:
            # Any number of threads gives the same bits in C++; torch's sums depend on it.
            threads = 5 - self.case.threads if self.case.backend == "cpu" else self.case.threads
            self._take(other, [None if g is None else exact_copy(g) for g in grads], step.loss_scale, found, threads)
            self._check_same(what, other, stepped=any(grad is not None for grad in grads))
        if self.copies and self.rng.random() < 0.5:
            self.trained = self.copies[-1][1]
            self.skipped = int(self.trained.optimizer.skipped_steps)
        self.copies = []

    def _take(
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

    def _judge(self) -> OneStep:
        """The definition, in the state that the optimizer is in."""
        options, states = self.case.options, self.trained.states()
        judge = OneStep(
            [to_wide(_weights(param, state)) for param, state in zip(self.trained.params, states, strict=True)],
            self.groups,
            options.get("max_grad_norm"),
            decay=options["decay"],
            lagged=options.get("schedule") == "lagged",
            corrects_bias=options["bias_correction"],
        )
        for i, state in enumerate(states):
            if state:
                judge.steps[i] = int(state["step"])
                judge.exp_avg[i], judge.exp_avg_sq[i] = to_wide(state["exp_avg"]), to_wide(state["exp_avg_sq"])
                judge.max_exp_avg_sq[i] = to_wide(state.get("max_exp_avg_sq", state["exp_avg_sq"]))
        return judge

    # --- What must hold

    def _check(self, judge: OneStep, starts: list[Start], before: Snapshot, grads: list[Tensor | None]) -> None:
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
        for group in self.groups:
            for i in group.params:
                state = optimizer.state.get(params[i], {})
                if grads[i] is None:
                    same = same_bits(params[i], before[0][i]) and _same_state(state, before[1][i])
                    if not same:
                        raise Difference(f"parameter {i} has no gradient, but it or its state has changed")
                    continue
                rounds = self.case.options.get("stochastic_rounding") and params[i].dtype == torch.bfloat16
                start = starts[i]
                if rounds:  # up or down: a whole unit
                    judge.params[i] = _rounded_towards(judge.params[i], params[i])
                check_stepped(judge, i, group, start, params[i], state, tolerance)

    def _check_unchanged(self, what: str, before: Snapshot, zeros_are_nothing: bool = False) -> None:
        """`zeros_are_nothing`: a skipped step may leave the state that a parameter starts with, and masters may take
        the values that someone has written to parameters."""
        for i, (param, state) in enumerate(zip(self.trained.params, self.trained.states(), strict=True)):
            if not same_bits(param, before[0][i]):
                raise Difference(f"{what} has changed parameter {i}")
            if zeros_are_nothing and not before[1][i]:
                rest = [value for key, value in state.items() if key != "master_param"]
                if any(value.any() for value in rest):
                    raise Difference(f"{what} has left state of parameter {i}: {state}")
            elif zeros_are_nothing:
                old = before[1][i]
                known = {key: value for key, value in state.items() if key in old}
                followed = {**old, "master_param": _weights(before[0][i], old)} if "master_param" in old else old
                if not _same_state(known, old) and not _same_state(known, followed):
                    raise Difference(f"{what} has changed the state of parameter {i}")
            elif not _same_state(state, before[1][i]):
                raise Difference(
                    f"{what} has changed the state of parameter {i}: {list(before[1][i])} to {list(state)}"
                )

    def _check_same(self, what: str, other: Trained, stepped: bool) -> None:
        for i, (one, two) in enumerate(zip(self.trained.params, other.params, strict=True)):
            if not same_bits(one, two):
                apart = (as_real(one).double() - as_real(two).double()).abs().max()
                raise Difference(f"parameter {i} has other bits {what}, {float(apart):.3g} apart")
        for i, (one, two) in enumerate(zip(self.trained.states(), other.states(), strict=True)):
            if not _same_state(one, two):
                raise Difference(f"the state of parameter {i} has other bits {what}")
        means = self.trained.optimizer.exp_avg_sq_mean, other.optimizer.exp_avg_sq_mean
        if stepped and self.case.options["decay"] == "scheduled" and not means[0].isnan() and not same_bits(*means):
            raise Difference(f"exp_avg_sq_mean is {float(means[0]):.17g}, but {float(means[1]):.17g} {what}")

    def _peer(self) -> Trained:
        """Plain PyTorch on contiguous copies: the bits of stochastic rounding belong to elements, not to memory."""
        params = [torch.nn.Parameter(param.detach().contiguous().clone()) for param in self.trained.params]
        peer = self._new(params, backend="torch")
        state_dict = copy.deepcopy(self.trained.optimizer.state_dict())
        for state in state_dict["state"].values():
            state.update({key: value.contiguous() for key, value in state.items()})
        peer.optimizer.load_state_dict(state_dict)
        return peer

    def _check_rounding(self, peer: Trained) -> None:
        """Another backend's last bit in float32 may take an element over the edge, once in 2^16 / ROUNDINGS."""
        for i, (param, other) in enumerate(zip(self.trained.params, peer.params, strict=True)):
            if param.dtype == torch.bfloat16:
                different = int((param != other).sum())
                if different > 2 + param.numel() // 1000:
                    raise Difference(
                        f"parameter {i} {tuple(param.shape)}: {different} of {param.numel()} elements are rounded "
                        'otherwise than by the "torch" backend on contiguous memory'
                    )

    # --- What happens between steps

    def _happen(self, event: str, step: StepSpec) -> None:
        happenings: dict[str, Callable[[StepSpec], None]] = {
            "save and load": self._save_and_load,
            "deepcopy": self._deepcopy,
            "pickle": self._pickle,
            "write exp_avg_sq": self._write_exp_avg_sq,
            "write params": self._write_params,
            "change lr": self._change_lr,
            "relayout state": self._relayout_state,
            "widen state": self._widen_state,
            "error": self._error,
            "skipped step": self._skipped_step,
            "warning as error": self._warning_as_error,
        }
        if self.copies and event not in ("save and load", "deepcopy", "pickle"):
            self.copies = []  # they would not take part in it
        happenings[event](step)

    def _save_and_load(self, step: StepSpec) -> None:
        file = io.BytesIO()
        torch.save(self.trained.optimizer.state_dict(), file)
        file.seek(0)
        fresh = self._new([torch.nn.Parameter(exact_copy(param)) for param in self.trained.params])
        fresh.optimizer.load_state_dict(torch.load(file, weights_only=True))
        fresh.optimizer.skipped_steps += self.skipped  # not in a state dict
        self.copies.append(("after saving and loading", fresh))

    def _deepcopy(self, step: StepSpec) -> None:
        params = [torch.nn.Parameter(exact_copy(param)) for param in self.trained.params]
        memo: dict[int, Any] = {id(old): new for old, new in zip(self.trained.params, params, strict=True)}
        self.copies.append(("after deepcopy", Trained(params, copy.deepcopy(self.trained.optimizer, memo))))

    def _pickle(self, step: StepSpec) -> None:
        self.copies.append(("after pickling", Trained(*pickle.loads(pickle.dumps(tuple(self.trained))))))

    @torch.no_grad()
    def _write_exp_avg_sq(self, step: StepSpec) -> None:
        for state in self.trained.states():
            if state and self.rng.random() < 0.7:
                state[self.rng.choice([key for key in ("exp_avg_sq", "max_exp_avg_sq") if key in state])].mul_(100)

    @torch.no_grad()
    def _write_params(self, step: StepSpec) -> None:
        for param in self.trained.params:
            if self.rng.random() < 0.7:
                param.mul_(-0.5).add_(0.25)

    def _change_lr(self, step: StepSpec) -> None:
        for group, own in zip(self.groups, self.trained.optimizer.param_groups, strict=True):
            lr = group.lr * self.rng.choice([0.0, 0.1, 3.0])
            if isinstance(own["lr"], Tensor):
                own["lr"].fill_(lr)
                lr = float(own["lr"])
            else:
                own["lr"] = lr
            group.lr = lr

    def _relayout_state(self, step: StepSpec) -> None:
        """By hand, as tests of layouts do it."""
        for state in self.trained.states():
            for key in [key for key in state if key != "step"]:
                state[key] = laid_out(state[key], self.rng.choice(["contiguous", "reversed", "gapped", "offset"]))

    def _widen_state(self, step: StepSpec) -> None:
        """Loads a state dict some of whose moments are float64, in other layouts."""
        state_dict = copy.deepcopy(self.trained.optimizer.state_dict())
        for state in state_dict["state"].values():
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                if key in state and self.rng.random() < 0.4:
                    dtype = torch.complex128 if state[key].is_complex() else torch.float64
                    state[key] = laid_out(state[key].to(dtype), self.rng.choice(["reversed", "gapped"]))
        self.trained.optimizer.load_state_dict(state_dict)

    def _error(self, step: StepSpec) -> None:
        """One bad gradient among good ones."""
        grads = self._gradients(step)
        candidates = [i for i, tensor in enumerate(self.case.tensors) if torch.Size(tensor.shape).numel() > 0]
        if not candidates:
            return
        bad = self.rng.choice(candidates)
        grad = self._gradient(self.case.tensors[bad], "contiguous")
        kinds = ["sparse"] if self.case.backend == "torch" else ["sparse", "freed", "freed", "float8"]
        kind = self.rng.choice(kinds)
        if kind == "sparse":
            grads[bad] = grad.to_sparse()
        elif kind == "freed":
            grad.untyped_storage().resize_(0)
            grads[bad] = grad
        elif grad.is_complex():
            return
        else:
            grads[bad] = grad.to(torch.float8_e4m3fn)
            self.trained.params[bad].grad_dtype = torch.float8_e4m3fn
        before = self.trained.snapshot()
        self._deepcopy(step)
        self.copies[-1] = "without an error before", self.copies[-1][1]
        try:
            self._take(self.trained, grads, step.loss_scale, None, self.case.threads)
        except (RuntimeError, ValueError, TypeError):
            self._check_unchanged(f"an error (a {kind} gradient of parameter {bad})", before)
        else:
            raise Difference(f"a {kind} gradient of parameter {bad} was accepted")
        finally:
            self.trained.params[bad].grad_dtype = self.trained.params[bad].dtype

    def _skipped_step(self, step: StepSpec) -> None:
        """With gradients of other parameters than the next step has."""
        skipped = StepSpec([self.rng.random() < 0.5 for _ in step.present], step.grad_layouts, [])
        self._step(skipped, self._gradients(skipped), skip=True)

    def _warning_as_error(self, step: StepSpec) -> None:
        """Takes a step in which `max_decay` may bind for the first time, with warnings as errors."""
        before, grads = self.trained.snapshot(), self._gradients(StepSpec(step.present, step.grad_layouts, []))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                self._take(self.trained, grads, None, None, self.case.threads)
            except UserWarning:
                self._check_unchanged("a warning as an error", before)

    # --- What it is made of

    def _new(self, params: list[torch.nn.Parameter], backend: str | None = None) -> Trained:
        groups = [
            {
                **{key: value for key, value in vars(group).items() if key != "params"},
                "params": [params[i] for i in group.params],
                "lr": torch.tensor(group.lr) if drawn["tensor_lr"] else group.lr,
            }
            for group, drawn in zip(self.groups, self.case.groups, strict=True)
        ]
        return Trained(params, FusedAdamS(groups, backend=backend or self.case.backend, **self.case.options))

    def _values(self, tensor: TensorSpec, size: float) -> Tensor:
        dtype = torch.complex128 if tensor.dtype.is_complex else torch.float64
        return (torch.randn(tensor.shape, dtype=dtype, generator=self.generator) * size).to(tensor.dtype)

    def _gradient(self, tensor: TensorSpec, layout: str, scale: float = 1.0) -> Tensor:
        values = self._values(tensor, tensor.grad_size * scale)
        if layout != "expanded":
            return laid_out(values, layout)
        short = values.dim() and 0 < values.numel() <= 4097
        return values[:1].clone().expand(tensor.shape) if short else values

    def _gradients(self, step: StepSpec) -> list[Tensor | None]:
        scale = 1.0 if step.loss_scale is None else step.loss_scale
        grads = [
            self._gradient(tensor, layout, scale) if present else None
            for tensor, layout, present in zip(self.case.tensors, step.grad_layouts, step.present, strict=True)
        ]
        filled = [grad for grad in grads if grad is not None and grad.numel()]
        if step.nonfinite is not None and filled:
            victim = self.rng.choice(filled)
            victim[(0,) * victim.dim()] = step.nonfinite
        return grads


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    """What the definition knows of a group. A tensor is of float32."""
    lr = float(torch.tensor(group["lr"])) if group["tensor_lr"] else group["lr"]
    return {**{key: value for key, value in group.items() if key != "tensor_lr"}, "lr": lr}


def _weights(param: Tensor, state: dict[str, Any]) -> Tensor:
    """What a step starts from: the master, but where someone has written to the parameter."""
    master = state.get("master_param")
    if master is None:
        return param
    return torch.where(master.to(param.dtype) == param, master, param.to(master.dtype))


def _same_state(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(same_bits(one[key], two[key]) for key in one)


def _rounded_towards(values: np.ndarray, param: Tensor) -> np.ndarray:
    """Moves what is to be rounded by up to a unit of bfloat16 towards what it was rounded to: either way is right."""
    way = unit(torch.bfloat16) * abs(values)
    return values + np.clip(to_wide(param) - values, -way, way)

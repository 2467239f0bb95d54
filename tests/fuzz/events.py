"""What happens between the steps of a session."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tests.fuzz.cases import COPIES, StepSpec
from tests.fuzz.coded import CODECS, TO_NEAREST, is_coded, numbers
from tests.fuzz.compare import DECODING, DifferenceError, check_close, check_coded, quantum, unit
from tests.fuzz.layouts import as_real, exact_copy, laid_out, to_wide
from tests.fuzz.trained import Trained, same_state

if TYPE_CHECKING:
    from tests.fuzz.session import Session


def happen(session: Session, event: str, step: StepSpec) -> None:
    """Does what `event` names, before `step`."""
    if event not in COPIES:
        session.copies = []  # they would not take part in it
    HAPPENINGS[event](session, step)


def save_and_load(session: Session, step: StepSpec) -> None:
    file = io.BytesIO()
    torch.save(session.trained.optimizer.state_dict(), file)
    file.seek(0)
    fresh = session.new([torch.nn.Parameter(exact_copy(param)) for param in session.trained.params])
    fresh.optimizer.load_state_dict(torch.load(file, weights_only=True))
    fresh.optimizer.skipped_steps.add_(session.skipped)  # not in a state dict
    if session.state_has_gaps:
        session.trained, session.copies, session.state_has_gaps = fresh, [], False
    else:
        session.copies.append(("after saving and loading", fresh))


def deep_copy(session: Session, step: StepSpec) -> None:
    params = [torch.nn.Parameter(exact_copy(param)) for param in session.trained.params]
    memo: dict[int, Any] = {id(old): new for old, new in zip(session.trained.params, params, strict=True)}
    session.copies.append(("after deepcopy", Trained(params, copy.deepcopy(session.trained.optimizer, memo))))


def pickle_both(session: Session, step: StepSpec) -> None:
    session.copies.append(("after pickling", Trained(*pickle.loads(pickle.dumps(tuple(session.trained))))))


@torch.no_grad()
def write_exp_avg_sq(session: Session, step: StepSpec) -> None:
    share = session.rng.choice([0.2, 0.7])  # a write that is missed shows only where it is the only one of a bucket
    for state in session.trained.states():
        if state and session.rng.random() < share:
            factors = {"exp_avg_sq": 100, "max_exp_avg_sq": 100, CODECS["exp_avg_sq"].scales: 10}
            key = session.rng.choice([key for key in factors if key in state])
            as_real(state[key]).mul_(factors[key])  # a complex product would spread NaN


@torch.no_grad()
def write_params(session: Session, step: StepSpec) -> None:
    for param in session.trained.params:
        if session.rng.random() < 0.7:
            param.mul_(-0.5).add_(0.25)


def change_lr(session: Session, step: StepSpec) -> None:
    for group, own in zip(session.groups, session.trained.optimizer.param_groups, strict=True):
        lr = group.lr * session.rng.choice([0.0, 0.1, 3.0])
        if isinstance(own["lr"], Tensor):
            own["lr"].fill_(lr)
            lr = float(own["lr"])
        else:
            own["lr"] = lr
        group.lr = lr


def relayout_state(session: Session, step: StepSpec) -> None:
    """By hand, as tests of layouts do it. Codes are made contiguous again."""
    session.state_has_gaps = True
    for state in session.trained.states():
        for key in [key for key in state if key != "step"]:
            state[key] = laid_out(state[key], session.rng.choice(["contiguous", "reversed", "gapped", "offset"]))


def widen_state(session: Session, step: StepSpec) -> None:
    """Loads a state dict some of whose moments are float64, in other layouts. In place of codes it has other numbers,
    which are between codes."""
    state_dict = copy.deepcopy(session.trained.optimizer.state_dict())
    converted = []
    for number, state in state_dict["state"].items():
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            if (key in state or is_coded(state, key)) and session.rng.random() < 0.4:
                if is_coded(state, key):
                    values = torch.from_numpy(numbers(state, key).astype(np.float64))
                    state[key] = values * (0.5 + torch.rand(values.shape, generator=session.generator))
                    converted.append((number, key, to_wide(state[key])))
                    del state[CODECS[key].codes], state[CODECS[key].scales]
                dtype = torch.complex128 if state[key].is_complex() else torch.float64
                state[key] = laid_out(state[key].to(dtype), session.rng.choice(["reversed", "gapped"]))
    session.trained.optimizer.load_state_dict(state_dict)
    session.state_has_gaps = False
    _check_coded_again(session, converted)


def float32_and_back(session: Session, step: StepSpec) -> None:
    """Loads the state into an optimizer whose moments have 32 bits at least, and its state into this one."""
    before = session.trained.snapshot()[1]
    params = [torch.nn.Parameter(exact_copy(param)) for param in session.trained.params]
    wide = session.new(params, in_float32=True)
    wide.optimizer.load_state_dict(session.trained.optimizer.state_dict())
    for i, (old, state) in enumerate(zip(before, wide.states(), strict=True)):
        for key in CODECS if old else ():
            values = numbers(old, key)
            check_close(f"parameter {i}: {key} in float32", state[key], values, _error_of_converting(values))
    session.trained.optimizer.load_state_dict(wide.optimizer.state_dict())
    session.state_has_gaps = False
    _check_coded_again(
        session,
        [
            (number, key, to_wide(wide.states()[i][key]))
            for number, i in enumerate(session.in_order)
            for key in CODECS
            if is_coded(before[i], key)
        ],
    )
    for i, (old, state) in enumerate(zip(before, session.trained.states(), strict=True)):
        if not is_coded(old, "exp_avg") and not same_state(old, state):
            raise DifferenceError(f"the state of parameter {i} has other bits after loading it in float32 and back")


def _error_of_converting(values: np.ndarray) -> np.ndarray:
    return 2 * DECODING * unit(torch.float32) * abs(values) + quantum(torch.float32)


def _check_coded_again(session: Session, converted: list[tuple[int, str, np.ndarray]]) -> None:
    """What was loaded as numbers is rounded to the nearest code."""
    for number, key, values in converted:
        i = session.in_order[number]
        state = session.trained.states()[i]
        if not is_coded(state, key):
            raise DifferenceError(f"{key} of parameter {i} is no longer in 8 bits after loading")
        what = f"{key} of parameter {i}, loaded as numbers"
        check_coded(what, key, state, values, _error_of_converting(values), TO_NEAREST)


def fail(session: Session, step: StepSpec) -> None:
    """One bad gradient among good ones."""
    grads = session.gradients(step)
    candidates = [i for i, tensor in enumerate(session.case.tensors) if torch.Size(tensor.shape).numel() > 0]
    if not candidates:
        return
    bad = session.rng.choice([*candidates, candidates[-1]])
    grad = session.gradient(session.case.tensors[bad], "contiguous")
    kinds = ["sparse"] if session.case.backend == "torch" else ["sparse", "freed", "freed", "float8"]
    kind = session.rng.choice(kinds)
    if kind == "sparse":
        grads[bad] = grad.to_sparse()
    elif kind == "freed":
        grad.untyped_storage().resize_(0)
        grads[bad] = grad
    elif grad.is_complex():
        return
    else:
        grads[bad] = grad.to(torch.float8_e4m3fn)
        session.trained.params[bad].grad_dtype = torch.float8_e4m3fn
    before = session.trained.snapshot()
    deep_copy(session, step)
    session.copies[-1] = "without an error before", session.copies[-1][1]
    try:
        session.take(session.trained, grads, step.loss_scale, None, session.case.threads)
    except (RuntimeError, ValueError, TypeError):
        session.check_unchanged(f"an error (a {kind} gradient of parameter {bad})", before)
    else:
        raise DifferenceError(f"a {kind} gradient of parameter {bad} was accepted")
    finally:
        session.trained.params[bad].grad_dtype = session.trained.params[bad].dtype


def skipped_step(session: Session, step: StepSpec) -> None:
    """With gradients of other parameters than the next step has."""
    skipped = StepSpec([session.rng.random() < 0.5 for _ in step.present], step.grad_layouts, [])
    session.step(skipped, session.gradients(skipped), skip=True)


def warning_as_error(session: Session, step: StepSpec) -> None:
    """Takes a step in which `max_decay` may bind for the first time, with warnings as errors."""
    before, grads = session.trained.snapshot(), session.gradients(StepSpec(step.present, step.grad_layouts, []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            session.take(session.trained, grads, None, None, session.case.threads)
        except UserWarning:
            session.check_unchanged("a warning as an error", before)
    if session.case.options.get("outliers") == "skip":  # it may have stood out
        session.skipped = int(session.trained.optimizer.skipped_steps)


HAPPENINGS: dict[str, Callable[[Session, StepSpec], None]] = {
    "save and load": save_and_load,
    "deepcopy": deep_copy,
    "pickle": pickle_both,
    "write exp_avg_sq": write_exp_avg_sq,
    "write params": write_params,
    "change lr": change_lr,
    "relayout state": relayout_state,
    "widen state": widen_state,
    "float32 and back": float32_and_back,
    "error": fail,
    "skipped step": skipped_step,
    "warning as error": warning_as_error,
}

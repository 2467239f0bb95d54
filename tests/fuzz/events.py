"""What happens between the steps of a session."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.fuzz.cases import COPIES, StepSpec
from tests.fuzz.compare import DifferenceError
from tests.fuzz.layouts import exact_copy, laid_out
from tests.fuzz.trained import Trained

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
    fresh.optimizer.skipped_steps += session.skipped  # not in a state dict
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
    for state in session.trained.states():
        if state and session.rng.random() < 0.7:
            state[session.rng.choice([key for key in ("exp_avg_sq", "max_exp_avg_sq") if key in state])].mul_(100)


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
    """By hand, as tests of layouts do it."""
    session.state_has_gaps = True
    for state in session.trained.states():
        for key in [key for key in state if key != "step"]:
            state[key] = laid_out(state[key], session.rng.choice(["contiguous", "reversed", "gapped", "offset"]))


def widen_state(session: Session, step: StepSpec) -> None:
    """Loads a state dict some of whose moments are float64, in other layouts."""
    state_dict = copy.deepcopy(session.trained.optimizer.state_dict())
    for state in state_dict["state"].values():
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            if key in state and session.rng.random() < 0.4:
                dtype = torch.complex128 if state[key].is_complex() else torch.float64
                state[key] = laid_out(state[key].to(dtype), session.rng.choice(["reversed", "gapped"]))
    session.trained.optimizer.load_state_dict(state_dict)
    session.state_has_gaps = False


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


HAPPENINGS: dict[str, Callable[[Session, StepSpec], None]] = {
    "save and load": save_and_load,
    "deepcopy": deep_copy,
    "pickle": pickle_both,
    "write exp_avg_sq": write_exp_avg_sq,
    "write params": write_params,
    "change lr": change_lr,
    "relayout state": relayout_state,
    "widen state": widen_state,
    "error": fail,
    "skipped step": skipped_step,
    "warning as error": warning_as_error,
}

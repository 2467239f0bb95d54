"""Learning rate schedulers: all of torch's, with the learning rate as a number and as a tensor."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from tests.core.torch_expectations.contestants import (
    Make,
    adamw,
    assert_same,
    contestants,
    copies,
    params_like,
    set_grads,
    train,
)

STEPS = 12

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5, 9]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, factor=0.3, total_iters=4),
    "LinearLR": lambda o: lrs.LinearLR(o, start_factor=0.2, total_iters=5),
    "LinearLR to zero": lambda o: lrs.LinearLR(o, start_factor=1 / 3, end_factor=0.0, total_iters=4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, total_iters=6, power=2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 5, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 1e-3, 1e-1, step_size_up=3, mode="triangular2"),
    "CyclicLR exp_range": lambda o: lrs.CyclicLR(o, 1e-3, 1e-1, 3, mode="exp_range", gamma=0.9, cycle_momentum=False),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "OneCycleLR linear": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=STEPS + 1, anneal_strategy="linear"),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)], [3]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3),
}
every_scheduler = pytest.mark.parametrize("name", SCHEDULERS)
numbers_and_tensors = pytest.mark.parametrize("new_lr", [float, torch.tensor], ids=["number", "tensor"])

# SequentialLR steps its schedulers with an epoch, and says that this is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter")


def advance(scheduler: Any) -> None:
    scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))


def hyper(optimizer: torch.optim.Optimizer) -> list[tuple[float, tuple[float, float]]]:
    return [(float(group["lr"]), tuple(map(float, group["betas"]))) for group in optimizer.param_groups]


def trained(make: Make, name: str, lr: Any, steps: int) -> tuple[Any, ...]:
    """Parameters, optimizer, scheduler, and the hyper-parameters of all steps."""
    params = params_like((5,), (3, 2))
    optimizer = make([{"params": params[:1]}, {"params": params[1:], "lr": lr(3e-3)}], lr=lr(1e-2))
    scheduler = SCHEDULERS[name](optimizer)
    seen = []
    for step in range(steps):
        seen.append(hyper(optimizer))
        set_grads(params, step)
        optimizer.step()
        advance(scheduler)
    return params, optimizer, scheduler, seen


@pytest.mark.thinned
@contestants
@numbers_and_tensors
@every_scheduler
def test_sets_what_it_sets_for_adamw(make: Make, name: str, new_lr: Any) -> None:
    """Learning rates and, where momentum cycles, betas; tensors stay the tensors that they are."""
    params, optimizer, _, seen = trained(make, name, new_lr, STEPS)
    assert seen == trained(adamw, name, new_lr, STEPS)[3]
    assert len({lrs[0] for lrs in seen}) > 1
    assert all(isinstance(group["lr"], torch.Tensor) == (new_lr is torch.tensor) for group in optimizer.param_groups)
    assert all(param.isfinite().all() for param in params)
    start = params_like((5,), (3, 2))
    assert not any(map(torch.equal, params, start))


@pytest.mark.thinned
@contestants
@numbers_and_tensors
@every_scheduler
def test_both_resume(make: Make, name: str, new_lr: Any) -> None:
    """Optimizer and scheduler from their state dicts, in the middle: the same hyper-parameters, the same bits."""
    params, optimizer, scheduler, _ = trained(make, name, new_lr, STEPS // 2)
    twins = copies(params)
    other = make([{"params": twins[:1]}, {"params": twins[1:], "lr": new_lr(3e-3)}], lr=new_lr(1e-2))
    other_scheduler = SCHEDULERS[name](other)
    other_scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(STEPS // 2):
        for own, its, way in ((params, optimizer, scheduler), (twins, other, other_scheduler)):
            set_grads(own, 50 + step)
            its.step()
            advance(way)
        assert hyper(optimizer) == hyper(other)
    assert_same(params, twins)


@contestants
@pytest.mark.parametrize("momentum", [(0.8, 0.9), (1, 5), (0.0, 0.5)])
def test_momentum_may_cycle_anywhere(make: Make, momentum: tuple[float, float]) -> None:
    """torch's scheduler tests cycle it between 1 and 5, on parameters without gradients."""
    optimizer = make(params_like((3,)), lr=0.5)
    scheduler = lrs.CyclicLR(
        optimizer, 1, 5, step_size_up=4, cycle_momentum=True, base_momentum=momentum[0], max_momentum=momentum[1]
    )
    seen = []
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        seen.append(optimizer.param_groups[0]["betas"][0])
    assert (min(seen), max(seen)) == pytest.approx(momentum)


@contestants
def test_a_scheduler_before_the_first_step_warns(make: Make) -> None:
    optimizer = make(params_like((3,)))
    scheduler = lrs.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()


@contestants
def test_copies_and_pickles_with_a_scheduler_attached(make: Make) -> None:
    """It replaces `optimizer.step` by a function that counts."""
    params = params_like((3,))
    optimizer = make(params)
    scheduler = lrs.ExponentialLR(optimizer, 0.5)
    train(params, optimizer, 2)
    scheduler.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twins = other.param_groups[0]["params"]
        original = copies(params)
        reference = make(original)
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for own, its in ((twins, other), (original, reference)):
            train(own, its, 1)
        assert_same(twins, original)


@contestants
def test_several_at_once_share_an_optimizer(make: Make) -> None:
    optimizer = make(params_like((3,)), lr=1.0)
    schedulers = [lrs.ExponentialLR(optimizer, 0.5), lrs.StepLR(optimizer, 2, gamma=0.1)]
    for _ in range(2):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)

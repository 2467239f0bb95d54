"""Gradient release: the lagged step bit for bit, taken during the backward pass; and what it refuses."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swd_fused import FusedAdamS
from swd_fused.drivers import release as gradient_release
from tests.device import DEVICE
from tests.runs import is_interpreted, steps_for, sum_tolerance

# Each parameter by itself; a few together; all in `step()`.
GATHERED = [1, 2000, 1 << 30]


@pytest.fixture(autouse=True)
def _nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_release, "GATHERED_BYTES", 1)


class Net(nn.Module):
    """`side` has no gradient in some steps; `late` has none before the step `late_from`; `again` is used twice."""

    def __init__(self, late_from: int, width: int = 24) -> None:
        super().__init__()
        self.late_from = late_from
        self.enter = nn.Linear(6, width)
        self.again = nn.Linear(width, width)
        self.side = nn.Linear(width, width, bias=False)
        self.late = nn.Parameter(torch.randn(width))
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor, t: int) -> Tensor:
        h = self.again(torch.tanh(self.again(self.enter(x))))
        if t % 3 != 1:
            h = h + self.side(h)
        if t >= self.late_from:
            h = h * self.late
        return self.leave(h)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, t: int, part: slice = slice(None)) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(t)
    x, y = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)[part], t) - y.to(dtype)[part]).square().mean()


def new_model(dtype: torch.dtype = torch.float32, late_from: int = 0) -> Net:
    torch.manual_seed(0)
    return Net(late_from).to(dtype)


def new_optimizer(model: Net, backend: str, amsgrad: bool = False, **options: Any) -> FusedAdamS:
    """Two groups that differ in everything."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    groups = [
        {"params": matrices, "lr": 1e-2, "weight_decay": 2e-3, "betas": (0.9, 0.99), "amsgrad": amsgrad},
        {"params": vectors, "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6},
    ]
    return FusedAdamS(groups, schedule="lagged", backend=backend, **options)


def train(model: Net, optimizer: FusedAdamS, steps: range, after: Callable[[], object] = lambda: None) -> list[Any]:
    """Returns what each step has logged."""
    logged = []
    for t in steps:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + t)
        optimizer.zero_grad()
        loss_of(model, t).backward()
        after()
        optimizer.step()
        mean, norm = float(optimizer.exp_avg_sq_mean), float(optimizer.grad_norm)
        # A first step that is taken by parts adds them up in another order.
        logged.append(
            (
                mean if t else pytest.approx(mean, rel=sum_tolerance(optimizer.backend, 1e-14)),
                pytest.approx(norm, rel=sum_tolerance(optimizer.backend)),
            )
        )
    return logged


def assert_same_bits(model: Net, optimizer: FusedAdamS, other: Net, other_optimizer: FusedAdamS) -> None:
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, twin)
        state, twin_state = optimizer.state[param], other_optimizer.state[twin]
        assert state.keys() == twin_state.keys()
        for key in state:
            assert torch.equal(state[key], twin_state[key]), key


@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"amsgrad": True, "maximize": True}),
        (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}),
        (torch.bfloat16, {"master_weights": True}),
        (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": "8bit"}),
        (torch.float32, {"bias_correction": False, "total_numel": 5000}),
        (torch.float32, {"corrected_decay": True, "cautious_decay": True, "ema_decay": 0.9}),
    ],
    ids=["float32", "amsgrad", "stochastic", "masters", "8 bits", "total_numel", "variants"],
)
@pytest.mark.usefixtures("_codes_of_small_tensors")
def test_equals_the_lagged_step_bit_for_bit(
    backend: str, dtype: torch.dtype, options: dict[str, Any], gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients that come and go, and a resume in the middle."""
    if is_interpreted(backend) and (
        gathered != GATHERED[1] or options.keys() & {"amsgrad", "total_numel", "corrected_decay"}
    ):
        pytest.skip("takes long in the interpreter, and has no code of its own on Triton")
    monkeypatch.setattr(gradient_release, "GATHERED_BYTES", gathered)
    # Where a parameter is new, an ordinary step of the other backends adds up the mean in another order.
    steps, late_from = steps_for(backend, 8), 3 if backend == "cpu" else 0
    peer = new_model(dtype, late_from)
    peer_optimizer = new_optimizer(peer, backend, **options)
    expected = train(peer, peer_optimizer, range(steps))
    model = new_model(dtype, late_from)
    optimizer = new_optimizer(model, backend, **options)
    optimizer.release_gradients()
    logged = train(model, optimizer, range(steps // 2))
    resumed = new_optimizer(model, backend, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.release_gradients()
    left: list[int] = []
    logged += train(model, resumed, range(steps // 2, steps), lambda: left.append(grads_left(model)))
    assert logged == expected
    assert_same_bits(model, resumed, peer, peer_optimizer)
    assert all(count == 0 for count in left) if gathered == 1 else any(left)


def grads_left(model: nn.Module) -> int:
    return sum(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("gathered", GATHERED)
def test_closures(gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_release, "GATHERED_BYTES", gathered)
    models = [new_model(), new_model()]
    optimizers = [new_optimizer(model, "cpu") for model in models]
    optimizers[0].release_gradients()

    def closure(model: Net, optimizer: FusedAdamS, t: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, t)
        loss.backward()
        return loss

    for t in range(4):
        pairs = list(zip(models, optimizers, strict=True))
        losses = [optimizer.step(functools.partial(closure, model, optimizer, t)) for model, optimizer in pairs]
        assert torch.equal(*losses)
    assert_same_bits(models[0], optimizers[0], models[1], optimizers[1])


@pytest.mark.parametrize("gathered", GATHERED)
def test_micro_batches(gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each but the last gradients only accumulate, those that the last does not have too."""
    monkeypatch.setattr(gradient_release, "GATHERED_BYTES", gathered)
    models = [new_model(), new_model()]
    optimizers = [new_optimizer(model, "cpu") for model in models]
    optimizers[0].release_gradients()
    for t in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            with optimizer.accumulate_gradients():
                loss_of(model, 3, slice(0, 5)).backward()
                loss_of(model, t, slice(5, 9)).backward()
            loss_of(model, 1, slice(9, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(models[0], optimizers[0], models[1], optimizers[1])


def test_second_gradient_is_refused_until_the_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a backward pass that has failed: what has stepped has stepped, the rest takes no part in this step."""
    model = new_model()
    optimizer = new_optimizer(model, "cpu")
    optimizer.release_gradients()
    train(model, optimizer, range(4))
    with monkeypatch.context() as patch:
        patch.setattr(gradient_release, "GATHERED_BYTES", 1 << 30)
        loss_of(model, 4).backward()
        with pytest.raises(RuntimeError, match="second gradient"):  # whose first one waits
            loss_of(model, 4).backward()
    optimizer.zero_grad()
    optimizer.step()
    handle = model.enter.weight.register_hook(lambda grad: 1 / 0)  # type: ignore[no-untyped-call]
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 5).backward()
    handle.remove()
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"second gradient before optimizer\.step\(\).*accumulate_gradients"):
        loss_of(model, 6).backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    steps = {name: int(optimizer.state[param]["step"]) for name, param in model.named_parameters()}
    assert steps["leave.weight"] == 5
    assert steps["enter.weight"] == 4
    train(model, optimizer, range(7, 9))
    assert int(optimizer.state[model.leave.weight]["step"]) == 7


def test_autograd_notices_weights_that_it_still_needs(backend: str) -> None:
    """A weight that is released before its last use in the backward pass would give wrong gradients silently."""
    x, weight, first = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    optimizer = FusedAdamS([first, weight], schedule="lagged", backend=backend)
    optimizer.release_gradients()
    for _ in range(2):
        (x @ first @ weight).sum().backward()
        optimizer.step()
    loss = (x @ first @ weight.detach()).sum() * (2 * weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_steps_before_and_after_released_ones_are_ordinary(backend: str, in_the_middle: bool) -> None:
    """Nothing that a backend keeps is stale. If release is removed within a step, `step()` ends it as it has begun."""
    models = [new_model(), new_model()]
    optimizers = [new_optimizer(model, backend) for model in models]
    expected = train(models[1], optimizers[1], range(4))
    logged = train(models[0], optimizers[0], range(2))
    handle = optimizers[0].release_gradients()
    assert optimizers[0].release_gradients() is handle
    logged += train(models[0], optimizers[0], range(2, 3), handle.remove if in_the_middle else lambda: None)
    handle.remove()
    assert logged + train(models[0], optimizers[0], range(3, 4)) == expected
    assert grads_left(models[0]) == grads_left(models[1]) > 0
    assert_same_bits(models[0], optimizers[0], models[1], optimizers[1])
    again = optimizers[0].release_gradients()
    again.remove()
    assert again.has_ended


def test_copies_have_no_hooks_and_loading_begins_a_new_step() -> None:
    model = new_model()
    optimizer = new_optimizer(model, "cpu")
    optimizer.release_gradients()
    train(model, optimizer, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for twin, twin_optimizer in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        assert twin_optimizer._gradient_release is None
        left: list[int] = []
        train(twin, twin_optimizer, range(5, 6), lambda: left.append(grads_left(twin)))  # noqa: B023
        assert left == [8]
    loss_of(model, 5).backward()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(5, 6))
    assert_same_bits(model, optimizer, twin, twin_optimizer)


def test_the_newest_optimizer_takes_over_and_the_old_one_can_go() -> None:
    """As when a cell of a notebook runs again."""
    model = new_model()
    old = new_optimizer(model, "cpu")
    old.release_gradients()
    train(model, old, range(2))
    new = new_optimizer(model, "cpu")
    new.release_gradients()
    train(model, new, range(2, 4))
    assert int(old.state[model.leave.weight]["step"]) == 2
    assert int(new.state[model.leave.weight]["step"]) == 2
    gone = weakref.ref(old)
    del old
    gc.collect()
    assert gone() is None


def test_parameters_that_are_added_later_are_released_too() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = FusedAdamS([first], schedule="lagged", backend="cpu")
    optimizer.release_gradients()
    optimizer.add_param_group({"params": [second]})
    for t in range(3):
        (first * second).square().sum().backward()
        assert (second.grad is None) == (t > 0)
        optimizer.step()
    assert int(optimizer.state[second]["step"]) == 3


def test_hyper_parameters_are_those_of_the_backward_pass() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamS([param], lr=0.1, schedule="lagged", weight_decay=0.0, backend="cpu")
    optimizer.release_gradients()
    param.square().sum().backward()
    optimizer.step()
    before = param.detach().clone()
    param.square().sum().backward()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert not torch.equal(param, before)


def test_decoupled_decay_needs_no_schedule_and_can_release() -> None:
    model, peer = new_model(), new_model()
    optimizer = FusedAdamS(model.parameters(), decay="decoupled", weight_decay=0.01, backend="cpu")
    adamw = torch.optim.AdamW(peer.parameters(), weight_decay=0.01)
    optimizer.release_gradients()
    for t in range(6):
        for trained, stepped in ((model, optimizer), (peer, adamw)):
            stepped.zero_grad()
            loss_of(trained, t).backward()
            stepped.step()
    for param, twin in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'schedule="exact".*Use schedule="lagged"'),
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1\.0, which needs the norm of all gradients"),
        ({"skip_nonfinite": True}, "skip_nonfinite=True, which needs the norm"),
        ({"outliers": "skip"}, "outliers='skip', which needs the norm"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdamS([nn.Parameter(torch.ones(3))], **options).release_gradients()


def test_refused_steps() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamS([param], schedule="lagged", backend="cpu")
    optimizer.release_gradients()
    with pytest.raises(RuntimeError, match=r"got grad_sumsq .* with release_gradients"):
        optimizer.step(grad_sumsq=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    with pytest.raises(RuntimeError, match=r"by a GradScaler, with release_gradients"):
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones(3))
    optimizer = FusedAdamS([param], schedule="lagged", backend="cpu")
    optimizer.release_gradients()
    with pytest.raises(ValueError, match='schedule="exact"'):
        optimizer.schedule = "exact"

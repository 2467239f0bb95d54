"""What a run measures is what it says, and each optimizer is set up as in the paper."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_optimizer")
pytest.importorskip("sklearn")

from benchmarks.paper.checkpoint import Checkpoint
from benchmarks.paper.data import DataError, load_images
from benchmarks.paper.effort import Effort
from benchmarks.paper.hessian import top_eigenvalues
from benchmarks.paper.kept_net import KeptNet
from benchmarks.paper.models import IMAGE_MODELS
from benchmarks.paper.optimizers import OPTIMIZERS, adamw_weight_decay
from benchmarks.paper.run import Run
from benchmarks.paper.sharpness_training import train_with_eigenvalues
from benchmarks.paper.training import train_images
from benchmarks.paper.training_loop import lr_schedule
from swd_fused import FusedAdamS

CPU = torch.device("cpu")
RUN = Run("noise", "small-resnet", "AdamS", 1e-3, 5e-4, epochs=2, batch_size=8, seed=3, milestones=(1,))


def ignored() -> None:
    pass


# --- Optimizers

SHRINKS = {"AdamS", "AMSGradS", "SGDS", "AdamW", "AMSGradW", "SGD, eq 1"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps(name: str) -> None:
    param = nn.Parameter(torch.randn(5))
    before = param.detach().clone()
    optimizer = OPTIMIZERS[name].build([param], OPTIMIZERS[name].lr, 5e-4)
    for _ in range(3):
        param.grad = torch.randn(5)
        optimizer.step()
    assert param.isfinite().all()
    assert (param != before).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_is_decoupled_or_not_as_in_the_paper(name: str) -> None:
    """A weight far from zero with a gradient of zero: decoupled decay shrinks it, L2 enters the gradient."""
    param = nn.Parameter(torch.tensor([100.0, 1.0]))
    optimizer = OPTIMIZERS[name].build([param], 1e-2, 5e-4)
    param.grad = torch.tensor([0.0, 1e-3])
    optimizer.step()
    shrunk = 1 - param[0].item() / 100
    if name in ("AdamW", "AMSGradW"):
        assert shrunk == pytest.approx(1e-2 * 0.5, rel=1e-4)
    elif name in ("AdamS", "AMSGradS"):
        assert shrunk == pytest.approx(1e-2 * 5e-4 / (1e-3 / math.sqrt(2)), rel=1e-3)
    elif name == "SGDS":
        assert shrunk == pytest.approx(1e-2 * 5e-4 / 0.1, rel=1e-2)
    elif name in ("SGD", "SGD, eq 1", "SGD, eq 3"):
        assert shrunk == pytest.approx(1e-2 * 5e-4, rel=2e-2)
    else:  # Adam's step has the size of lr, whatever the gradient
        assert 0 < shrunk * 100 < 0.2
        assert optimizer.param_groups[0].get("weight_decouple", False) is False


def test_equation_1_goes_on_shrinking_when_the_learning_rate_falls() -> None:
    sizes = {}
    for name in ("SGD, eq 1", "SGD, eq 3"):
        param = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = OPTIMIZERS[name].build([param], 0.1, 0.5)
        for lr in (0.1, 0.01):
            optimizer.param_groups[0]["lr"] = lr
            param.grad = torch.zeros_like(param)
            optimizer.step()
        sizes[name] = param.item()
    assert sizes["SGD, eq 1"] == pytest.approx(0.95 * 0.95)
    assert sizes["SGD, eq 3"] == pytest.approx(0.95 * 0.995)


def test_learning_rates_are_the_papers() -> None:
    others = {name: kind.lr for name, kind in OPTIMIZERS.items() if kind.lr != 1e-3}
    assert others == {"SGD": 0.1, "SGDS": 0.1, "Padam": 0.01, "SGD, eq 1": 0.1, "SGD, eq 3": 0.1}


def test_decay_is_reported_in_adamws_terms() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), 1e-3)
    expected = {"AdamW": 0.5, "AdamS": 0.5, "SGDS": 5e-3}
    for name, value in expected.items():
        optimizer = OPTIMIZERS[name].build([param], 1e-3, 5e-4)
        optimizer.step()
        assert adamw_weight_decay(optimizer) == pytest.approx(value, rel=1e-3)
    assert math.isnan(adamw_weight_decay(OPTIMIZERS["Adam"].build([param], 1e-3, 5e-4)))


def test_decay_is_summed_over_all_steps() -> None:
    """AdamW's lr is 1e-3 in four steps and 1e-4 in four more; AdamS is summed up beside the training."""
    [first, second] = train_images(replace(RUN, optimizer="AdamW"), None, CPU, ignored).epochs
    assert (first.summed_decay, second.summed_decay) == pytest.approx((4 * 1e-3 * 0.5, 4 * 1e-4 * 0.5))
    sums: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        original = FusedAdamS.step

        def noted(self: FusedAdamS) -> None:
            original(self)
            rms = math.sqrt(self.exp_avg_sq_mean)
            sums.append(self.param_groups[0]["lr"] * 5e-4 / (rms + 1e-8))

        patch.setattr(FusedAdamS, "step", noted)
        [first, second] = train_images(RUN, None, CPU, ignored).epochs
    assert (first.summed_decay, second.summed_decay) == pytest.approx((sum(sums[:4]), sum(sums[4:])), rel=1e-5)
    assert math.isnan(train_images(replace(RUN, optimizer="Adam"), None, CPU, ignored).epochs[0].summed_decay)


# --- Learning rates


def rates(run: Run, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=run.lr)
    schedule = lr_schedule(run, optimizer, steps)
    seen = []
    for _ in range(run.epochs * steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_milestones_divide_by_ten() -> None:
    assert rates(replace(RUN, lr=1.0, epochs=4, milestones=(1, 3)), 2) == pytest.approx(
        [1, 1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01]
    )
    assert set(rates(replace(RUN, milestones=()), 3)) == {1e-3}


def test_cosine_restarts_after_one_two_and_four_cycles() -> None:
    steps = 10
    seen = rates(replace(RUN, lr=1.0, epochs=7, milestones=(), cosine=(1, 2)), steps)
    expected: list[float] = []
    for epochs in (1, 2, 4):
        length = epochs * steps
        expected += [0.5 * (1 + math.cos(math.pi * i / length)) for i in range(length)]
    assert seen == pytest.approx(expected)


# --- What is measured


def test_losses_and_norms_are_means_over_minibatches() -> None:
    """Against a second training loop, with torch's own optimizer and norms computed one by one."""
    run = replace(RUN, optimizer="Adam", weight_decay=0.0)
    trained = train_images(run, None, CPU, ignored)
    data = load_images("noise", None, CPU, 0)
    torch.manual_seed(run.seed)
    model = IMAGE_MODELS["small-resnet"](1, 3, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    shuffle = torch.Generator().manual_seed(run.seed)
    for epoch, lr in zip(trained.epochs, (1e-3, 1e-4), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        losses, squares = [], []
        model.train()
        for images, labels in data.train_batches(8, shuffle, augment=False):
            loss = F.cross_entropy(model(images), labels)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            losses.append(loss.item())
            squares.append(sum(float(grad.double().square().sum()) for grad in grads))
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad
            optimizer.step()
        assert len(losses) == 4
        assert epoch.epoch_lr == pytest.approx(lr)
        assert epoch.train_loss == pytest.approx(sum(losses) / 4, rel=1e-3)
        assert epoch.squared_grad_norm == pytest.approx(sum(squares) / 4, rel=1e-2)
        assert epoch.grad_norm == pytest.approx(sum(map(math.sqrt, squares)) / 4, rel=1e-2)
        model.eval()
        with torch.no_grad():
            wrong = (model(data.test_images).argmax(1) != data.test_labels).double().mean()
        assert epoch.test_error == pytest.approx(float(wrong), abs=0.07)  # one of 16 may tip over by rounding


@pytest.mark.parametrize("optimizer", ["SGD", "Yogi"])  # Yogi adds it to the gradients in place
def test_regularization_is_not_in_the_gradient_norm(optimizer: str) -> None:
    first = [
        train_images(replace(RUN, optimizer=optimizer, weight_decay=decay, epochs=1, batch_size=32), None, CPU, ignored)
        for decay in (0.0, 0.5)
    ]
    assert first[0].epochs[0].squared_grad_norm == first[1].epochs[0].squared_grad_norm
    assert first[0].epochs[0].weight_norm > first[1].epochs[0].weight_norm


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    losses = [train_images(replace(RUN, seed=seed), None, CPU, ignored).epochs[-1].train_loss for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_testing_can_be_rarer_but_never_skips_the_end() -> None:
    epochs = train_images(replace(RUN, epochs=5, evaluate_every=2), None, CPU, ignored).epochs
    assert [not math.isnan(epoch.test_error) for epoch in epochs] == [False, True, False, True, True]


def test_progress_is_told_after_each_epoch() -> None:
    told: list[None] = []
    train_images(replace(RUN, epochs=3), None, CPU, lambda: told.append(None))
    assert len(told) == 3


def test_a_net_learns_digits() -> None:
    run = Run("digits", "small-resnet", "AdamS", 1e-3, 5e-4, epochs=3, batch_size=32, seed=0)
    assert train_images(run, None, CPU, ignored).epochs[-1].test_error < 0.15


# --- The Hessian


def test_top_eigenvalues_are_those_of_the_whole_hessian() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    images, labels = torch.randn(20, 1, 2, 2, dtype=torch.float64), torch.randint(3, (20,))
    model(images)  # sets BatchNorm's running statistics
    model.eval()
    params = dict(model.named_parameters())
    flat = torch.cat([param.detach().flatten() for param in params.values()])

    def loss(vector: torch.Tensor) -> torch.Tensor:
        parts = vector.split([param.numel() for param in params.values()])
        named = {name: part.view_as(param) for (name, param), part in zip(params.items(), parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, named, images), labels)

    expected = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat)).flip(0)[:4]
    found = torch.tensor(top_eigenvalues(model.train(), images, labels, 4, seed=0), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)


def test_batches_of_images_bound_the_memory_and_give_the_same_eigenvalues() -> None:
    sizes: list[int] = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.register_forward_hook(lambda module, inputs, outputs: sizes.append(len(outputs)))
    images, labels = torch.randn(20, 1, 2, 2, dtype=torch.float64), torch.randint(3, (20,))
    whole = top_eigenvalues(model, images, labels, 4, seed=0)
    assert set(sizes) == {20}
    sizes.clear()
    assert top_eigenvalues(model, images, labels, 4, seed=0, most_pixels=4 * 8) == pytest.approx(whole, rel=1e-9)
    assert set(sizes) == {8, 4}


def test_a_run_can_end_with_eigenvalues(tmp_path: Path) -> None:
    run = replace(RUN, eigenvalues=3, hessian_images=32)
    effort = Effort()
    trained = train_with_eigenvalues(run, None, CPU, ignored, KeptNet(tmp_path / "net.pt"), Checkpoint(None, effort))
    assert trained.epochs == train_images(RUN, None, CPU, ignored).epochs
    assert effort.seconds > 0
    assert len(trained.eigenvalues) == 3
    assert trained.eigenvalues == sorted(trained.eigenvalues, reverse=True)


def test_data_that_are_missing_stop_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="CIFAR-10"):
        train_images(replace(RUN, data="cifar10"), tmp_path, CPU, ignored)

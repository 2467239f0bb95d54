"""Callbacks of trainers, with small stand-ins for the trainers. test_frameworks.py has the real ones."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from swd_fused import FusedAdamS


class Optimizer:
    """What FusedAdamS tells, and how often it was asked: each time waits for the device."""

    def __init__(self) -> None:
        self.asked = 0

    def metrics(self) -> dict[str, float]:
        self.asked += 1
        return {"grad_norm": 0.5, "effective_weight_decay/decay": 0.1}

    def rms_grads(self) -> dict[str | int, float]:
        return {"weight": 2.0, 1: 3.0}


def wrapped(optimizer: object) -> SimpleNamespace:
    """As Accelerate wraps an optimizer, and DeepSpeed what Accelerate then wraps."""
    return SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))


def imported(name: str, monkeypatch: pytest.MonkeyPatch, library: str, **classes: type) -> ModuleType:
    """Imports swd_fused.integrations.<name> on top of a library that has nothing but these classes."""
    stand_in = ModuleType(library)
    vars(stand_in).update(classes)
    monkeypatch.setitem(sys.modules, library, stand_in)
    monkeypatch.delitem(sys.modules, f"swd_fused.integrations.{name}", raising=False)
    module = importlib.import_module(f"swd_fused.integrations.{name}")
    monkeypatch.delitem(sys.modules, f"swd_fused.integrations.{name}")
    return module


METRICS = {"adams/grad_norm": 0.5, "adams/effective_weight_decay/decay": 0.1}


def test_transformers_logs_of_training_have_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have not, and a reporter that comes after our callback has them too."""
    module = imported("transformers", monkeypatch, "transformers", Trainer=object, TrainerCallback=object)
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=["W&B"]))
    module.log_metrics(trainer)
    (callback, _), optimizer = trainer.callback_handler.callbacks, Optimizer()
    state = SimpleNamespace(global_step=10, log_history=[{"loss": 2.0, "step": 10}])
    for logs in ({"eval_loss": 1.0}, {"train_runtime": 3.0}, None):
        before = logs and dict(logs)
        callback.on_log(None, SimpleNamespace(log_history=[]), None, logs=logs, optimizer=optimizer)
        assert (logs, optimizer.asked) == (before, 0)
    logs = {"loss": 2.0, "grad_norm": 0.0}
    callback.on_log(None, state, None, logs=logs, optimizer=wrapped(optimizer), model=None)
    assert logs == {"loss": 2.0, "grad_norm": 0.0, **METRICS}
    assert state.log_history == [{"loss": 2.0, "step": 10, **METRICS}]
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match=r"got optimizers \['AdamW'\], wanted a FusedAdamS"):
        callback.on_log(None, state, None, logs=logs, optimizer=adamw)

    callback, logged = module.MetricsCallback("swd/", rms_grads_every=30), []
    for step in (20, 40, 50, 60, 80, 100):
        logs = {"loss": 2.0}
        callback.on_log(None, SimpleNamespace(global_step=step, log_history=[]), None, logs, optimizer)
        if "swd/rms_grad/weight" in logs:
            logged.append(step)
            assert logs["swd/rms_grad/1"] == 3
    assert logged == [40, 60, 100]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_lightning_logs_metrics_when_it_logs(monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    """Six steps, logged every second one. Of several optimizers each has its number."""
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    module = imported("lightning", monkeypatch, "lightning.pytorch", Callback=object)

    def train(*optimizers: object, **options: Any) -> list[Any]:
        callback, logger = module.MetricsCallback(**options), MagicMock()
        trainer = SimpleNamespace(optimizers=list(optimizers), loggers=[logger], log_every_n_steps=2, global_step=0)
        callback.on_train_start(trainer, None)
        for batch in range(6 * accumulate):
            trainer.global_step = (batch + 1) // accumulate
            callback.on_train_batch_end(trainer, None, None, None, batch)
        return [(call.args[0], call.kwargs["step"]) for call in logger.log_metrics.call_args_list]

    optimizer, adamw = Optimizer(), torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    assert train(wrapped(optimizer)) == [(METRICS, step) for step in (1, 3, 5)]
    assert optimizer.asked == 3
    rms_grads = [metrics.get("adams/rms_grad/weight") for metrics, _ in train(optimizer, rms_grads_every=3)]
    assert rms_grads == [None, 2.0, 2.0]
    (metrics, _), *_ = train(adamw, Optimizer(), Optimizer())
    assert [name for name in metrics if "grad_norm" in name] == ["adams/0/grad_norm", "adams/1/grad_norm"]
    with pytest.raises(TypeError, match=r"got optimizers \['AdamW'\], wanted a FusedAdamS"):
        train(adamw)


def test_the_package_imports_no_trainer() -> None:
    code = "import sys, swd_fused, swd_fused.integrations; print({'transformers', 'lightning'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


class Posing:
    """Wraps an optimizer as Lightning Fabric does: of a subclass of its class, without any of its attributes."""

    def __init__(self, optimizer: FusedAdamS) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Posing", (Posing, FusedAdamS), {})

    @property
    def optimizer(self) -> FusedAdamS:
        return self._optimizer

    def step(self) -> None:
        self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_a_wrapper_that_poses_as_the_optimizer() -> None:
    """What it is told reaches the optimizer, and what it does is the optimizer's."""
    weights = []
    for wrap in (lambda optimizer: optimizer, Posing):
        param = torch.nn.Parameter(torch.arange(1.0, 4))
        optimizer = FusedAdamS([param], lr=0.1, schedule="lagged")
        wrapped = wrap(optimizer)
        wrapped.release_gradients()
        for step in range(4):
            (param * (1 + step)).square().sum().backward()
            wrapped.step()
            assert param.grad is None  # released
            wrapped.zero_grad()
        weights.append(param.detach())
        wrapped.max_grad_norm = None
        assert optimizer.max_grad_norm is None
        assert wrapped.metrics() == optimizer.metrics()
    assert torch.equal(*weights)


def new_per_tensor(module: str, **options: Any) -> list[FusedAdamS]:
    """Makes one optimizer for each of two tensors in a module of this name, as torchao does."""
    namespace: dict[str, Any] = {"__name__": module, "FusedAdamS": FusedAdamS}
    exec("def new_optimizer(param, **options): return FusedAdamS([{'params': param}], **options)", namespace)
    return [namespace["new_optimizer"](torch.nn.Parameter(torch.ones(3)), **options) for _ in range(2)]


@pytest.mark.parametrize("module", ["torchao.optim.cpu_offload", "torchao.prototype.low_bit_optim.cpu_offload"])
@pytest.mark.parametrize(
    ("options", "needed"),
    [({}, "the schedule's mean"), ({"decay": "decoupled", "max_grad_norm": 1.0}, "the gradients' norm")],
)
def test_one_optimizer_for_each_tensor_is_refused(module: str, options: dict[str, Any], needed: str) -> None:
    """What depends on nothing but the tensor is right, and whoever else makes many optimizers knows why."""
    with pytest.raises(ValueError, match=rf"CPUOffloadOptimizer.*{needed} would be that of a tensor.*CPUOffloadPolicy"):
        new_per_tensor(module, **options)
    assert len(new_per_tensor(module, decay="decoupled")) == 2
    assert len(new_per_tensor("my_models.cpu_offload", **options)) == 2

"""The examples, for real, on two ranks: each framework trains what one process does. And callbacks in real trainers.

Skipped where a framework is missing.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from swd_fused import FusedAdamS, param_groups

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 900  # against hangs: on two cores that ten other processes share, a run takes half a minute


def trained_on_one_process(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tiny_task: dict[str, Any] = {"__name__": "tiny_task"}
    exec((EXAMPLES / "tiny_task.py").read_text(), tiny_task)
    model = tiny_task["new_model"](dtype)
    options = {"lr": tiny_task["LR"], "max_grad_norm": tiny_task["MAX_GRAD_NORM"], **tiny_task["DECAY"]}
    optimizer = FusedAdamS(param_groups(model), backend="torch", **options)
    for x, y in torch.utils.data.DataLoader(tiny_task["dataset"](dtype), batch_size=tiny_task["BATCH"]):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()  # type: ignore[no-any-return]


def trained_by(path: Path, *command: str, seconds: float | None = SECONDS, **variables: str) -> dict[str, torch.Tensor]:
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        **variables,
    }
    with subprocess.Popen(
        [sys.executable, *command, "--save", str(path)],
        env=environment,
        cwd=path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            stdout, stderr = run.communicate(timeout=seconds)
        except BaseException:
            run.terminate()  # upon which the launcher ends its ranks; if it were killed, they would go on
            raise
    assert run.returncode == 0, stdout[-3000:] + stderr[-6000:]
    assert "rms gradient" in stdout or "torch" in command
    return torch.load(path)  # type: ignore[no-any-return]


def by_torchrun(example: str, *options: str, ranks: int = 2) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(EXAMPLES / example), *options]


def assert_as_on_one_process(weights: dict[str, torch.Tensor], dtype: torch.dtype, tolerance: float) -> None:
    reference = trained_on_one_process(dtype)
    assert set(weights) == set(reference)
    for name, value in reference.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=tolerance)


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    weights = trained_by(tmp_path / "weights", *by_torchrun("with_accelerate.py"))
    assert_as_on_one_process(weights, torch.float64, 1e-12)


def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    weights = trained_by(tmp_path / "weights", *by_torchrun("with_transformers.py"))
    assert_as_on_one_process(weights, torch.float64, 1e-12)


def test_run_clm(tmp_path: Path) -> None:
    """Trainer's own AdamW is the judge of ours on one rank, and one rank is that of two."""
    pytest.importorskip("transformers")
    torch_adamw, adamw, adams, adams_of_two = (
        trained_by(tmp_path / f"{kind}-{ranks}", *by_torchrun("with_run_clm.py", "--optimizer", kind, ranks=ranks))
        for kind, ranks in (("torch", 1), ("adamw", 1), ("adams", 1), ("adams", 2))
    )
    for name, value in torch_adamw.items():
        torch.testing.assert_close(adamw[name], value, rtol=0, atol=1e-10)
        torch.testing.assert_close(adams_of_two[name], adams[name], rtol=0, atol=1e-10)
        # Its calibration has not ended after so few steps, so AdamS has decayed as AdamW.
        torch.testing.assert_close(adams[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_lightning(tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("lightning")
    weights = trained_by(tmp_path / "weights", *by_torchrun("with_lightning.py", "--strategy", strategy))
    assert_as_on_one_process(weights, torch.float64, 1e-12)


@pytest.fixture(scope="module")
def deepspeed_kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a folder with the kernels that DeepSpeed compiles at its first use.

    That takes a minute, and many on a busy machine, so no limit applies. The folder is not the one that all programs of
    a user share: a build that was killed there has left a lock behind, and whoever comes later waits for it forever.
    """
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    command = by_torchrun("with_deepspeed.py", "--stage", "1", ranks=1)
    trained_by(folder / "weights", *command, seconds=None, TORCH_EXTENSIONS_DIR=str(folder))
    return str(folder)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_deepspeed(tmp_path: Path, stage: str, deepspeed_kernels: str) -> None:
    """In float32, as DeepSpeed keeps its weights."""
    command = by_torchrun("with_deepspeed.py", "--stage", stage)
    weights = trained_by(tmp_path / "weights", *command, TORCH_EXTENSIONS_DIR=deepspeed_kernels)
    assert_as_on_one_process(weights, torch.float32, 1e-6)


METRICS = {
    "adams/grad_norm",
    "adams/rms_grad",
    "adams/effective_weight_decay/decay",
    "adams/effective_weight_decay/no_decay",
    "adams/decay_timescale/decay",
    "adams/skipped_steps",
}


class LinearWithLoss(torch.nn.Linear):
    """As Trainer wants a model: it returns its own loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(super().forward(x), labels)}


@pytest.mark.filterwarnings("default")  # the framework's own
def test_metrics_in_the_logs_of_transformers(tmp_path: Path) -> None:
    """A reporter such as W&B's, which Trainer lists before the callbacks of users, has them too."""
    transformers = pytest.importorskip("transformers")
    from swd_fused.integrations.transformers import log_metrics

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        reported: ClassVar[list[set[str]]] = []

        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            self.reported.append(set(logs))

    model, data = LinearWithLoss(3, 2), torch.randn(64, 5)
    optimizer = FusedAdamS(param_groups(model, 1e-3), max_grad_norm=1.0)
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(str(tmp_path), max_grad_norm=0, logging_steps=2, max_steps=4, **quiet),
        train_dataset=[{"x": row[:3], "labels": row[3:]} for row in data],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        callbacks=[Reporter()],
    )
    log_metrics(trainer)
    trainer.train()
    assert [names >= METRICS for names in Reporter.reported] == [True, True, False]  # the last one is of the whole run
    last = trainer.state.log_history[1]
    assert last["adams/grad_norm"] == optimizer.grad_norm.item()
    assert last["adams/effective_weight_decay/no_decay"] == 0


def lightning_module(lightning: Any) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss = self.linear(batch[0]).square().mean()
            self.log("loss", loss)
            return loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return FusedAdamS(param_groups(self, 1e-3), max_grad_norm=1.0)

    return Module()


def fit_with_lightning(**options: Any) -> Any:
    """Trains for 8 batches with our callback, and returns the trainer."""
    lightning = pytest.importorskip("lightning")
    from swd_fused.integrations.lightning import MetricsCallback

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 3)), batch_size=4)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    common = {"accelerator": "cpu", "devices": 1, "callbacks": [MetricsCallback()], "max_epochs": 1, "logger": False}
    trainer = lightning.Trainer(**{**common, **quiet, **options})
    trainer.fit(lightning_module(lightning), data)
    return trainer


@pytest.mark.filterwarnings("default")  # the framework's own
def test_metrics_in_the_logs_of_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    trainer = fit_with_lightning(logger=logger, accumulate_grad_batches=2, log_every_n_steps=2)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert set(rows[0]) >= METRICS
    norms = {int(row["step"]): float(row["adams/grad_norm"]) for row in rows if row["adams/grad_norm"]}
    assert list(norms) == [int(row["step"]) for row in rows if row["loss"]] == [1, 3]
    assert norms[3] == trainer.optimizers[0].grad_norm.item()

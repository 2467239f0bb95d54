"""swd_fused.integrations.timm with the real timm: names, weight decay, layer decay, AdamC, the example.

Skipped where timm is missing. `make frameworks` puts it where `any_torchvision` finds it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.packaging import any_torchvision
from tests.packaging.test_frameworks import EXAMPLES, assert_as_on_one_process, trained_by

RUNNER = str(Path(any_torchvision.__file__))
LR, WEIGHT_DECAY, LAYER_DECAY, STEPS = 1e-2, 0.5, 0.7, 8

pytestmark = pytest.mark.filterwarnings("default")  # timm's own


@pytest.fixture(scope="module")
def timm() -> Any:
    any_torchvision.prepare()
    module = pytest.importorskip("timm")
    for name in ("optim", "scheduler"):
        importlib.import_module(f"timm.{name}")
    return module


@pytest.fixture(scope="module")
def create(timm: Any) -> Any:
    from swd_fused.integrations.timm import DESCRIPTIONS, register

    assert not set(timm.optim.list_optimizers()) & set(DESCRIPTIONS)
    for _ in range(2):
        register()
    assert dict(timm.optim.list_optimizers(list(DESCRIPTIONS), with_description=True)) == DESCRIPTIONS
    return timm.optim.create_optimizer_v2


def transformer(timm: Any, name: str = "vit_tiny_patch16_224") -> Any:
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.create_model(name, **size).double()


def names_of(model: torch.nn.Module, params: list[torch.Tensor]) -> set[str]:
    ids = set(map(id, params))
    return {name for name, param in model.named_parameters() if id(param) in ids}


def trained(timm: Any, model: Any, optimizer: Any, warmup: int = 3, steps: int = STEPS) -> Any:
    """Trains on random images, with timm's schedule, which multiplies by the groups' `lr_scale`."""
    options = {"num_epochs": 4 * STEPS, "warmup_epochs": warmup, "warmup_lr": 1e-3, "warmup_prefix": True}
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, "cosine", **options)
    data = torch.Generator().manual_seed(1)
    model.eval()  # of two heads that distil, the mean
    for step in range(steps):
        scheduler.step(step)
        optimizer.zero_grad()
        images = torch.randn(4, 3, 16, 16, generator=data, dtype=torch.float64)
        labels = torch.randint(5, (4,), generator=data)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def assert_same(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, param), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layer_decay", [None, LAYER_DECAY])
def test_adamw_is_timms(timm: Any, create: Any, layer_decay: float | None) -> None:
    options = {"lr": LR, "weight_decay": WEIGHT_DECAY, "layer_decay": layer_decay, "betas": [0.9, 0.95], "eps": 1e-6}
    models = []
    for name in ("adamw", "swdadamw"):
        model = transformer(timm)
        optimizer = create(model, name, **options)
        models.append(trained(timm, model, optimizer, steps=2 * STEPS))
        rates = {group["lr"] for group in optimizer.param_groups}
        assert len(rates) == (1 if layer_decay is None else 4)
    assert_same(*models)


@pytest.mark.parametrize("layer_decay", [None, LAYER_DECAY])
def test_weight_decay_of_adams_is_adamws(timm: Any, create: Any, layer_decay: float | None) -> None:
    """Until calibration ends steps are those of timm's AdamW. Then the schedule starts from there."""
    options = {"lr": LR, "weight_decay": WEIGHT_DECAY, "layer_decay": layer_decay}
    model, other = transformer(timm), transformer(timm)
    optimizer = create(model, "fusedadams", calibration_steps=STEPS, **options)
    trained(timm, model, optimizer)
    assert_same(model, trained(timm, other, create(other, "adamw", **options)))

    assert [round(decay, 12) for decay in optimizer.effective_weight_decay()] == [
        WEIGHT_DECAY if group["weight_decay"] else 0.0 for group in optimizer.param_groups
    ]
    lambdas = {group["weight_decay"] for group in optimizer.param_groups if group["weight_decay"]}
    assert lambdas == {WEIGHT_DECAY * (optimizer.exp_avg_sq_mean.sqrt().item() + 1e-8)}
    exempt = names_of(model, [p for g in optimizer.param_groups if not g["weight_decay"] for p in g["params"]])
    assert exempt == {n for n, p in model.named_parameters() if p.ndim < 2 or n in ("cls_token", "pos_embed")}


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("vit_tiny_patch16_224", {"head.weight"}),
        ("deit_tiny_distilled_patch16_224", {"head.weight", "head_dist.weight"}),
    ],
)
def test_adamc_corrects_all_but_the_classifier(timm: Any, create: Any, name: str, heads: set[str]) -> None:
    model = transformer(timm, name)
    options = {"lr": LR, "weight_decay": WEIGHT_DECAY, "layer_decay": LAYER_DECAY}
    groups = create(model, "swdadamc", **options).param_groups
    params = [param for group in groups for param in group["params"]]
    assert sorted(map(id, params)) == sorted(map(id, model.parameters()))
    decaying = names_of(model, [p for g in groups if g["weight_decay"] for p in g["params"]])
    corrected = names_of(model, [p for g in groups if g["corrected_decay"] for p in g["params"]])
    assert decaying - corrected == heads
    assert {name for name in decaying if name.endswith("qkv.weight")} <= corrected


def test_example(timm: Any, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    weights = trained_by(tmp_path / "weights", *launcher, RUNNER, str(EXAMPLES / "with_timm.py"))
    assert_as_on_one_process(weights, torch.float64, 1e-12)

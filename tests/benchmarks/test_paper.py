"""The paper's experiments: nets, optimizers, what is measured, lambda's choice on validation data, and the command."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_optimizer")
pytest.importorskip("sklearn")

from benchmarks.paper import cli
from benchmarks.paper.data import IMAGES, load_images
from benchmarks.paper.experiments import EXPERIMENTS, PRESETS, TABLE1, Search, planned
from benchmarks.paper.figures import DRAWINGS
from benchmarks.paper.models import IMAGE_MODELS
from benchmarks.paper.optimizers import OPTIMIZERS, adamw_weight_decay
from benchmarks.paper.run import Run
from benchmarks.paper.training import lesson_of
from benchmarks.paper.tuning import Planned, total_decay
from benchmarks.studies.rows import read_rows
from benchmarks.studies.store import Store
from benchmarks.studies.training import train

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
STORED = Path(__file__).parents[2] / "benchmarks/results/paper"
TASK = Run("noise", "small-resnet", 2, 8, (1,), held_out=8)
RUN = replace(TASK, held_out=0).run("AdamS", 5e-4, seed=3)


# --- Nets and optimizers

# With 10 classes of RGB images. The large ones are what is commonly given for these nets on CIFAR-10.
COUNTS = {
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "vgg16-bn": 14_728_266,
    "vgg16": 14_728_266 - 2 * 4224,  # BatchNorm has two numbers for each of the 4,224 channels
    "small-resnet": 19_954,
    "medium-resnet": 78_042,
    "large-resnet": 308_650,
    "small-vgg-bn": 17_930 + 2 * 104,
    "small-vgg": 17_930,
}


def parameters(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_image_models_have_the_papers_sizes(name: str) -> None:
    assert set(COUNTS) == set(IMAGE_MODELS)
    model = IMAGE_MODELS[name](3, 10, 32).eval()
    assert parameters(model) == COUNTS[name]
    with torch.no_grad():
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_is_decoupled_or_not_as_in_the_paper(name: str) -> None:
    """A weight far from zero with a gradient of zero: decoupled decay shrinks it, L2 enters the gradient."""
    param = nn.Parameter(torch.tensor([100.0, 1.0]))
    optimizer = OPTIMIZERS[name].build([param], 1e-2, 5e-4)
    param.grad = torch.tensor([0.0, 1e-3])
    optimizer.step()
    shrunk = 1 - param[0].item() / 100
    schedule = 5e-4 / (1e-3 / math.sqrt(2))
    decays = {"AdamW": 0.5, "AMSGradW": 0.5, "AdamS": schedule, "AMSGradS": schedule, "SGDS": 5e-3}
    if name in decays:
        assert shrunk == pytest.approx(1e-2 * decays[name], rel=1e-2)
        assert adamw_weight_decay(optimizer) == pytest.approx(decays[name], rel=1e-3)
    elif name.startswith("SGD"):
        assert shrunk == pytest.approx(1e-2 * 5e-4, rel=2e-2)
    else:  # Adam's step has the size of lr, whatever the gradient
        assert 0 < shrunk * 100 < 0.2
        assert math.isnan(adamw_weight_decay(optimizer))


# --- What is measured


def test_losses_and_norms_are_means_over_minibatches() -> None:
    """Against a second training loop, with torch's own optimizer and norms computed one by one."""
    run = replace(RUN, optimizer="AdamW", weight_decay=5e-4)
    points = train(lesson_of(run, None, CPU))
    data = load_images("noise", None, CPU, 0)
    torch.manual_seed(run.seed)
    model = IMAGE_MODELS["small-resnet"](1, 3, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)
    shuffle = torch.Generator().manual_seed(run.seed)
    for point, lr in zip(points, (1e-3, 1e-4), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        losses, squares = [], []
        model.train()
        for images, labels in data.train_batches(8, shuffle, augment=False):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            squares.append(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
            optimizer.step()
        assert point["current_lr"] == pytest.approx(lr)
        assert point["train_loss"] == pytest.approx(sum(losses) / 4, rel=1e-3)
        assert point["squared_grad_norm"] == pytest.approx(sum(squares) / 4, rel=1e-2)
        assert point["grad_norm"] == pytest.approx(sum(map(math.sqrt, squares)) / 4, rel=1e-2)
        assert point["summed_decay"] == pytest.approx(4 * lr * 0.5)
        model.eval()
        with torch.no_grad():
            wrong = (model(data.test_images).argmax(1) != data.test_labels).double().mean()
        assert point["test_error"] == pytest.approx(float(wrong), abs=0.07)  # one of 16 may tip over by rounding


# --- The choice of lambda

SEARCH = Search(TASK, dict.fromkeys(("Adam", "AdamW", "AdamS"), (1e-4, 3e-4, 1e-3, 3e-3)))
SEEDS = (0, 1, 2)
Result = Mapping[str, Any]


def made_up(run: Run, error: float, total: float) -> dict[str, Any]:
    last = {"test_error": error, "test_loss": math.nan, "summed_decay": total / 2}
    return {"run": asdict(run), "points": [last, last]}


def weak(run: Run) -> float:
    """AdamS removes a tenth of what AdamW does with the same lambda, and less than in proportion to lambda."""
    return 40 * run.weight_decay**0.9 if run.optimizer == "AdamS" else 1000 * run.weight_decay


def carried_out(best: dict[str, float]) -> tuple[list[Planned], list[Run]]:
    """Plans until nothing is missing. Returns the last plan, and the runs in the order in which they were asked for."""
    results: dict[str, Any] = {}
    while True:
        plan = SEARCH.planned(SEEDS, results)
        run = next((run for run, _ in plan if run.key not in results), None)
        if run is None:
            return plan, [Run(**{**r["run"], "milestones": (1,)}) for r in results.values()]
        distance = abs(math.log10(run.weight_decay / best[run.optimizer])) if run.weight_decay else math.inf
        results[run.key] = made_up(run, distance, weak(run))


def of_role(plan: list[Planned], role: str) -> set[tuple[str, float, int]]:
    return {(run.optimizer, run.weight_decay, run.seed) for run, its in plan if its == role}


def test_lambda_is_chosen_by_validation_alone_and_run_with_all_seeds() -> None:
    best = {"Adam": 3e-4, "AdamW": 1e-3, "AdamS": 1e-3}
    plan, asked = carried_out(best)
    assert of_role(plan, "tuned") == {(*each, seed) for each in best.items() for seed in SEEDS}
    assert of_role(plan, "no decay") == {("Adam", 0.0, seed) for seed in SEEDS}
    assert len(of_role(plan, "tuning")) == 12
    for run, role in plan:
        assert (run.part == "validation") == (role in ("tuning", "matching"))
        assert run.held_out == 8
    parts = [run.part for run in asked]
    assert parts == sorted(parts, reverse=True)  # nothing is tested before all is chosen
    [decay] = {decay for _, decay, _ in of_role(plan, "equal decay")}
    assert 40 * decay**0.9 == pytest.approx(1.0, rel=0.02)  # AdamW's at 1e-3


# --- Experiments and the command


def test_the_paper_preset_has_the_papers_settings() -> None:
    paper = PRESETS["paper"]
    table1 = [run for run, _ in planned(paper["table1"], SEEDS, {})]
    settings = {run.task: (run.epochs, run.batch_size, run.milestones, run.weight_decay, run.augment) for run in table1}
    assert settings == {
        **dict.fromkeys(("cifar10/resnet18", "cifar10/vgg16-bn"), (200, 128, (80, 160), 5e-4, True)),
        "cifar100/resnet34": (200, 128, (100, 150), 5e-4, True),
    }
    assert {run.optimizer for run in table1} == set(TABLE1)
    assert len(table1) == 3 * 3 * 12
    runs = {name: [run for run, _ in planned(experiment, SEEDS, {})] for name, experiment in paper.items()}
    assert {run.weight_decay for run in runs["table2"]} == {1e-4}
    assert {(run.epochs, run.cosine) for run in runs["cosine"]} == {(210, (14, 2))}
    assert all(len(set(of)) == len(of) for of in runs.values())
    for name, data in (("real", "cifar10-subset"), ("quick", "digits")):
        assert {run.data for of in PRESETS[name].values() for run, _ in planned(of, SEEDS, {})} == {data}


def test_every_experiment_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(EXPERIMENTS) == set(DRAWINGS) == set(PRESETS["tiny"])
    arguments = ["all", "--preset", "tiny", "--seeds", "1", "--workers", "1", "--device", "cpu", "--out", str(tmp_path)]
    cli.main(arguments)
    runs = Store(tmp_path / "runs.jsonl").read()
    trained = [run["key"] for run in runs]
    assert len(trained) == len(set(trained))  # experiments share their runs
    for name in EXPERIMENTS:
        rows = read_rows(tmp_path / f"{name}.csv")
        assert all(math.isfinite(row["train_loss"]) and row["date"] for row in rows)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / f"{name}.csv") in capsys.readouterr().out or name != "tuned"
    rows = read_rows(tmp_path / "tuned.csv")
    assert {row["role"] for row in rows} == {"tuning", "matching", "tuned", "equal decay", "no decay"}
    matched = {row["weight_decay"] for row in rows if row["role"] == "equal decay"}
    [adamw] = {row["weight_decay"] for row in rows if row["role"] == "tuned" and row["optimizer"] == "AdamW"}
    totals = [
        total_decay(run)
        for run in runs
        if run["run"]["part"] == "validation" and run["run"]["data"] == "noise" and run["run"]["augment"]
        if (run["run"]["optimizer"], run["run"]["weight_decay"]) in {("AdamW", adamw), *(("AdamS", d) for d in matched)}
    ]
    assert max(totals) == pytest.approx(min(totals), rel=0.02)
    written = (tmp_path / "tuned.csv").read_bytes()
    cli.main(arguments)  # nothing is left to do
    assert (tmp_path / "tuned.csv").read_bytes() == written


@pytest.mark.parametrize(
    "stored", [path for path in sorted(STORED.rglob("*.csv")) if path.stem in EXPERIMENTS], ids=str
)
def test_figure_is_drawn_from_the_stored_csv(stored: Path, tmp_path: Path) -> None:
    shutil.copy(stored, tmp_path)
    cli.main([stored.stem, "--draw", "--out", str(tmp_path)])
    assert (tmp_path / f"{stored.stem}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / stored.name).read_bytes() == stored.read_bytes()


def test_tuning_never_reads_the_test_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """With test data that would break any run that looks at them, tuning gives the same numbers."""
    search, data = PRESETS["tiny"]["tuned"], IMAGES["noise"](None)
    assert isinstance(search, Search)
    runs = [run for run, role in search.planned(SEEDS, {}) if role == "tuning"]
    results = []
    for images in (data, replace(data, test_images=torch.full((16, 1, 8, 8), math.nan))):
        load_images.cache_clear()
        monkeypatch.setitem(IMAGES, "noise", lambda root, images=images: images)
        results.append(repr([train(lesson_of(run, None, CPU)) for run in runs]))
    load_images.cache_clear()
    assert results[0] == results[1]


def test_missing_data_are_noticed_before_anything_is_trained(tmp_path: Path) -> None:
    arguments = ["--preset", "paper", "--device", "cpu", "--out", str(tmp_path)]
    for task, message in (("cifar10/resnet18", r"CIFAR-10.*--data DIR"), ("cifar100/resnet34", "CIFAR-100")):
        with pytest.raises(SystemExit, match=message):
            cli.main(["table1", "--task", task, *arguments])
    with pytest.raises(SystemExit):
        cli.main(["table1", "--task", "cifar10/none", *arguments])

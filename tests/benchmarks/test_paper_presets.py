"""Which runs the presets have."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_optimizer")
pytest.importorskip("sklearn")

from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.presets import PAPER, PRESETS, QUICK, REAL, TABLE1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_its_experiments(preset: str) -> None:
    tuned = {"tuned", "tuned-unaugmented", "tuned-lstm"}
    wanted = {"quick": set(EXPERIMENTS) - tuned, "real": tuned | {"gradnorm"}}.get(preset, set(EXPERIMENTS))
    for name, experiment in EXPERIMENTS.items():
        runs = experiment.runs(PRESETS[preset])
        assert bool(runs) == (name in wanted), name
        assert len(set(runs)) == len(runs), name


def test_the_paper_preset_has_the_papers_settings() -> None:
    runs = EXPERIMENTS["table1"].runs(PAPER)
    tasks = {run.task for run in runs}
    assert tasks == {
        "cifar10/resnet18",
        "cifar10/vgg16-bn",
        "cifar100/resnet34",
        "cifar100/densenet121",
        "cifar100/googlenet",
        "imagenet/resnet50",
    }
    assert {run.optimizer for run in runs} == set(TABLE1)
    for run in runs:
        assert run.weight_decay == 5e-4
        assert run.augment
        expected = {
            "cifar10": (200, 128, (80, 160)),
            "cifar100": (200, 128, (100, 150)),
            "imagenet": (90, 256, (30, 60)),
        }[run.data]
        assert (run.epochs, run.batch_size, run.milestones) == expected
    assert {run.weight_decay for run in EXPERIMENTS["table2"].runs(PAPER)} == {1e-4}
    assert all((run.epochs, run.cosine) == (210, (14, 2)) for run in EXPERIMENTS["cosine"].runs(PAPER))
    assert {run.batch_size for run in EXPERIMENTS["lstm"].runs(PAPER)} == {20}
    table3 = {(run.epochs, run.weight_decay) for run in EXPERIMENTS["coupling"].runs(PAPER) if run.optimizer == "SGD"}
    assert {(50, 0.02), (50, 0.002), (2000, 5e-5)} <= table3
    assert all(len({run.seed for run in e.runs(PAPER)}) == 3 for e in EXPERIMENTS.values() if not e.search(PAPER))


def test_the_real_preset_is_on_the_papers_data() -> None:
    runs = [run for experiment in EXPERIMENTS.values() for run in experiment.runs(REAL)]
    assert {run.data for run in runs} == {"cifar10-subset", "penn-treebank-4000"}
    assert {run.optimizer for run in EXPERIMENTS["tuned"].runs(REAL)} == {"Adam", "AdamW", "AdamS"}


def test_the_quick_preset_is_on_real_data_with_three_seeds() -> None:
    for experiment in EXPERIMENTS.values():
        runs = experiment.runs(QUICK)
        if not runs:
            continue
        assert {run.data for run in runs} <= {"fashion-mnist", "digits", "python-documentation"}
        assert {run.seed for run in runs} == {0, 1, 2}

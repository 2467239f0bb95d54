"""A training run that ends with eigenvalues of the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.paper.checkpoint import Checkpoint
from benchmarks.paper.hessian import top_eigenvalues
from benchmarks.paper.kept_net import KeptNet
from benchmarks.paper.run import Run
from benchmarks.paper.training import Trained, data_of, new_model, train_model


def train_with_eigenvalues(
    run: Run,
    root: Path | None,
    device: torch.device,
    after_epoch: Callable[[], None],
    kept: KeptNet,
    checkpoint: Checkpoint,
) -> Trained:
    """A net that is kept is not trained again."""
    data, effort = data_of(run, root, device), checkpoint.effort
    model = new_model(run, data, device)
    found = kept.load(model)
    if found is None:
        with effort.counted():
            epochs = train_model(run, model, data, device, after_epoch, checkpoint)
        kept.save(model, epochs, effort)
    else:
        epochs, spent = found
        effort.add(spent)
        for _ in epochs:
            after_epoch()
    with effort.counted():
        images, labels = next(data.train_batches(run.hessian_images, torch.Generator().manual_seed(0), augment=False))
        eigenvalues = top_eigenvalues(model, images, labels, run.eigenvalues, run.seed)
    return Trained(epochs, eigenvalues)

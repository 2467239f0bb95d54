"""A training run that ends with eigenvalues of the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.paper.data import load_images
from benchmarks.paper.effort import Effort
from benchmarks.paper.hessian import top_eigenvalues
from benchmarks.paper.kept_net import KeptNet
from benchmarks.paper.run import Run
from benchmarks.paper.training import Trained, new_model, train_model


def train_with_eigenvalues(
    run: Run, root: Path | None, device: torch.device, after_epoch: Callable[[], None], kept: KeptNet
) -> tuple[Trained, Effort]:
    """A net that is kept is not trained again."""
    data = load_images(run.data, root, device, run.limit)
    model = new_model(run, data, device)
    found = kept.load(model)
    if found is None:
        effort = Effort()
        with effort.counted():
            epochs = train_model(run, model, data, after_epoch)
        kept.save(model, epochs, effort)
    else:
        epochs, effort = found
        for _ in epochs:
            after_epoch()
    with effort.counted():
        images, labels = next(data.train_batches(run.hessian_images, torch.Generator().manual_seed(0), augment=False))
        eigenvalues = top_eigenvalues(model, images, labels, run.eigenvalues, run.seed)
    return Trained(epochs, eigenvalues), effort

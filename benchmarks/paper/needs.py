"""What runs need that may not be here, looked for before the first of them is trained: that may take days."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.paper.data import check_images
from benchmarks.paper.language_training import both_parts, text_of
from benchmarks.paper.models import LANGUAGE_MODELS, check_model
from benchmarks.paper.run import Run


def check_needs(runs: Sequence[Run], root: Path | None) -> None:
    """Each data set is read once. Raises DataError for the first that is missing or broken."""
    for model in dict.fromkeys(run.model for run in runs):
        check_model(model)
    for name in dict.fromkeys(run.data for run in runs if run.model not in LANGUAGE_MODELS):
        check_images(name, root)
    of_text = [run for run in runs if run.model in LANGUAGE_MODELS]
    for run in {(run.data, run.limit, run.held_out, run.part, run.batch_size): run for run in of_text}.values():
        both_parts(run, text_of(run, root, torch.device("cpu")))

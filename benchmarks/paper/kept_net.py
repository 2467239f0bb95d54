"""A trained net on disk until its eigenvalues are there.

They may take more memory than there is, which must not cost the training before them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from benchmarks.conditions import write_whole
from benchmarks.paper.effort import Effort
from benchmarks.paper.epoch import Epoch


class KeptNet:
    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, model: nn.Module, epochs: list[Epoch], effort: Effort) -> None:
        content = {
            "weights": model.state_dict(),
            "epochs": [asdict(epoch) for epoch in epochs],
            "effort": asdict(effort),
        }
        write_whole(self.path, lambda path: torch.save(content, path))

    def load(self, model: nn.Module) -> tuple[list[Epoch], Effort] | None:
        """Into `model`."""
        if not self.path.exists():
            return None
        content = torch.load(self.path, map_location="cpu", weights_only=True)
        model.load_state_dict(content["weights"])
        return [Epoch(**epoch) for epoch in content["epochs"]], Effort(**content["effort"])

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

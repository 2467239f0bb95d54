"""Files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_whole(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    torch.save(content, partial)
    os.replace(partial, path)

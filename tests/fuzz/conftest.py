from __future__ import annotations

from tests.device import DEVICE

if DEVICE != "cpu":  # it compares on the CPU
    collect_ignore_glob = ["test_*"]

from __future__ import annotations

import os

if "VIRTUAL_GPU_DRIVER" not in os.environ:  # these need what `run` sets up
    collect_ignore_glob = ["test_*"]

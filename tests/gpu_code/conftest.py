from __future__ import annotations

import os

# What is compiled needs a Triton that was imported without its interpreter, and the other tests need one that was
# imported with it: `make test` runs these by themselves.
if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*"]

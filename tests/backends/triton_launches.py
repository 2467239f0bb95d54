"""Triton's step as one launch, or split: its passes one by one, of several programs where there are enough blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from swd_fused.backends.triton import backend, launch


@contextmanager
def launches(split: bool) -> Iterator[None]:
    if not split:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "INTERPRETED_PROGRAMS", 3)
        patch.setattr(backend, "can_wait", lambda *_: False)
        launch.programs_on.cache_clear()
        yield
    launch.programs_on.cache_clear()

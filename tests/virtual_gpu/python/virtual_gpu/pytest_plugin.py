"""Makes each test wait for what it launched, and fail if any of it failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import driver


@pytest.fixture(autouse=True)
def _nothing_failed_on_the_virtual_gpu() -> Iterator[None]:
    driver.forget_errors()
    yield
    driver.run_all()
    failed = list(driver.errors)
    driver.forget_errors()
    assert not failed, f"{len(failed)} operations failed on the virtual GPU; the first: {failed[0]!r}"

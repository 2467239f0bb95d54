"""Sections that fail, hang and crash. Without torch, whose import can take longer than their limits."""

from __future__ import annotations

import faulthandler
import os
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace


def result(text: str, outcome: str = "ok") -> SimpleNamespace:
    return SimpleNamespace(text=text, outcome=outcome, problem=None, rows={})


def fails() -> Iterator[SimpleNamespace]:
    yield result("The first half.")
    warnings.warn("something is odd", stacklevel=1)
    raise ZeroDivisionError("no | peak")


def hangs() -> Iterator[SimpleNamespace]:
    yield result("The first half.")
    threading.Event().wait()


def hangs_and_ignores_its_limit() -> Iterator[SimpleNamespace]:
    faulthandler.cancel_dump_traceback_later()
    yield from hangs()


def aborts() -> Iterator[SimpleNamespace]:
    yield result("The first half.")
    os.abort()


def is_well() -> Iterator[SimpleNamespace]:
    yield result("All is well.", "agrees")

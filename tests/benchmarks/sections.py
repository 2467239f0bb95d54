"""Sections that fail, hang and crash. Without torch, whose import can take longer than their limits."""

import faulthandler
import os
import threading
import warnings


def fails() -> None:
    print("The first half.", flush=True)
    warnings.warn("something is odd", stacklevel=1)
    raise ZeroDivisionError("no | peak")


def hangs() -> None:
    print("The first half.", flush=True)
    threading.Event().wait()


def hangs_and_ignores_its_limit() -> None:
    faulthandler.cancel_dump_traceback_later()
    hangs()


def aborts() -> None:
    print("The first half.", flush=True)
    os.abort()


def is_well() -> None:
    print("agrees")

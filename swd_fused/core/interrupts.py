"""Ctrl-C in the middle of a step."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the conversions to enums that `signal` adds, which take longer than the calls
from threading import current_thread, main_thread
from typing import Any


class DeferredInterrupts:
    """Puts off Ctrl-C from when it is made until `deliver`: in the middle of a step some parameters would be updated
    and some not, or all of them, but the step not yet counted.

    The handler of SIGINT, which raises KeyboardInterrupt unless the user has set another, is called then. Only the main
    thread gets signals. To exchange handlers takes 1.3 us; a mask of signals would not keep them from threads of torch,
    through which they reach the main thread all the same.
    """

    __slots__ = ("_handler", "_received")

    def __init__(self) -> None:
        handler: Any = _signal.getsignal(_signal.SIGINT)
        self._handler = handler if callable(handler) and current_thread() is main_thread() else None
        self._received: tuple[Any, ...] | None = None
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._receive)

    def _receive(self, *signal: Any) -> None:
        self._received = signal

    def deliver(self) -> None:
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._handler)
            if self._received is not None:
                self._handler(*self._received)

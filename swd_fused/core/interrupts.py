"""Defers Ctrl-C until a step has ended."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without `signal`'s conversions to enums, which take longer than the calls
from threading import current_thread, main_thread
from typing import Any


class DeferredInterrupts:
    """Defers Ctrl-C from construction until `deliver`. An interrupt within a step could leave only some parameters
    updated, or all of them without the step being counted.

    `deliver` calls the handler of SIGINT, which raises KeyboardInterrupt unless the user has set another. Only the main
    thread runs signal handlers. Exchanging handlers takes 1.3 us. A signal mask would not help: torch's threads would
    still receive the signal and pass it to the main thread.
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

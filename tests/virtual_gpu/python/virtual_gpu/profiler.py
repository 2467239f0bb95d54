"""Adds the names of Triton's launches to the events of torch.profiler, whose own source, CUPTI, needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.profiler.profiler import _KinetoProfile

from .driver import launches


def add_launches() -> None:
    start, stop, events = _KinetoProfile.start_trace, _KinetoProfile.stop_trace, _KinetoProfile.events

    def start_trace(self: Any) -> None:
        start(self)
        self._first_launch = len(launches)

    def stop_trace(self: Any) -> None:
        self._launches = launches[self._first_launch :]
        stop(self)

    def all_events(self: Any) -> list[Any]:
        return [*events(self), *(SimpleNamespace(name=launch.name) for launch in self._launches)]

    _KinetoProfile.start_trace, _KinetoProfile.stop_trace, _KinetoProfile.events = start_trace, stop_trace, all_events

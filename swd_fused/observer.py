"""The base class of observers, which are told of finished steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swd_fused.core.step import Step

Groups = Sequence[dict[str, Any]]


class Observer:
    """Observes finished steps, and may warn or change groups before the next one."""

    needs_small_mean = False  # whether `note` is needed only for steps whose mean is small enough for a warning
    needs_all_steps = True  # whether Ctrl-C must wait until it was told of a step
    is_due = False  # whether `speak` has something to do

    def concerns(self, groups: Groups, options: Any) -> bool:
        """Returns whether to observe steps with these groups and options."""
        raise NotImplementedError

    def speak(self, groups: Groups) -> None:
        """Warns, or changes groups, before a step that has written nothing yet."""

    def note(self, step: Step) -> None:
        """Notes a step that has been taken or skipped."""

    def refuse_capture(self, step: Step) -> None:
        """Raises if a step that this observes cannot be captured in a CUDA graph."""

    def restart(self, entries: Groups, is_fresh: bool) -> None:
        """Forgets the steps so far. `entries` are the defaults and the groups; `is_fresh` says that training begins."""

"""Every order in which programs can pass through a launch, and launch after launch: the counter's logic alone.

As in kernels/grid.py: at each meeting but the last a program arrives with one atomic addition and
polls until the counter says that all have come; at the last meeting it arrives, and whoever is last sets the counter
back to zero. All of these are atomic, so an execution is an order of them, and for a few programs all can be tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# What a program does next: arrive at meeting n, or wait there; then reset the counter if it was last; then nothing.
ARRIVE, WAIT, RESET, DONE = "arrive", "wait", "reset", "done"
State = tuple[str, int]


@dataclass(frozen=True)
class Protocol:
    """`target` is what programs wait for at a meeting, by its number from 1 on and the number of programs.
    `finds_itself_last` is asked with the counter before the arrival at the last meeting."""

    target: Callable[[int, int], int] = lambda meeting, programs: meeting * programs
    finds_itself_last: Callable[[int, int, int], bool] = lambda before, meeting, programs: (
        before == meeting * programs - 1
    )
    resets: bool = True


def failure(protocol: Protocol, launches: list[int], meetings: int, start: int = 0) -> str | None:
    """The first thing that can go wrong in any order; `launches` has the number of programs of each."""
    starts = {start}
    for launch, programs in enumerate(launches):
        ends: set[int] = set()
        for value in starts:
            wrong = _explore(protocol, programs, meetings, value, ends)
            if wrong:
                return f"launch {launch} of {programs} programs from {value}: {wrong}"
        starts = ends
    return None


def _explore(protocol: Protocol, programs: int, meetings: int, start: int, ends: set[int]) -> str | None:
    first = (start, ((ARRIVE, 1),) * programs, 0)
    seen, todo = {first}, [first]
    while todo:
        counter, states, finished = todo.pop()
        following = []
        for i, (does, meeting) in enumerate(states):
            new_counter, new, finishes = counter, None, finished
            if does == ARRIVE and meeting < meetings:
                new_counter, new = counter + 1, (WAIT, meeting)
            elif does == ARRIVE:
                new_counter, new = counter + 1, (DONE, meeting)
                if protocol.finds_itself_last(counter, meeting, programs):
                    if any(
                        state == (ARRIVE, meeting) or state[1] < meeting for j, state in enumerate(states) if j != i
                    ):
                        return "a program finishes the work before all have arrived"
                    finishes += 1
                    new = (RESET if protocol.resets else DONE, meeting)
            elif does == WAIT and counter >= protocol.target(meeting, programs):
                if any(state[1] < meeting or state == (ARRIVE, meeting) for state in states):
                    return "a program passes before all have arrived"
                new = (ARRIVE, meeting + 1)
            elif does == RESET:
                new_counter, new = 0, (DONE, meeting)
            if new is not None:
                following.append((new_counter, (*states[:i], new, *states[i + 1 :]), finishes))
        if not following:
            if any(does != DONE for does, _ in states):
                return "a program waits for ever"
            if finished != 1:
                return f"{finished} programs finish the work"
            ends.add(counter)
        todo += [s for s in following if s not in seen]
        seen.update(following)
    return None

"""Every order in which programs can pass the grid barrier, launch after launch: the counter's logic alone.

A program arrives with one atomic addition and then polls until the counter says that all have come. Both are atomic, so
an execution is an order of these steps, and for a few programs all orders can be tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Counter:
    """`arrive` returns the new counter and what the program keeps; `may_pass` is asked with the counter and that."""

    arrive: Callable[[int, int, int], tuple[int, int]]  # counter, program, number of programs
    may_pass: Callable[[int, int], bool]


def next_multiple(bits: int, *, signed_difference: bool = False) -> Counter:
    """The fused kernel's counter, in so many bits: wait for the next multiple of the number of programs."""
    size = 2**bits

    def arrive(counter: int, program: int, programs: int) -> tuple[int, int]:
        return (counter + 1) % size, (counter // programs + 1) * programs % size

    def may_pass(counter: int, target: int) -> bool:
        return (counter - target) % size < size // 2 if signed_difference else counter >= target

    return Counter(arrive, may_pass)


def failure(counter: Counter, launches: list[int], start: int = 0) -> str | None:
    """The first thing that can go wrong in any order; `launches` has the number of programs of each."""
    starts = {start}
    for launch, programs in enumerate(launches):
        ends: set[int] = set()
        for value in starts:
            wrong = _explore(counter, programs, value, ends)
            if wrong:
                return f"launch {launch} of {programs} programs from {value}: {wrong}"
        starts = ends
    return None


def _explore(counter: Counter, programs: int, start: int, ends: set[int]) -> str | None:
    """A program's state: None before it arrives, then what it waits for, then "passed"."""
    first = (start, (None,) * programs)
    seen, todo = {first}, [first]
    while todo:
        value, states = todo.pop()
        following = []
        for i, state in enumerate(states):
            if state is None:
                new_value, target = counter.arrive(value, i, programs)
                following.append((new_value, (*states[:i], target, *states[i + 1 :])))
            elif state != "passed" and counter.may_pass(value, state):
                if None in states:
                    return "a program passes before all have arrived"
                following.append((value, (*states[:i], "passed", *states[i + 1 :])))
        if not following:
            if any(state != "passed" for state in states):
                return "a program waits for ever"
            ends.add(value)
        todo += [s for s in following if s not in seen]
        seen.update(following)
    return None

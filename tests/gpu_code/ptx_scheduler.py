"""Which lanes execute next.

Without a seed: those at the lowest instruction, which brings lanes together again after a branch. A loop that waits for
code behind it would never end that way, so after LONGEST_LOOP turns of a loop another program has its turn.
With a seed: a random warp for a random number of instructions, so that programs and warps meet in many orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ptx_state import WARP, Execute, Lanes, State
from .ptx_types import Array

LONGEST_LOOP = 64
LONGEST_TURN = 1000  # instructions of a program that is let in between
LONGEST_RANDOM_TURN = 64
NOT_RUNNING = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Step:
    kind: str  # "compute", "branch", "barrier" or "return"
    text: str
    guard: int | None = None
    guard_negated: bool = False
    is_float64: bool = False
    execute: Execute | None = None
    target: int = -1


class Scheduler:
    def __init__(self, steps: list[Step], state: State, threads: int, seed: int | None, most: int) -> None:
        self.steps = steps
        self.state = state
        self.threads = threads
        self.random = None if seed is None else np.random.default_rng(seed)
        self.instructions_left = most
        lanes = state.lane.size
        self.at = np.zeros(lanes, np.int64)  # the next instruction, or NOT_RUNNING
        self.resume_at = np.zeros(lanes, np.int64)
        self.waiting = np.zeros(lanes, bool)
        self.program_in_turn = 0

    def run(self) -> None:
        stuck = False
        while True:
            if (self.at == NOT_RUNNING).all():
                if self.waiting.any():
                    raise RuntimeError("deadlock: some threads of a program wait at a barrier, the others are gone")
                return
            if self.random is not None:
                self._turn_of_random_warp()
            elif stuck:
                self._turn_of_next_program()
                stuck = False
            else:
                stuck = self._turn(slice(0, self.at.size), NOT_RUNNING)

    def _turn_of_random_warp(self) -> None:
        runnable = np.flatnonzero((self.at.reshape(-1, WARP) != NOT_RUNNING).any(1))
        start = int(self.random.choice(runnable)) * WARP
        self._turn(slice(start, start + WARP), int(self.random.integers(1, LONGEST_RANDOM_TURN)))

    def _turn_of_next_program(self) -> None:
        programs = self.at.size // self.threads
        for _ in range(programs):
            self.program_in_turn = (self.program_in_turn + 1) % programs
            own = slice(self.program_in_turn * self.threads, (self.program_in_turn + 1) * self.threads)
            if (self.at[own] != NOT_RUNNING).any():
                self._turn(own, LONGEST_TURN)
                return

    def _turn(self, among: slice, longest: int) -> bool:
        """Run the lowest lanes among these until they part, meet others or stop. True if they loop without end."""
        at = self.at[among]
        pc = int(at.min())
        lowest = at == pc
        lanes = _compact(np.flatnonzero(lowest) + among.start)
        others = at[~lowest]
        meeting = int(others.min()) if others.size else NOT_RUNNING
        warps = np.unique(self.state.warp[lanes]).size
        executed = loops = float64 = 0
        while executed < longest:
            step = self.steps[pc] if pc < len(self.steps) else Step("return", "the end of the code")
            executed += 1
            float64 += step.is_float64
            active = lanes if step.guard is None else self._guarded(lanes, step)
            pc += 1
            if active is None:
                pass
            elif step.kind == "compute":
                step.execute(self.state, active)
            elif step.kind == "branch":
                if active is not lanes:
                    self.at[lanes] = pc
                    self.at[active] = step.target
                    break
                loops += step.target < pc
                pc = step.target
            else:
                self.at[lanes] = pc
                self._stop(step, active, pc)
                break
            if pc >= meeting or loops > LONGEST_LOOP:
                self.at[lanes] = pc
                break
        else:
            self.at[lanes] = pc
        self.state.statistics.warp_instructions += executed * warps
        self.state.statistics.float64_instructions += float64 * warps
        self.instructions_left -= executed
        if self.instructions_left < 0:
            raise RuntimeError(f"too many instructions: the lanes are at {self.steps[pc].text}")
        return loops > LONGEST_LOOP

    def _guarded(self, lanes: Lanes, step: Step) -> Lanes | None:
        """The lanes whose predicate holds: the same object if all, None if none."""
        holds = self.state.registers[step.guard][lanes]
        if step.guard_negated:
            holds = ~holds
        count = np.count_nonzero(holds)
        if count == holds.size:
            return lanes
        return self.state.lane[lanes][holds] if count else None

    def _stop(self, step: Step, lanes: Lanes, resume_at: int) -> None:
        self.at[lanes] = NOT_RUNNING
        if step.kind == "barrier":
            self.waiting[lanes] = True
            self.resume_at[lanes] = resume_at
        self._open_barriers()

    def _open_barriers(self) -> None:
        """A barrier opens when no thread of the program runs any more; those that returned do not count."""
        arrived = (self.at.reshape(-1, self.threads) == NOT_RUNNING).all(1)
        opened = np.repeat(arrived, self.threads) & self.waiting
        if opened.any():
            self.at[opened] = self.resume_at[opened]
            self.waiting[opened] = False
            for own in self.state.lane.reshape(-1, self.threads) if self.state.races else ():
                if opened[own].any():
                    self.state.races.barrier(own[opened[own]])


def _compact(lanes: Array) -> Lanes:
    """Neighbouring lanes as a slice: registers are then read without a copy."""
    first, last = int(lanes[0]), int(lanes[-1])
    return slice(first, last + 1) if last - first + 1 == lanes.size else lanes

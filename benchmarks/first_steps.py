"""Times first steps of many small tensors, and loading their state with the step after it, against AdamW fused.

Here each tensor is described, checked and given state, in Python. Times are the thread's, so that other processes do
not add to them; optimizers are made, and garbage is collected, before each turn's time begins.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from time import thread_time
from typing import Any

from benchmarks.step_times.contenders import CONTENDERS, PEER, parameters
from benchmarks.step_times.harness import Case, Step, carry_out, command, timed

ELEMENTS = 16  # of each tensor
REPEATS = {1000: 41, 10_000: 9}
MAKES = {name: CONTENDERS[name].make for name in (PEER, "FusedAdamS exact (cpu)")}


def first_step(make: Callable[[Any], Any], params: Any) -> Callable[[], Step]:
    """Returns what makes an optimizer and returns its first step."""
    return lambda: make(params).step  # type: ignore[no-any-return]


def load(make: Callable[[Any], Any], params: Any) -> Callable[[], Step]:
    """Returns what makes an optimizer that has stepped and returns its loading of state, with the step after it."""

    def stepped() -> Any:
        optimizer = make(params)
        optimizer.step()
        return optimizer

    saved = stepped().state_dict()

    def prepared() -> Step:
        optimizer = stepped()

        def load_and_step() -> None:
            optimizer.load_state_dict(saved)
            optimizer.step()

        return load_and_step

    return prepared


def timed_when_prepared(prepare: Callable[[], Any]) -> float:
    step = prepare()
    gc.collect()
    return timed(step, clock=thread_time)


def case_of(title: str, prepared: Callable[..., Callable[[], Step]], tensors: int, repeats: int) -> Case:
    return Case(
        f"{title} of {tensors:,} tensors",
        {"work": title, "tensors": tensors},
        {name: partial(prepared, make) for name, make in MAKES.items()},
        repeats,
        work=lambda: parameters([(ELEMENTS,)] * tensors),
        timer=timed_when_prepared,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = command("first_steps", __doc__).parse_args(arguments)
    options.threads = 1
    sizes = {5: 5} if options.quick else REPEATS
    cases = [case_of("first step", first_step, tensors, repeats) for tensors, repeats in sizes.items()]
    tensors, repeats = next(iter(sizes.items()))
    carry_out(options, [*cases, case_of("load", load, tensors, repeats)])


if __name__ == "__main__":
    main()

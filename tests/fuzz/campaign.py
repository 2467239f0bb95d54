"""Cases one after the other, and what is said of those that fail."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from swd_fused import outliers
from swd_fused.state import eight_bit
from tests.device import DEVICE  # first: it has Triton's kernels interpreted
from tests.fuzz.cases import MEASURED_STEPS, Case, draw
from tests.fuzz.compare import DifferenceError
from tests.fuzz.session import Session

assert DEVICE == "cpu", "the fuzz compares on the CPU"


class Failure(NamedTuple):
    case: Case
    triton: bool
    difference: str

    def __str__(self) -> str:
        flag = " --triton" if self.triton else ""
        again = f"python -m tests.fuzz --seed {self.case.seed} --case {self.case.number}{flag}"
        return f"{again}\n    {self.case.backend}, {self.case.options}\n    {self.difference}"


def _prepare_interpreter() -> None:
    """As tests/conftest.py does, for runs without pytest."""
    from tests.gpu_code import interpreter_bf16, interpreter_speed

    interpreter_bf16.install()
    interpreter_speed.install()


def failures(seed: int, numbers: Iterable[int], triton: bool = False) -> Iterator[Failure | None]:
    """Runs cases, and yields for each of them its failure or None."""
    if triton:
        _prepare_interpreter()
    threads = torch.get_num_threads()
    try:
        for number in numbers:
            yield _failure(draw(seed, number, triton), triton)
    finally:
        torch.set_num_threads(threads)


def _failure(case: Case, triton: bool) -> Failure | None:
    small_too = patch.multiple(eight_bit, LEAST_NUMEL=case.least_coded, LEAST_VECTOR=case.least_coded)
    few_steps = patch.object(outliers, "MEASURED_STEPS", MEASURED_STEPS)
    with warnings.catch_warnings(), np.errstate(all="ignore"), small_too, few_steps:
        warnings.simplefilter("ignore")  # `max_decay` binds in many cases, and says so
        try:
            Session(case).run()
        except DifferenceError as difference:
            return Failure(case, triton, str(difference))
        except Exception:
            return Failure(case, triton, traceback.format_exc(limit=-4))
    return None

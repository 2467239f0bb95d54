"""Random training runs against the definition: python -m tests.fuzz --cases 1000 --seed 7

A failing case prints the command that runs it again.
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.campaign import failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many, from 0 on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one, and what it is made of")
    parser.add_argument("--triton", action="store_true", help="the kernels of the triton backend, interpreted: slow")
    parser.add_argument("--stop", action="store_true", help="at the first failure")
    arguments = parser.parse_args()
    numbers = range(arguments.cases) if arguments.case is None else [arguments.case]
    failed = 0
    for count, failure in enumerate(failures(arguments.seed, numbers, arguments.triton), 1):
        if failure is not None:
            failed += 1
            print(failure, *([failure.case] if arguments.case is not None else []), sep="\n", flush=True)
        elif count % 100 == 0:
            print(f"{count} of {len(numbers)} cases, {failed} failed", flush=True)
        if failed and arguments.stop:
            break
    print(f"{failed} of {len(numbers)} cases failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

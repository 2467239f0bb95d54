"""Time of an optimizer's step, by suite of shapes and by contender.

Within a suite all contenders take turns. On a GPU times are the device's, with the host ahead of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import gpu
from benchmarks.step_times import contenders
from benchmarks.step_times.contenders import CONTENDERS, GPU_CONTENDERS, Contender, parameters, speeds, taking_part
from benchmarks.step_times.harness import Case, Row, Times, carry_out, command, timed
from benchmarks.step_times.pictures import plot_step_time
from benchmarks.step_times.suites import QUICK_SUITES, SUITES, Suite


def case_of(name: str, suite: Suite, among: Sequence[Contender], device: str = "cpu") -> Case:
    on_gpu = device != "cpu"
    among = taking_part(among, suite.shapes)
    rates = speeds({c.name: c.bytes_per_element for c in among}, suite.elements, gpu.peak_here() if on_gpu else None)
    backends = {c.name: c.backend for c in among}

    def more(contender: str, times: Times) -> Row:
        return {"dtype": "float32", "backend": backends[contender], **rates(contender, times)}

    return contenders.case_of(
        name,
        suite,
        among,
        work=partial(parameters, suite.shapes, device=device),
        timer=gpu.timed if on_gpu else timed,
        more=more,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("step_time", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help='default: cpu; "cuda" is ROCm too')
    options = parser.parse_args(arguments)
    on_gpu = options.device != "cpu"
    if on_gpu and (missing := gpu.missing()):
        parser.error(f"--device {options.device}: {missing}")
    if on_gpu and options.out == parser.get_default("out"):
        options.out = Path("results/step_time_cuda")
    among = list((GPU_CONTENDERS if on_gpu else CONTENDERS).values())
    suites = QUICK_SUITES if options.quick else SUITES
    cases = [case_of(name, suite, among, options.device) for name, suite in suites.items()]
    show = {"GB/s": "gb_per_s"} | ({"of peak": "share_of_peak"} if on_gpu else {})
    carry_out(options, cases, plot=plot_step_time, show=show)


if __name__ == "__main__":
    main()

"""What the Triton backend does around its kernels: who walks what, which addresses are uploaded when, who is served."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.backends.triton import launch, plan
from swd_fused.backends.triton.kernels import kernels, passes
from swd_fused.backends.triton.kernels.tables import HYPER, SLOT, SUM, TENSOR
from swd_fused.backends.triton.launch import BLOCK
from swd_fused.backends.triton.plan import MAX_SEGMENT, SEGMENT_COST, segments_of
from swd_fused.devices.transfer import from_host
from swd_fused.state.eight_bit import BLOCK as CODE_BLOCK
from tests.backends.triton_launches import launches
from tests.runs import random_grads, random_params, run

# --- Segments

MODELS = {
    "one": [7],
    "one block": [BLOCK],
    "one large": [10 * MAX_SEGMENT + 3],
    "tiny": [1 + i % 5 for i in range(1000)],
    "mixed": [1_000_003, 5, 0, 70_000, 0, 513, 512, 3_000_000, 1],
    "empty among": [0, 0, 9, 0],
    "empty": [0, 0],
}


# Elements of tensors by number, and the columns of those whose moments are kept in 8 bits.
CODED_MODELS: dict[str, tuple[dict[int, int], dict[int, int]]] = {
    "whole blocks": ({0: 4000 * 768}, {0: 768}),
    "short last blocks": ({0: 1000 * 600}, {0: 600}),
    "one block in a row": ({0: 3000 * 17}, {0: 17}),
    "a vector": ({0: 1_000_003}, {0: 1_000_003}),
    "among others": ({0: 30_000, 1: 70_001, 2: 76_800, 5: 7, 7: 4099}, {0: 600, 2: 256, 7: 4099}),
}


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 132, 1056, 5000])
@pytest.mark.parametrize(
    ("numels", "columns"),
    [*((dict(enumerate(numels)), {}) for numels in MODELS.values()), *CODED_MODELS.values()],
    ids=[*MODELS, *CODED_MODELS],
)
def test_segments(numels: dict[int, int], columns: dict[int, int], programs: int) -> None:
    """Each element is in one segment, each segment has one program, cuts keep blocks whole, and shares are even: within
    a block, a cut's own cost on either side, and one tensor that is too small to cut."""
    segments, firsts = segments_of(numels, programs, columns)
    ends = dict.fromkeys(numels, 0)
    for tensor, start, length in segments:
        assert start == ends[tensor]
        assert 0 < length <= MAX_SEGMENT
        assert start % columns.get(tensor, BLOCK) % (CODE_BLOCK if tensor in columns else BLOCK) == 0
        ends[tensor] += length
    assert ends == numels
    assert [segment.tensor for segment in segments] == sorted(segment.tensor for segment in segments)
    assert (len(firsts), firsts[0], firsts[-1]) == (programs + 1, 0, len(segments))
    share = sum(numel + SEGMENT_COST for numel in numels.values()) / programs
    for first, end in pairwise(firsts):
        assert first <= end
        elements = sum(segment.length for segment in segments[first:end])
        tensors = len({segment.tensor for segment in segments[first:end]})
        assert columns or elements + (tensors - 1) * SEGMENT_COST <= share + 2 * BLOCK


# --- Operands


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The addresses of gradients, as they are uploaded."""
    seen: list[Tensor] = []

    def noted(values: Tensor, device: torch.device) -> Tensor:
        if values.dtype == torch.int64 and values.dim() == 1:
            seen.append(values)
        return from_host(values, device)

    monkeypatch.setattr(plan, "from_host", noted)
    return seen


def optimizer_of(params: list[torch.nn.Parameter], **options: object) -> FusedAdamS:
    return FusedAdamS(params, backend="triton", **options)  # type: ignore[arg-type]


def copied_columns(optimizer: FusedAdamS) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the columns and rows of copies in the table, and the gradients that are copied."""
    (bucket,) = optimizer._stepper._kept[0].buckets
    copied = {id(tensor) for tensor, _ in bucket.plan._copied}
    columns = enumerate(plan.columns_of(bucket))
    places = [(column, i) for column, own in columns for i, tensor in enumerate(own) if id(tensor) in copied]
    return places, list(bucket.plan._grad_copies)


@pytest.mark.parametrize(
    ("options", "split"), [({}, False), ({"amsgrad": True}, True), ({"schedule": "lagged"}, False)]
)
def test_addresses_are_uploaded_only_when_one_has_changed(
    uploads: list[Tensor], options: dict[str, object], split: bool
) -> None:
    shapes = [(30,), (4, 5), ()]
    params, grads = random_params(shapes), random_grads(shapes, 2)
    optimizer = optimizer_of(params, **options)
    for param, grad in zip(params, grads[0], strict=True):
        param.grad = grad
    with launches(split):
        for _ in range(3):
            optimizer.step()
        assert len(uploads) == 1
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        assert len(uploads) == 1
        for change in (
            lambda: setattr(params[1], "grad", grads[1][1]),
            lambda: setattr(params[2], "data", params[2].detach().clone()),
            lambda: optimizer.state[params[0]]["exp_avg"].set_(torch.zeros(30)),
        ):
            before = len(uploads)
            change()
            optimizer.step()
            optimizer.step()
            assert len(uploads) == before + 1


def test_tensors_in_memory_order_are_not_copied() -> None:
    """Whatever that order is, as long as the moments have it too."""
    values = torch.randn(4, 3, 5, 5)
    for param_of in (
        lambda: values.clone(),
        lambda: values.contiguous(memory_format=torch.channels_last),
        lambda: values.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lambda: torch.randn(301)[1:].view(4, 3, 5, 5),
        lambda: torch.randn(1, 300).t(),
    ):
        param = torch.nn.Parameter(param_of())
        param.grad = torch.randn_like(param)
        optimizer = optimizer_of([param], amsgrad=True)
        optimizer.step()
        assert copied_columns(optimizer) == ([], [])


def test_what_lies_otherwise_is_copied() -> None:
    """Columns: parameter, exp_avg, exp_avg_sq, max_exp_avg_sq. The second moment's order counts."""
    params = random_params([(4, 5), (4, 5), (4, 5)])
    params[2] = torch.nn.Parameter(torch.randn(4, 10)[:, ::2])
    optimizer = optimizer_of(params)
    run(params, [[torch.randn(4, 5), torch.randn(5, 4).t(), torch.randn(4, 5)]], optimizer)
    assert copied_columns(optimizer) == ([(0, 2)], [1])
    state = optimizer.state[params[0]]
    state["exp_avg_sq"] = state["exp_avg_sq"].t().contiguous().t()
    run(params, [[torch.randn(4, 5)] * 3], optimizer)
    assert copied_columns(optimizer) == ([(0, 0), (0, 2), (1, 0)], [0])


# --- Sums


def test_a_lagged_mean_has_the_same_bits_in_passes_as_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever grid would suit each kernel: `total_numel` takes steps in passes, as a resume and released gradients."""
    programs = {kernels.exact_step_kernel: 1, kernels.lagged_step_kernel: 3}
    monkeypatch.setattr(plan, "programs_on", lambda kernel, *rest: programs.get(kernel, 2))
    shapes, means = [(5000,), (700,)], []
    grads = random_grads(shapes, 3)
    for options in ({}, {"total_numel": 5700}):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = optimizer_of(params, schedule="lagged", **options)
        run(params, grads[:1], optimizer)
        for step_grads in grads[1:]:
            run(params, [step_grads], optimizer)
            means.append(float(optimizer.exp_avg_sq_mean))
    assert means[:2] == means[2:]


@triton.jit
def totals_kernel(totals, slots, COLUMN: tl.constexpr):  # noqa: N803 (constants of Triton kernels are upper case)
    tl.store(totals + tl.program_id(0), passes.total_of(slots, COLUMN))


def test_each_program_adds_the_slots_of_all() -> None:
    """A GPU launches hundreds of programs. 128 are added at a time."""
    slots, totals = torch.rand(130, SLOT.columns, dtype=torch.float64), torch.zeros(130, dtype=torch.float64)
    totals_kernel[130,](totals, slots, COLUMN=SLOT.fresh)
    torch.testing.assert_close(totals, slots[:, SLOT.fresh].sum().expand(130), rtol=1e-12, atol=0)


def test_the_last_mean_has_all_segments() -> None:
    """Of tensors that have taken a step. 512 are added at a time."""
    count = 1500
    tensors, steps = torch.zeros(count, TENSOR.columns, dtype=torch.int64), torch.arange(count) % 3
    segments = torch.stack([torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.arange(count)], 1)
    sums, hyper = (
        torch.rand(count, SUM.columns, dtype=torch.float64),
        torch.zeros(1, HYPER.columns, dtype=torch.float64),
    )
    hyper[0, HYPER.beta2], hyper[0, HYPER.corrects_bias] = 0.9, 1.0
    last = torch.zeros(2, dtype=torch.float64)
    kernels.last_exp_avg_sq_sum_kernel[1,](last, sums, steps.float(), tensors, None, segments, None, hyper, count)
    stepped = steps > 0
    total = (sums[stepped, SUM.total] / (1 - 0.9 ** steps[stepped].double())).sum()
    torch.testing.assert_close(last, torch.stack([total, segments[stepped, 2].sum()]), rtol=1e-12, atol=0)


# --- Who is served


def output_of(code: str, **variables: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


ASK = """
import torch
from swd_fused import FusedAdamS
try:
    print(FusedAdamS([torch.nn.Parameter(torch.ones(3))], backend="triton"))
except RuntimeError as error:
    print(error)
print(FusedAdamS([torch.nn.Parameter(torch.ones(3))]))
"""

WITHOUT_TRITON = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Nothing())
"""


def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    output = output_of(f"import sys, swd_fused.backends\nassert 'triton' not in sys.modules\n{ASK}")
    assert 'backend="triton" cannot serve torch.float32 parameters on cpu: no Triton kernels for cpu devices' in output
    assert "with TRITON_INTERPRET=1, slowly" in output
    assert "backend: cpu\n" in output


def test_without_triton_the_package_works_and_says_what_is_missing() -> None:
    output = output_of(WITHOUT_TRITON + ASK, TRITON_INTERPRET="1")
    assert "Triton is not installed (No module named 'triton')" in output
    assert "use a CUDA or ROCm build of torch" in output
    assert "backend: cpu\n" in output


def test_other_devices_and_dtypes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no Triton kernels for meta devices"):
        FusedAdamS([torch.nn.Parameter(torch.ones(3, device="meta"))], backend="triton")
    with pytest.raises(RuntimeError, match=r"no fused kernels for torch.float8_e4m3fn"):
        FusedAdamS([torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))], backend="triton")


# --- Cooperative launches that are refused

GPU = torch.device("cuda:7")


@pytest.mark.parametrize(
    ("message", "is_refusal"),
    [
        ("Triton Error [CUDA]: too many blocks in cooperative launch", True),  # as Triton raises it
        ("Triton Error [HIP]:  Code: 720, Messsage: too many blocks in cooperative launch", True),  # on ROCm
        ("Triton Error [HIP]:  Code: 720, Messsage: said otherwise", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", False),
        ("Triton Error [HIP]:  Code: 1, Messsage: invalid argument", False),
        ("Triton Error [HIP]:  Code: 7200, Messsage: invalid argument of 720 bytes", False),
    ],
)
def test_a_grid_that_is_refused_is_known_by_its_number_or_by_words(
    monkeypatch: pytest.MonkeyPatch, message: str, is_refusal: bool
) -> None:
    monkeypatch.setattr(launch, "_can_wait", {GPU: True})
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.warns(UserWarning, match="cuda:7 refused a cooperative") if is_refusal else nullcontext():
        assert launch.refuses_cooperation(RuntimeError(message), GPU) == is_refusal
    assert launch.can_wait(GPU) != is_refusal

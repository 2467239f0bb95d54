"""The C++ operators as PyTorch sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
import swd_fused._C
import torch

from swd_fused import backends
from swd_fused.backends.cpu_backend import HEADER
from swd_fused.core.values import HyperRow

ops = torch.ops.swd_fused
backends.load_cpu_backend()

SHAPES = [(5,), (3, 4), (), (0,)]


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.rand(shape).to(dtype) for shape in SHAPES]


def hyper(decay: float = 5e-4) -> torch.Tensor:
    """Two groups."""
    rows = [
        HyperRow(1e-3, 1e-3, 0.9, 0.999, 1e-8, decay, 0.1, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0),
        HyperRow(1e-2, 1e-2, 0.8, 0.99, 1e-6, 0.0, 0.1, -1.0, 0.1, 0.2, 0.0, 0.0, 0.9, 1.0),
    ]
    return torch.tensor(rows, dtype=torch.float64)


SUMS = torch.ones(4, dtype=torch.float64)
STEPS = torch.tensor([0.0, 1.0, 2.0, 3.0])
GROUPS = torch.tensor([0, 1, 0, 1])
MEAN = torch.tensor(1e-4, dtype=torch.float64)
FACTOR = torch.tensor(0.5, dtype=torch.float64)
SKIP = torch.tensor(1.0, dtype=torch.float64)
SCALE, FOUND = torch.tensor([1024.0]), torch.tensor([0.0])


Lists = list[list[torch.Tensor]]


def lists(dtype: torch.dtype, amsgrad: bool = False, masters: bool = False, averages: bool = False) -> Lists:
    optional = (tensors() if each else [] for each in (amsgrad, masters, averages))
    return [tensors(dtype), tensors(), tensors(), *optional, [], [], tensors(dtype)]


def coded_lists() -> Lists:
    """The second tensor's moments are codes."""
    params, exp_avgs, exp_avg_sqs, grads = ([torch.rand(5), torch.rand(20, 300)] for _ in range(4))
    exp_avgs[1], exp_avg_sqs[1] = torch.zeros(20, 300, dtype=torch.int8), torch.zeros(20, 300, dtype=torch.uint8)
    scales = [[torch.empty(0), torch.ones(20, 2)] for _ in range(2)]
    return [params, exp_avgs, exp_avg_sqs, [], [], [], *scales, grads]


def numbers_of(params: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([number for param in params for number in (0, *param.stride())])


def described(lists: Lists, numbered: bool = False) -> torch.Tensor:
    tensors = len(lists[0])
    numbers = numbers_of(lists[0]) if numbered else None
    return ops.description(*lists, GROUPS[:tensors], torch.arange(tensors), numbers, None)


KEPT = []  # what operators are told the addresses of


def operands(dtype: torch.dtype, numbered: bool = False, **options: bool) -> torch.Tensor:
    KEPT.append(lists(dtype, **options))
    return described(KEPT[-1], numbered)


def update_args(dtype: torch.dtype, *scalars: object, **options: bool) -> tuple[object, ...]:
    return SUMS.clone(), STEPS.clone(), operands(dtype, **options), hyper(), MEAN, *scalars


def step_args(dtype: torch.dtype, *scalars: object, **options: bool) -> tuple[object, ...]:
    return SUMS.clone(), STEPS.clone(), operands(dtype, **options), hyper(), *scalars


IDS = torch.arange(4)

CALLS = [
    ("description", lambda: (*lists(torch.float32), GROUPS, IDS, None, None)),
    ("description", lambda: (*coded_lists(), GROUPS, IDS, None, torch.tensor([0, 0, 0, 2]))),
    (
        "description",
        lambda: (*lists(torch.bfloat16, amsgrad=True, masters=True), GROUPS, IDS, numbers_of(tensors()), None),
    ),
    ("gradient_sums", lambda: (operands(torch.bfloat16), SUMS, STEPS, hyper())),
    ("max_exp_avg_sq_sum", lambda: (operands(torch.float32, amsgrad=True), STEPS, hyper(), FACTOR)),
    ("last_exp_avg_sq_sum", lambda: (operands(torch.float32), SUMS, STEPS, hyper())),
    ("update_", lambda: update_args(torch.float32, None, None, 0)),
    ("update_", lambda: update_args(torch.float16, FACTOR, None, 0, amsgrad=True, masters=True)),
    ("update_", lambda: update_args(torch.bfloat16, FACTOR, SKIP, 3, numbered=True, averages=True)),
    ("step_", lambda: step_args(torch.bfloat16, 1.0, False, SCALE, FOUND, False, 3, numbered=True, amsgrad=True)),
    ("step_", lambda: step_args(torch.float32, None, True, None, None, False, 0)),
    ("step_", lambda: step_args(torch.bfloat16, None, False, None, None, True, 0, masters=True)),
    ("exp_avg_sq_sums", lambda: (tensors(), [], [])),
    ("advise_huge_pages", lambda: (torch.empty(1000),)),
]


@pytest.mark.parametrize(("name", "make_args"), CALLS)
def test_opcheck(name: str, make_args: object) -> None:
    torch.library.opcheck(
        getattr(ops, name).default, make_args(), test_utils=["test_schema", "test_autograd_registration"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_value_is_read_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """An update with zero gradients copies the parameter through the kernel's conversions, or, with a decay factor of
    2/3, rounds it. For 16 bits: all 65,536 of them."""
    if dtype.itemsize == 2:
        values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        values = torch.cat([torch.randn(10_000, dtype=dtype), torch.tensor([0.0, -0.0, torch.inf, 1e-40], dtype=dtype)])
    computes_in = torch.promote_types(dtype, torch.float32)
    for max_decay in (0.0, 1 / 3):
        param, zeros = values.clone(), torch.zeros(len(values), dtype=computes_in)
        table = hyper(decay=1e9)
        table[0, HyperRow._fields.index("max_decay")] = max_decay
        lists = [[param], [zeros.clone()], [zeros.clone()], [], [], [], [], [], [zeros.to(dtype)]]
        sums, steps = SUMS[:1].clone(), torch.zeros(1)
        ops.update_(sums, steps, described(lists), table, MEAN, None, None, 0)
        expected = (values.to(computes_in) * torch.tensor(1 - max_decay, dtype=computes_in)).to(dtype)
        torch.testing.assert_close(param, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_what_is_stored(dtype: torch.dtype) -> None:
    """For sizes around the blocks and segments of the kernels. The package has no second moment in 16 bits."""
    for numel in (1, 8, 4095, 4097, 32769, 100_001):
        param, exp_avg, grad = ([torch.rand(numel)] for _ in range(3))
        exp_avg_sq, sums = [torch.rand(numel).to(dtype)], torch.zeros(1, dtype=torch.float64)
        given = described([param, exp_avg, exp_avg_sq, [], [], [], [], [], grad])
        ops.update_(sums, torch.zeros(1), given, hyper(), MEAN, None, None, 0)
        assert torch.equal(sums, ops.exp_avg_sq_sums(exp_avg_sq, [], []))


def test_operators_check_what_they_are_given() -> None:
    good, others = lists(torch.float32), (GROUPS, IDS, None, None)
    with pytest.raises(RuntimeError, match="grad must be float32, float64, bfloat16 or float16"):
        ops.description(*good[:-1], [grad.int() for grad in good[-1]], *others)
    with pytest.raises(RuntimeError, match="got 3 exp_avgs for 4 parameters"):
        ops.description(good[0], good[1][:3], *good[2:], *others)
    with pytest.raises(RuntimeError, match="exp_avg must have its parameter's shape"):
        ops.description(good[0], good[1][::-1], *good[2:], *others)
    with pytest.raises(RuntimeError, match="tensor_ids must be contiguous, of the documented dtype, with at least 4 "):
        ops.description(*good, GROUPS, IDS[:3], None, None)
    coded = coded_lists()
    coded[-2][1] = torch.ones(20, 3)
    with pytest.raises(RuntimeError, match="scales must be contiguous, float32, one for each block"):
        ops.description(*coded, GROUPS, IDS, None, torch.tensor([0, 0, 0, 2]))
    description = described(good)
    with pytest.raises(
        RuntimeError, match="steps must be contiguous, of the documented dtype, with at least 4 elements"
    ):
        ops.gradient_sums(description, SUMS, STEPS[:3], hyper())
    for other in (description[:-1], torch.zeros_like(description)):
        with pytest.raises(RuntimeError, match="got other numbers than the operator description returns"):
            ops.gradient_sums(other, SUMS, STEPS, hyper())
    freed = description.clone()
    freed[HEADER : HEADER + 4] = 0
    with pytest.raises(RuntimeError, match="a tensor has elements, but its memory was freed"):
        ops.gradient_sums(freed, SUMS, STEPS, hyper())
    with pytest.raises(RuntimeError, match="tensor 1 is of group 1, but hyper has 1 rows"):
        ops.gradient_sums(description, SUMS, STEPS, hyper()[:1])


def test_no_full_size_temporary() -> None:
    """Beyond moments and counters a step allocates a few kilobytes."""
    from swd_fused import FusedAdamS

    param = torch.nn.Parameter(torch.zeros(1_000_000))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdamS([param], max_grad_norm=1.0, backend="cpu")
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        optimizer.step()
    assert 0 < max(event.cpu_memory_usage for event in profile.key_averages()) < 4096


def test_library_uses_the_stable_abi_only() -> None:
    """No C++ symbol of torch is imported, and no Python symbol outside the limited API is needed."""
    import subprocess

    library = Path(swd_fused._C.__file__)
    assert library.name == "_C.abi3.so"
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[-1] for line in symbols.splitlines()]
    assert any(name.startswith("aoti_torch_") for name in names)
    assert not [name for name in names if "c10" in name or "2at" in name or "5torch" in name]
    assert {name for name in names if name.startswith("Py")} <= {"PyModule_Create2"}

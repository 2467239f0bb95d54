"""The C++ operators as PyTorch sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
import swd_fused._C
import torch

from swd_fused import backends

ops = torch.ops.swd_fused
backends.load_cpu_backend()

SHAPES = [(5,), (3, 4), (), (0,)]


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.rand(shape).to(dtype) for shape in SHAPES]


def scalars() -> torch.Tensor:
    return torch.tensor([[1.0, 0.9, 0.999, 0.5, 1e-8, 0.99, 1e-3]] * len(SHAPES), dtype=torch.float64)


CALLS = [
    ("gradient_sums", lambda: (tensors(torch.bfloat16),)),
    ("exp_avg_sq_sums", lambda: (tensors(),)),
    ("max_exp_avg_sq_sums", lambda: (tensors(), tensors(), tensors(), scalars())),
    ("update_", lambda: (tensors(), tensors(), tensors(), [], tensors(), scalars())),
    ("update_", lambda: (tensors(torch.float16), tensors(), tensors(), tensors(), tensors(torch.float16), scalars())),
    ("advise_huge_pages", lambda: (torch.empty(1000),)),
]


@pytest.mark.parametrize(("name", "make_args"), CALLS)
def test_opcheck(name: str, make_args: object) -> None:
    torch.library.opcheck(getattr(ops, name).default, make_args())


def test_sums_are_the_same_whether_emitted_or_rebuilt() -> None:
    """In every layout, for sizes around the blocks and chunks of the kernels."""
    for numel in (1, 8, 4095, 4097, 32769, 100_001):
        for amsgrad in (False, True):
            lists = [[torch.rand(numel)] for _ in range(5)]
            lists[0][0] = torch.rand(2 * numel)[::2]
            param, exp_avg, exp_avg_sq, max_exp_avg_sq, grad = lists
            table = scalars()[:1]
            emitted, grad_sums = ops.update_(param, exp_avg, exp_avg_sq, max_exp_avg_sq if amsgrad else [], grad, table)
            averaged = max_exp_avg_sq if amsgrad else exp_avg_sq
            assert torch.equal(emitted, ops.exp_avg_sq_sums(averaged))
            torch.testing.assert_close(emitted, averaged[0].double().sum().view(1), rtol=1e-6, atol=0)
            torch.testing.assert_close(grad_sums, grad[0].double().square().sum().view(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_value_is_read_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """An update with a step of zero and a decay factor of one copies the parameter through the kernel's conversions;
    with a factor of 1/3 it rounds. For 16 bits: all 65,536 of them."""
    if dtype.itemsize == 2:
        values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        values = torch.cat([torch.randn(10_000, dtype=dtype), torch.tensor([0.0, -0.0, torch.inf, 1e-40], dtype=dtype)])
    computes_in = torch.promote_types(dtype, torch.float32)
    for factor in (1.0, 1 / 3):
        param, zeros = values.clone(), torch.zeros(len(values), dtype=computes_in)
        table = torch.tensor([[1.0, 0.9, 0.999, 1.0, 1.0, factor, 0.0]], dtype=torch.float64)
        ops.update_([param], [zeros.clone()], [zeros.clone()], [], [zeros.to(dtype)], table)
        expected = (values.to(computes_in) * torch.tensor(factor, dtype=computes_in)).to(dtype)
        torch.testing.assert_close(param, expected, rtol=0, atol=0, equal_nan=True)


def test_operators_check_what_they_are_given() -> None:
    with pytest.raises(RuntimeError, match="must be float32, float64, bfloat16 or float16"):
        ops.gradient_sums([torch.ones(3, dtype=torch.int32)])
    with pytest.raises(RuntimeError, match="got 3 exp_avgs for 4 parameters"):
        ops.update_(tensors(), tensors()[:3], tensors(), [], tensors(), scalars())
    with pytest.raises(RuntimeError, match="a row for each of 4 tensors"):
        ops.update_(tensors(), tensors(), tensors(), [], tensors(), scalars()[:3])


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

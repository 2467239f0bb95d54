"""What the virtual GPU makes of torch's operations, where the CPU's would do something else than a GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def test_a_generator_repeats_its_numbers_for_the_same_seed() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    first, second = torch.randn(5, generator=generator), torch.empty(5).normal_(generator=generator)
    assert not torch.equal(first, second)
    torch.manual_seed(8)  # of others
    generator.manual_seed(3)
    assert torch.equal(torch.randn(5, generator=generator), first)
    assert torch.equal(torch.empty(5).normal_(generator=generator), second)


def test_a_generator_of_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.randn(5, generator=torch.Generator("cpu"))


def test_tensors_on_different_devices_are_not_compared() -> None:
    with pytest.raises(RuntimeError, match="one CUDA device is wanted"):
        torch.equal(torch.ones(5), torch.ones(5, device="cpu"))


def test_sparse_tensors() -> None:
    sparse = (3 * torch.eye(4, 5)).to_sparse()
    assert (sparse.layout, sparse.device.type, sparse.shape) == (torch.sparse_coo, "cuda", (4, 5))
    assert sparse._values().tolist() == [3.0] * 4
    assert sparse._indices().tolist() == [[0, 1, 2, 3]] * 2


def test_new_tensors_like_those_of_another_device() -> None:
    on_host = torch.ones(2, 3, device="cpu")
    zeros = torch.zeros_like(on_host, device="cuda")
    assert (zeros.device.type, zeros.tolist()) == ("cuda", [[0.0] * 3] * 2)
    assert torch.ones_like(zeros, device="cpu").tolist() == on_host.tolist()
    assert on_host.new_full((2,), 5.0, device="cuda").tolist() == [5.0, 5.0]


def test_who_does_not_wait_for_a_copy_to_the_host_reads_too_early() -> None:
    early = torch.full((4,), 3.0).to("cpu", non_blocking=True)
    assert not torch.equal(early, torch.full((4,), 3.0, device="cpu"))
    torch.cuda.synchronize()
    assert torch.equal(early, torch.full((4,), 3.0, device="cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_writes_to_lists_of_tensors_are_counted(device: str) -> None:
    """As without a GPU, where autograd counts those of _foreach_ operations, and not those of fused optimizers."""
    tensors = [torch.ones(3, device=device), torch.ones((), device=device)]
    torch._foreach_add_(tensors, 1.0)
    torch._foreach_copy_(tensors, [tensor.clone() for tensor in tensors])
    torch._foreach_sqrt(tensors)
    assert [tensor._version for tensor in tensors] == [2, 2]
    saved = torch.ones(3, device=device, requires_grad=True).exp()
    total = saved.exp().sum()
    torch._foreach_zero_([saved.detach()])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_inference_mode() -> None:
    weight = torch.full((3,), 2.0, requires_grad=True)
    with torch.inference_mode():
        result = weight * 2
        result.add_(1)
        torch._foreach_mul_([result], 3.0)
        weight.mul_(2)
        late = result.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert result.is_inference()
    assert (result.tolist(), late.tolist(), weight.tolist()) == ([15.0] * 3, [15.0] * 3, [4.0] * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [lambda: torch.nn.LayerNorm(8), lambda: torch.nn.GroupNorm(2, 4)])
def test_norms_in_16_bits_forwards_and_backwards(norm: Any, dtype: torch.dtype) -> None:
    """As in float32, but for the roundings of what they take and return."""
    torch.manual_seed(0)
    values, grad = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    results = []
    for kind in (dtype, torch.float32):
        module = norm().to(dtype).to(kind)
        inputs = values.to(dtype).to(kind).requires_grad_()
        output = module(inputs)
        output.backward(grad.to(dtype).to(kind))
        found = [output, inputs.grad, *(param.grad for param in module.parameters())]
        assert {tensor.dtype for tensor in found} == {kind}
        results.append([tensor.float() for tensor in found])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)

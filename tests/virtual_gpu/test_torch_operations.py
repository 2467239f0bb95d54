"""What the virtual GPU makes of torch's operations, where the CPU's would do something else than a GPU's."""

from __future__ import annotations

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

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

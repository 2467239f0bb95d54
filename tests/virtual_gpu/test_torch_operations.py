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

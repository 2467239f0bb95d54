"""The sums of the torch backend. Its updates are compared with the definition, as all backends' are."""

from __future__ import annotations

import pytest
import torch

from swd_fused.backends import torch_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2**21 + 77,), (1500, 1500), (300, 255), (3, 5), ()])
def test_sums_of_equal_numbers_are_precise(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """torch's own norm of 2^20 equal numbers is off by 4e-4: it adds them up one by one."""
    tensor = torch.full(shape, 0.1).to(dtype)
    layouts = [tensor, tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor, tensor[..., ::3] if shape else tensor]
    squares = torch_backend.sums_of_squares([*layouts, None], tensor.device)
    for layout, square in zip(layouts, squares[:-1], strict=True):
        assert float(square) == pytest.approx(float(layout.double().square().sum()), rel=1e-6)
    assert squares[-1] == 0

"""Memory that a step on a side stream still needs is not given out again on the stream that it was made on.

The virtual GPU runs each stream as late as it may, so that whoever gets the memory too early is seen to.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.device import needs_gpu
from tests.runs import random_params

pytestmark = needs_gpu

BLOCKS = 64  # of the allocator: more than a step gives back


def steps(
    optimizer: FusedAdamS, params: list[torch.nn.Parameter], grads: list[list[Tensor | None]], side: Any = None
) -> None:
    """Takes the first step on the current stream and the others on another one, if there is one."""
    for step, now in enumerate(grads):
        if side is not None and step == 1:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if step else None):
            for param, grad in zip(params, now, strict=True):
                param.grad = grad
            optimizer.step()


def others_tensors(numel: int) -> list[Tensor]:
    """Makes tensors of someone else on the current stream, where memory that is too early to be given out would be."""
    tensors = [torch.full((numel,), 7.0) for _ in range(BLOCKS)]
    torch.cuda.current_stream().synchronize()
    return tensors


def test_copies_of_transposed_gradients_are_nobody_elses(backend: str) -> None:
    (param,) = random_params([(40, 30)])
    optimizer = FusedAdamS([param], backend=backend)
    transposed = [torch.randn(30, 40).t() for _ in range(2)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    steps(optimizer, [param], [[transposed[0]], [transposed[1]], [torch.randn(40, 30)]], side)
    theirs = others_tensors(1200)
    side.synchronize()
    assert all(bool((tensor == 7.0).all()) for tensor in theirs)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"schedule": "lagged"}], ids=str)
def test_a_step_does_not_mind_that_the_next_has_other_gradients(backend: str, options: dict[str, Any]) -> None:
    """Two dtypes make passes that are launched one by one, with operations of torch between them."""
    runs = []
    for side in (None, torch.cuda.Stream()):
        torch.manual_seed(0)
        params = [*random_params([(300,), (40, 5)]), *random_params([(200,)], torch.float64)]
        grads: list[list[Tensor | None]] = [[torch.randn_like(param) for param in params] for _ in range(4)]
        grads[2][1] = None
        optimizer = FusedAdamS(params, backend=backend, **options)
        torch.cuda.synchronize()
        steps(optimizer, params, grads, side)
        theirs = [others_tensors(numel) for numel in (1, 3, 60)]
        torch.cuda.synchronize()
        assert all(bool((tensor == 7.0).all()) for tensors in theirs for tensor in tensors)
        runs.append([param.detach().clone() for param in params])
    assert all(map(torch.equal, *runs))

"""Whatever the strides and dtypes of parameter, gradient and state are, each element is updated as itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from tests.runs import defined, error, is_interpreted, moments

STEPS = 6
SHAPE = (6, 4, 5, 3)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "sliced": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
    "gapped_rows": lambda x: torch.cat([x, x], dim=1)[:, :4],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(SHAPE),
}


def laid_out(values: Tensor, layout: str) -> Tensor:
    result = LAYOUTS[layout](values.clone())
    assert torch.equal(result, values)
    return result


@pytest.mark.parametrize(
    ("state_layout", "amsgrad"),
    [(None, False), (None, True), ("contiguous", False), ("transposed", True), ("gapped_rows", False)],
)
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("param_layout", LAYOUTS)
def test_strides(backend: str, param_layout: str, grad_layout: str, state_layout: str | None, amsgrad: bool) -> None:
    param = torch.nn.Parameter(laid_out(torch.randn(SHAPE, dtype=torch.float64), param_layout))
    steps = 2 if is_interpreted(backend) else STEPS
    grads = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(steps)]
    reference = defined([param], [[g] for g in grads], [{"params": [0]}], amsgrad=amsgrad)
    optimizer = FusedAdamS([param], amsgrad=amsgrad, backend=backend)
    strides = param.stride()
    for grad in grads:
        param.grad = laid_out(grad, grad_layout)
        optimizer.step()
        if state_layout is not None:
            for key, value in optimizer.state[param].items():
                if key != "step":
                    optimizer.state[param][key] = laid_out(value, state_layout)
    assert param.stride() == strides
    assert error([param], reference.params) < 1e-15
    for key in ("exp_avg", "exp_avg_sq"):
        assert error(moments(optimizer, [param], key), [getattr(reference, key)[0]]) < 1e-15


def test_the_gradient_is_not_written_to(backend: str) -> None:
    param = torch.nn.Parameter(torch.randn(100))
    grad = torch.randn(100)
    param.grad = grad.clone()
    FusedAdamS([param], max_grad_norm=0.1, backend=backend).step()
    assert torch.equal(param.grad, grad)


def test_lazily_negated_and_conjugated_gradients(backend: str) -> None:
    values = torch.randn(30, dtype=torch.complex128)
    for lazy in (torch._neg_view(torch.randn(30, dtype=torch.float64)), values.conj(), values.conj().imag):
        params = [torch.nn.Parameter(torch.ones(30, dtype=lazy.dtype)) for _ in range(2)]
        params[0].grad, params[1].grad = lazy, lazy.clone().resolve_conj().resolve_neg()
        for param in params:
            FusedAdamS([param], backend=backend).step()
        assert torch.equal(params[0], params[1])


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parameter_and_gradient_in_different_dtypes(
    backend: str, param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    """As `param.grad_dtype` allows them. Equal to the same numbers in the parameter's own or in a wider dtype."""
    numel, steps = (700, 2) if is_interpreted(backend) else (3000, STEPS)
    values, grads = torch.randn(numel).to(param_dtype), [torch.randn(numel).to(grad_dtype) for _ in range(steps)]
    wide = torch.promote_types(torch.promote_types(param_dtype, grad_dtype), torch.float32)
    results = []
    for own_dtype in (grad_dtype, wide):
        param = torch.nn.Parameter(values.clone())
        param.grad_dtype = own_dtype
        optimizer = FusedAdamS([param], backend=backend)
        for grad in grads:
            param.grad = grad.to(own_dtype)
            optimizer.step()
        results.append(param)
    # The schedule comes from sums in float32, good to 1e-6: half of that, in each step, of a shrink of 5e-7 of weights
    # of up to 4. Other dtypes than float64 cannot show it.
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=steps * 1e-12)


# Several segments of 32,768 elements, and tiles of 8 by 8 with a rest in both directions.
LARGE = {
    "matrix": (203, 517),
    "wide matrix": (21, 9001),
    "convolution": (70, 61, 3, 3),
    "rows of 16": (4099, 16),
    "rows of 27": (1301, 3, 3, 3),
}
LARGE_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda x: x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1]),
    "second dimension last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "sliced": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
    "gapped rows": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
}
STATES: dict[str, tuple[torch.dtype, dict[str, object]]] = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "amsgrad": (torch.float32, {"amsgrad": True}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
    "8 bits": (torch.float32, {"state_dtype": "8bit"}),
    "8 bits, amsgrad": (torch.float32, {"state_dtype": "8bit", "amsgrad": True}),
}


def large_step(shape: tuple[int, ...], state: str, param_layout: str | None, grad_layout: str | None) -> list[Tensor]:
    """Takes lagged steps, whose mean does not depend on the order in which squares of gradients are added."""
    dtype, options = STATES[state]
    generator = torch.Generator().manual_seed(0)
    values, *grads = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    param = torch.nn.Parameter(LARGE_LAYOUTS[param_layout](values) if param_layout else values)
    optimizer = FusedAdamS([param], schedule="lagged", backend="cpu", lr=0.1, **options)
    for grad in grads:
        param.grad = LARGE_LAYOUTS[grad_layout](grad) if grad_layout else grad
        optimizer.step()
    state_tensors = [value for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    return [param.detach(), *state_tensors]


@pytest.mark.parametrize("layout", LARGE_LAYOUTS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_layouts_of_large_tensors_give_the_same_bits(shape: tuple[int, ...], state: str, layout: str) -> None:
    """Where parameter and moments are laid out alike, the mean is a sum in another order. Codes are row-major."""
    plain = large_step(shape, state, None, None)
    assert all(map(torch.equal, plain, large_step(shape, state, None, layout)))
    if state == "8 bits":
        assert all(map(torch.equal, plain, large_step(shape, state, layout, None)))
        assert all(map(torch.equal, plain, large_step(shape, state, layout, layout)))
    else:
        for one, other in zip(plain, large_step(shape, state, layout, layout), strict=True):
            assert one.allclose(other) if one.dtype.itemsize > 2 else (one != other).float().mean() < 1e-3

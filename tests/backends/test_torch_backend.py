"""The torch backend's two ways to update, by torch's fused kernel and by plain operations, and its sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.backends import torch_batches, torch_fused_kernel, torch_sums
from tests.device import DEVICE
from tests.runs import GROUPS, SHAPES, defined, error, fused, moments, random_grads, random_params, run

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="counts calls of the CPU's kernel")


@pytest.fixture
def fused_numels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all tensors that torch's fused kernel has updated."""
    numels: list[int] = []

    def counting(kernel: Callable[..., None]) -> Callable[..., None]:
        def counted(params: list[Tensor], *others: object, **options: object) -> None:
            numels.extend(param.numel() for param in params)
            kernel(params, *others, **options)

        return counted

    for name in ("_fused_adam_", "_fused_adamw_"):
        monkeypatch.setattr(torch, name, counting(getattr(torch, name)))
    return numels


@pytest.mark.parametrize("waits", [False, True], ids=["mean read", "mean on a device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"maximize": True},
        {"decay": "decoupled"},
        {"decay": "l2", "maximize": True},
        {"max_grad_norm": 0.5},
        {"schedule": "lagged"},
    ],
    ids=str,
)
def test_both_ways_agree(
    options: dict[str, object],
    dtype: torch.dtype,
    waits: bool,
    fused_numels: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a few roundings, with tensors cut into pieces too."""
    monkeypatch.setattr(torch_batches, "CPU_BATCH", 1000)
    if waits:
        monkeypatch.setattr(torch_fused_kernel, "can_be_read", lambda _: False)
    start, grads = random_params(SHAPES, dtype), random_grads(SHAPES, 20, dtype)
    groups = [{**GROUPS[0], "lr": torch.tensor(1e-2)}, GROUPS[1]] if dtype == torch.float32 else GROUPS
    results = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(torch_fused_kernel, "FUSED_DEVICES", devices)
        params = [torch.nn.Parameter(param.detach().clone()) for param in start]
        optimizer = fused(params, groups, backend="torch", **options)
        fused_numels.clear()
        run(params, grads, optimizer)
        assert bool(fused_numels) == bool(devices)
        keys = ("exp_avg", "exp_avg_sq")
        results.append([*params, *(tensor for key in keys for tensor in moments(optimizer, params, key))])
        assert [int(optimizer.state[param]["step"]) for param in params] == [20] * len(params)
    for by_kernel, plain in zip(*results, strict=True):
        # torch's kernel rounds lr and 1 - b^t to float32 at other places: a few units of up to 4 in 20 steps.
        torch.testing.assert_close(by_kernel, plain, rtol=0, atol=16 * torch.finfo(dtype).eps)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


PLAIN = {
    "amsgrad": {"amsgrad": True},
    "no bias correction": {"bias_correction": False},
    "16 bits": {"dtype": torch.bfloat16},
    "16 bits with masters": {"dtype": torch.bfloat16, "master_weights": True},
    "first moment in 16 bits": {"state_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", PLAIN)
def test_what_the_fused_kernel_computes_otherwise_is_updated_plainly(case: str, fused_numels: list[int]) -> None:
    options = dict(PLAIN[case])
    param = torch.nn.Parameter(torch.randn(30, dtype=options.pop("dtype", torch.float32)))  # type: ignore[call-overload]
    run([param], [[torch.randn_like(param)]], FusedAdamS([param], backend="torch", **options))
    assert not fused_numels


@pytest.mark.parametrize("which", ["param", "grad", "exp_avg", "exp_avg_sq"])
def test_only_tensors_with_strides_of_their_own_are_updated_plainly(which: str, fused_numels: list[int]) -> None:
    """Beside a parameter that torch's fused kernel serves; all four transposed, it serves both."""
    shapes = [(6, 5), (7, 3)]
    params, grads = random_params(shapes, torch.float64), random_grads(shapes, 3, torch.float64)
    if which == "param":
        params[0] = torch.nn.Parameter(transposed(params[0].detach()))
    reference = defined(params, grads, [{"params": range(2)}])
    optimizer = FusedAdamS(params, backend="torch")
    served = []
    for step_grads in grads:
        params[0].grad = transposed(step_grads[0]) if which == "grad" else step_grads[0].clone()
        params[1].grad = step_grads[1].clone()
        fused_numels.clear()
        optimizer.step()
        served.append(sorted(fused_numels))
        if which in ("exp_avg", "exp_avg_sq"):
            optimizer.state[params[0]][which] = transposed(optimizer.state[params[0]][which])
    assert served[1:] == [[21]] * 2
    assert error(params, reference.params) < 1e-15
    params[0].data = transposed(params[0].detach())
    params[0].grad = transposed(params[0].detach())
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[params[0]][key] = transposed(optimizer.state[params[0]][key])
    fused_numels.clear()
    optimizer.step()
    assert sorted(fused_numels) == [21, 30]


def test_a_wide_learning_rate_on_a_device_is_not_rounded(
    fused_numels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There torch's fused kernel reads float32."""
    monkeypatch.setattr(torch_fused_kernel, "can_be_read", lambda _: False)
    params = random_params([(8,)], torch.float64)
    grads = random_grads([(8,)], 3, torch.float64)
    reference = defined(params, grads, [{"params": [0], "lr": 0.01}])
    run(params, grads, FusedAdamS(params, lr=torch.tensor(0.01, dtype=torch.float64), backend="torch"))
    assert not fused_numels
    assert error(params, reference.params) < 1e-15


def test_a_learning_rate_that_no_weight_decay_goes_with(fused_numels: list[int]) -> None:
    """A tenth of each weight goes at most. Divided by this rate, that is infinite."""
    param = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = FusedAdamS([param], lr=1e-310, weight_decay=1e308, max_decay=0.1, eps=0.0, backend="torch")
    param.grad = torch.full((5,), 1e-3, dtype=torch.float64)
    optimizer.step()
    assert fused_numels == [5]
    assert param.detach().isfinite().all()


def test_writes_of_the_fused_kernel_are_counted(fused_numels: list[int]) -> None:
    params = random_params([(3,), (4,)])
    versions = [param._version for param in params]
    params[0].grad = torch.ones(3)
    FusedAdamS(params, backend="torch").step()
    assert fused_numels == [3]
    assert params[0]._version > versions[0]
    assert params[1]._version == versions[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2**21 + 77,), (1500, 1500), (300, 255), (3, 5), ()])
def test_sums_of_equal_numbers_are_precise(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """torch's own norm of 2^20 equal numbers is off by 4e-4: it adds them up one by one."""
    tensor = torch.full(shape, 0.1).to(dtype)
    layouts = [tensor, tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor, tensor[..., ::3] if shape else tensor]
    squares = torch_sums.sums_of_squares([*layouts, None], tensor.device)
    sums = torch_sums.sums_by_tensor(torch_sums.sums_of_elements([None, *layouts]), 4, tensor.device)
    for layout, square, total in zip(layouts, squares[:-1], sums[1:], strict=True):
        assert float(square) == pytest.approx(float(layout.double().square().sum()), rel=1e-6)
        assert float(total) == pytest.approx(float(layout.double().sum()), rel=1e-6)
    assert squares[-1] == sums[0] == 0

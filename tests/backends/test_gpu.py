"""What only a GPU can show. The other tests that take a `backend` run there too: `make test-gpu` does both."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from swd_fused import FusedAdamS
from tests.device import needs_gpu
from tests.runs import defined, error, random_grads, random_params, run, set_grads, twins_of

pytestmark = needs_gpu
triton_only = pytest.mark.backends(without=("torch", "cpu"), split=True)

SHAPES = [(1025,), (40, 30), (), (0,), (7, 3)]
MODES = [
    pytest.param({}, id="exact"),
    pytest.param({"max_grad_norm": 1.0}, id="clipped"),
    pytest.param({"schedule": "lagged"}, id="lagged"),
    pytest.param({"amsgrad": True, "ema_decay": 0.9}, id="amsgrad, averages"),
]
FURTHER = [
    pytest.param({"outliers": "clip"}, id="outliers"),  # in more than one launch
    pytest.param({"corrected_decay": True, "cautious_decay": True, "largest_lr": 0.02}, id="corrected"),
    pytest.param({"decay": "independent", "weight_decay": 0.01, "largest_lr": 0.02}, id="independent"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within, any operation of torch that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # it warns that it is a prototype, once in a process
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- The host does not wait


@pytest.mark.backends(split=True, without=("cpu",))
@pytest.mark.parametrize("lr", ["number", "tensor", "scheduled number", "scheduled tensor"])
@pytest.mark.parametrize("options", [*MODES, *FURTHER])
def test_no_step_waits_for_the_device(backend: str, options: dict[str, Any], lr: str) -> None:
    """From the third step on: first ones compile. Gradients are new tensors in each step."""
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, 6, torch.float64)
    twins = twins_of(params)
    trained = []
    for tensors, name in ((params, backend), (twins, "torch")):
        start = torch.tensor(1e-2) if "tensor" in lr else 1e-2
        optimizer = FusedAdamS(tensors, lr=start, backend=name, **options)
        scheduler = CosineAnnealingLR(optimizer, 10) if "scheduled" in lr else None
        own_grads = [[grad.clone() for grad in step_grads] for step_grads in grads]
        for t, step_grads in enumerate(own_grads):
            set_grads(tensors, step_grads)
            with no_waiting() if t >= 2 and name == backend else nullcontext():
                optimizer.step()
            if scheduler is not None:
                scheduler.step()
        trained.append(optimizer)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=0, atol=1e-13)
    torch.testing.assert_close(trained[0].exp_avg_sq_mean, trained[1].exp_avg_sq_mean, rtol=1e-12, atol=0)


@pytest.mark.backends(split=True, without=("cpu",))
def test_the_warning_comes_late_and_without_waiting(backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(1000))
    param.grad = torch.full((1000,), 3e-5)
    optimizer = FusedAdamS([param], weight_decay=0.1, backend=backend)

    def steps() -> None:
        optimizer.step()
        for _ in range(3):
            with no_waiting():  # what was on its way has arrived when it begins
                optimizer.step()

    with pytest.warns(UserWarning, match=r"max_decay=0\.1 allows 10%") as caught:
        steps()
    assert len(caught) == 1


# --- Launches


@pytest.mark.backends(without=("torch",))
@pytest.mark.parametrize("options", MODES)
def test_a_step_is_one_launch(backend: str, options: dict[str, Any]) -> None:
    """Of the optimizer's kernels. Beside it a few numbers may be on their way to the host, for the warning."""
    shapes = [(100 + i, 7) for i in range(300)]
    params = random_params(shapes)
    optimizer = FusedAdamS(params, backend=backend, **options)
    set_grads(params, random_grads(shapes, 1)[0])
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "_kernel" in event.name and "at::" not in event.name]
    step = "lagged_step_kernel" if options.get("schedule") == "lagged" else "exact_step_kernel"
    assert names.count(step) == 1
    assert not [name for name in names if name.endswith("_sums_kernel") or name == "update_kernel"]


@triton_only
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_full_grid_is_resident(backend: str, dtype: torch.dtype, amsgrad: bool) -> None:
    """As many programs as the device holds at once, each with several blocks: too many would be refused, or hang."""
    from swd_fused.backends.triton.launch import BLOCK, PROGRAMS_PER_MULTIPROCESSOR

    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    numel = 3 * BLOCK * multiprocessors * PROGRAMS_PER_MULTIPROCESSOR + 5
    params, grads = random_params([(numel,)], dtype), random_grads([(numel,)], 3, dtype)
    twins = twins_of(params)
    optimizer = FusedAdamS(params, amsgrad=amsgrad, backend=backend)
    run(params, grads, optimizer)
    (part,) = optimizer._stepper._kept[0].buckets[0].plan._with_sums
    assert part.programs % multiprocessors == 0
    assert multiprocessors <= part.programs <= multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    run(twins, grads, FusedAdamS(twins, amsgrad=amsgrad, backend="torch"))
    torch.testing.assert_close(params[0], twins[0], rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@triton_only
def test_beyond_2_31_elements(backend: str) -> None:
    numel = 2**31 + 2**20 + 5
    if torch.cuda.mem_get_info()[0] < 12.5 * numel:
        pytest.skip("needs 27 GB of free GPU memory: tensors beyond 2^31 elements")
    param = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
    param.grad = torch.full((numel,), 0.5, dtype=torch.bfloat16)
    optimizer = FusedAdamS([param], lr=0.5, betas=(0.0, 0.0), eps=0.0, backend=backend)
    optimizer.step()
    assert optimizer.exp_avg_sq_mean == 0.25
    assert optimizer.grad_norm.item() == pytest.approx(0.5 * numel**0.5, rel=1e-12)
    assert all((slab == -0.5).all() for slab in param.detach().split(2**26))


# --- CUDA graphs


def warm_up(step: Callable[[], object], times: int) -> None:
    """On a side stream, as torch's documentation asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            step()
    torch.cuda.current_stream().wait_stream(side)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """What replays the step. Capturing does not take it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@triton_only
@pytest.mark.parametrize("options", MODES)
def test_replay_of_a_whole_training_step(backend: str, options: dict[str, Any]) -> None:
    """The gradients are allocated within the graph, so their addresses are uploaded by it, in each replay."""
    inputs = [torch.randn(16, 9) for _ in range(6)]
    model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    twin = copy.deepcopy(model)
    lr = torch.tensor(1e-2)

    def training_step(own: torch.nn.Module, optimizer: FusedAdamS, x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        own(x).square().mean().backward()
        optimizer.step()

    eager = FusedAdamS(twin.parameters(), lr=lr, backend=backend, **options)
    for x in inputs:
        training_step(twin, eager, x)

    optimizer = FusedAdamS(model.parameters(), lr=lr, backend=backend, **options)
    static = inputs[0].clone()
    for x in inputs[:3]:
        static.copy_(x)
        warm_up(lambda: training_step(model, optimizer, static), 1)
    optimizer.zero_grad(set_to_none=True)
    replay = captured(lambda: training_step(model, optimizer, static))
    for x in inputs[3:]:
        static.copy_(x)
        replay()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


# --- Streams and devices


@pytest.mark.backends(split=True, without=("cpu",))
@pytest.mark.parametrize("options", MODES)
def test_steps_on_another_stream(backend: str, options: dict[str, Any]) -> None:
    """Streams take turns; in between memory is freed and used again, which must not be the optimizer's."""
    params, grads = random_params(SHAPES), random_grads(SHAPES, 6)
    twins = twins_of(params)
    run(twins, grads, FusedAdamS(twins, backend=backend, **options))
    optimizer = FusedAdamS(params, backend=backend, **options)
    streams = [torch.cuda.Stream(), torch.cuda.current_stream()]
    for t, step_grads in enumerate(grads):
        set_grads(params, [grad.clone() for grad in step_grads])
        with on_stream(streams[t % 2]):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for shape in SHAPES:
            torch.full(shape, float("nan"))
    assert all(map(torch.equal, params, twins))


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """In order with what comes before and after on the current stream."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA or ROCm GPUs")
@pytest.mark.backends(split=True, without=("cpu",))
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"amsgrad": True}], ids=str)
def test_two_devices_share_one_schedule(backend: str, options: dict[str, Any]) -> None:
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, 4, torch.float64)
    reference = defined(params, grads, [{"params": range(len(SHAPES))}], **options)
    devices = ["cuda:0", "cuda:1"]
    params = [torch.nn.Parameter(param.detach().to(devices[i % 2])) for i, param in enumerate(params)]
    optimizer = FusedAdamS(params, backend=backend, **options)
    for step_grads in grads:
        set_grads(params, [grad.to(param.device) for param, grad in zip(params, step_grads, strict=True)])
        optimizer.step()
    assert error(params, reference.params) < 1e-14
    assert {str(optimizer.state[param]["exp_avg"].device) for param in params} == set(devices)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA or ROCm GPUs")
@triton_only
def test_a_device_that_is_not_the_current_one(backend: str) -> None:
    device = "cuda:1"
    params = [torch.nn.Parameter(torch.ones(1000, device=device)) for _ in range(3)]
    optimizer = FusedAdamS(params, backend=backend)
    for _ in range(2):
        set_grads(params, [torch.ones(1000, device=device) for _ in params])
        optimizer.step()
    assert all((param < 1).all() for param in params)


def test_auto_takes_the_triton_kernels() -> None:
    assert "backend: triton\n" in repr(FusedAdamS(random_params([(3,)])))


def test_state_follows_a_model_that_is_moved(backend: str) -> None:
    """By the advice that the refusal gives."""
    with torch.device("cpu"):
        model = torch.nn.Linear(30, 20)
        grads = [[torch.randn(param.shape) for param in model.parameters()] for _ in range(4)]
    twin = copy.deepcopy(model)
    optimizers = [FusedAdamS(module.parameters()) for module in (model, twin)]
    for step, (weight, bias) in enumerate(grads):
        if step == 2:
            model.cuda()
        for module, optimizer in zip((model, twin), optimizers, strict=True):
            module.weight.grad, module.bias.grad = weight.to(module.weight.device), bias.to(module.bias.device)
            if step == 2 and module is model:
                with pytest.raises(RuntimeError, match=r"load_state_dict\(optimizer.state_dict\(\)\)"):
                    optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
    assert {state["exp_avg"].device.type for state in optimizers[0].state.values()} == {"cuda"}
    torch.testing.assert_close(model.weight.cpu(), twin.weight, rtol=1e-6, atol=1e-7)

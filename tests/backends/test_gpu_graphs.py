"""CUDA graphs mixed with other graphs and with steps that are not captured, against the torch backend on the CPU.

A captured float `lr` is a constant of its graph, as in AdamW(capturable=True). Needs a GPU, or the virtual one.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS, outliers
from swd_fused.devices import graphs
from tests.backends.test_gpu import MODES, captured, warm_up
from tests.device import DEVICE, needs_gpu

pytestmark = [
    needs_gpu,
    pytest.mark.backends(without=("torch", "cpu"), split=True),
]

# More than one segment and program, no elements, tails.
SHAPES = [(1025,), (40, 30), (), (0,), (7, 3)]
ALL = [0, 1, 2, 3, 4]


class Mixed:
    """A model on the GPU and its twin on the CPU, which takes each step as it should be."""

    def __init__(self, backend: str, options: dict[str, Any], lr: float | Tensor = 1e-2) -> None:
        values = [torch.randn(shape, device="cpu") for shape in SHAPES]
        self.params = [torch.nn.Parameter(value.to(DEVICE)) for value in values]
        self.twins = [torch.nn.Parameter(value.clone()) for value in values]
        self.optimizer = FusedAdamS(self.params, lr=lr, weight_decay=1e-2, backend=backend, **options)
        own_lr = lr.cpu() if isinstance(lr, Tensor) else lr
        self.twin = FusedAdamS(self.twins, lr=own_lr, weight_decay=1e-2, backend="torch", **options)
        for _ in range(2):
            self.step()

    @property
    def _lr(self) -> float | Tensor:
        return self.optimizer.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr

    def step(self, which: list[int] = ALL) -> None:
        """A step that is not captured, of these parameters, with new gradients at new addresses."""
        grads = self._new_grads(which)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.to(DEVICE)
        self.optimizer.step()
        self._step_twin(grads, self._lr)
        self._reuse_freed_memory()

    def capture(self, which: list[int] = ALL, warm: bool = True) -> Callable[[], None]:
        """Returns what replays a step with new gradients, at the `lr` of now. A `warm` capture finds the tables of a
        step with the same gradients, others make their own."""
        static = [torch.zeros(shape) if i in which else None for i, shape in enumerate(SHAPES)]
        for param, grad in zip(self.params, static, strict=True):
            param.grad = grad
        if warm:
            self.optimizer.step()
            self._step_twin([None if grad is None else grad.cpu() for grad in static], self._lr)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.optimizer.step()
        lr = self._lr
        self._reuse_freed_memory()

        def replay() -> None:
            grads = self._new_grads(which)
            for own, grad in zip(static, grads, strict=True):
                if own is not None and grad is not None:
                    own.copy_(grad)
            graph.replay()
            self._step_twin(grads, lr)
            self._reuse_freed_memory()

        return replay

    def check(self) -> None:
        self.check_logged()
        for param, twin in zip(self.params, self.twins, strict=True):
            torch.testing.assert_close(param.cpu(), twin, rtol=2e-5, atol=2e-6)
            for key, value in self.optimizer.state[param].items():
                torch.testing.assert_close(value.cpu(), self.twin.state[twin][key], rtol=2e-5, atol=2e-6)

    def check_logged(self) -> None:
        """Compares what users log of the last step, whether it was a replay or not."""
        for name in ("grad_norm", "exp_avg_sq_mean"):
            logged, expected = getattr(self.optimizer, name).cpu(), getattr(self.twin, name)
            torch.testing.assert_close(logged, expected, rtol=2e-5, atol=1e-12, check_dtype=False)
        assert self.optimizer.rms_grads() == pytest.approx(self.twin.rms_grads(), rel=2e-5)

    def _new_grads(self, which: list[int]) -> list[Tensor | None]:
        return [0.1 * torch.randn(shape, device="cpu") if i in which else None for i, shape in enumerate(SHAPES)]

    def _step_twin(self, grads: list[Tensor | None], lr: float | Tensor) -> None:
        for param, grad in zip(self.twins, grads, strict=True):
            param.grad = grad
        self.twin.param_groups[0]["lr"] = lr.cpu() if isinstance(lr, Tensor) else lr
        self.twin.step()

    def _reuse_freed_memory(self) -> None:
        """So that a table which was freed too early holds something else."""
        gc.collect()
        _ = [torch.full((size,), -1) for size in (8, 64, 100, 512) for _ in range(8)]


@pytest.fixture(params=MODES)
def mixed(request: pytest.FixtureRequest, backend: str) -> Mixed:
    return Mixed(backend, request.param)


def test_what_is_logged_is_that_of_the_last_step_whoever_took_it(mixed: Mixed) -> None:
    replays = mixed.capture(), mixed.capture(warm=False)
    for take in (*replays, mixed.step, *replays, mixed.step, mixed.step, *reversed(replays)):
        take()
        mixed.check_logged()
    logged, expected = mixed.optimizer.metrics(), mixed.twin.metrics()
    assert logged == pytest.approx(expected, rel=1e-4)


def test_eager_steps_between_replays_have_their_own_gradients_and_lr(mixed: Mixed) -> None:
    replay = mixed.capture()
    mixed.step()  # before the first replay: what was only captured has not been uploaded
    for lr in (3e-2, 1e-3):
        replay()
        mixed.set_lr(lr)
        mixed.step()
    replay()
    mixed.check()


def test_two_graphs_at_different_lrs_in_any_order(mixed: Mixed) -> None:
    mixed.set_lr(2e-2)
    first = mixed.capture(warm=False)
    second_at_the_same_lr = mixed.capture(warm=False)
    mixed.set_lr(1e-3)
    third = mixed.capture()
    for replay in (second_at_the_same_lr, third, first, third, second_at_the_same_lr):
        replay()
    mixed.step()
    first()
    mixed.check()


def test_other_sets_of_gradients_between_replays(mixed: Mixed) -> None:
    """Of eager steps, and of graphs that were captured with sets for which there was no eager step before."""
    everything = mixed.capture()
    mixed.step([0, 2, 3])
    everything()
    some = mixed.capture([0, 1], warm=False)
    mixed.step([1, 4])
    for replay in (some, everything, some):
        replay()
    mixed.step()
    some()
    mixed.step([0, 2, 3])
    everything()
    mixed.check()


def test_a_set_of_gradients_that_was_only_captured_is_new_to_eager_steps_and_graphs(backend: str) -> None:
    """Which gradients are missing was uploaded by a graph that nobody has replayed."""
    mixed = Mixed(backend, {})
    mixed.capture([0, 1], warm=False)
    second = mixed.capture([0, 1], warm=False)
    mixed.step([0, 1])
    mixed.capture(warm=False)
    mixed.step()
    second()
    mixed.check()


@pytest.mark.parametrize("options", MODES)
def test_a_tensor_lr_is_read_in_each_replay(backend: str, options: dict[str, Any]) -> None:
    lr = torch.tensor(1e-2)
    mixed = Mixed(backend, options, lr)
    replay = mixed.capture()
    for value in (3e-2, 1e-3):
        lr.fill_(value)
        replay()
        mixed.step()
    mixed.check()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"master_weights": True}),
        (torch.bfloat16, {"stochastic_rounding": True}),
        (torch.float32, {"state_dtype": "8bit"}),
        (torch.float32, {"state_dtype": "8bit", "schedule": "lagged"}),
    ],
    ids=str,
)
def test_replays_are_eager_steps_bit_by_bit(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Random bits follow the step count, which is on the device."""
    results = []
    for use_graph in (False, True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in [*SHAPES, (9, 512), (11, 402)]]
        optimizer = FusedAdamS(params, backend=backend, **options)
        for param in params:
            param.grad = torch.randn_like(param)
        warm_up(optimizer.step, 2)
        step = captured(optimizer.step) if use_graph else optimizer.step
        for _ in range(3):
            for param in params:
                param.grad.mul_(-0.7)  # type: ignore[union-attr]
            step()
        results.append([*params, *(value for param in params for value in optimizer.state[param].values())])
    assert all(map(torch.equal, *results))


def test_a_graph_after_loading_goes_on_with_the_state_that_it_had(backend: str) -> None:
    """As with AdamW, but in memory that is still its own: what was loaded is not touched."""
    mixed = Mixed(backend, {})
    replay = mixed.capture()
    mixed.optimizer.load_state_dict(mixed.optimizer.state_dict())
    loaded = copy.deepcopy(mixed.optimizer.state_dict()["state"])
    mixed._reuse_freed_memory()
    for _ in range(2):
        replay()
    for param, twin in zip(mixed.params, mixed.twins, strict=True):
        torch.testing.assert_close(param.cpu(), twin, rtol=2e-5, atol=2e-6)
    for number, state in mixed.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, loaded[number][key]) for key, value in state.items())


# --- Lifetimes


def test_all_that_graphs_refer_to_goes_with_the_optimizer(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing before: each re-capture makes tables of its own, and any graph may be replayed."""
    mixed = Mixed(backend, {})
    pinned: list[weakref.ref[Tensor]] = []
    keep = graphs.keep

    def noting(tensor: Tensor) -> None:
        pinned.append(weakref.ref(tensor))
        keep(tensor)

    monkeypatch.setattr(graphs, "keep", noting)
    replays = []
    for lr in (2e-2, 3e-2, 4e-2):
        mixed.set_lr(lr)
        replays.append(mixed.capture(warm=False))
    mixed.optimizer.load_state_dict(mixed.optimizer.state_dict())
    mixed._reuse_freed_memory()
    captured = [weakref.ref(part) for part in mixed.optimizer._stepper._in_graphs if not isinstance(part, list)]
    steps = weakref.ref(mixed.optimizer.state[mixed.params[0]]["step"])
    assert len(captured) == 3
    assert len(pinned) >= 2 * 3  # addresses and hyper-parameters of each
    assert all(own() is not None for own in (*pinned, *captured))
    assert graphs.are_shared([captured[0]().buckets[0].steps])  # type: ignore[union-attr]
    for replay in replays:
        replay()
    torch.cuda.synchronize()

    del mixed.optimizer
    gc.collect()
    assert not any(own() is not None for own in (*pinned, *captured, steps))
    assert not any(not storage.expired() for storage in graphs._shared_storages.values())


def test_step_counts_at_the_address_of_those_of_a_graph_that_is_gone_are_not_taken_for_them() -> None:
    counts = torch.zeros(3)
    address = counts.data_ptr()
    graphs.share_steps([counts])
    assert graphs.are_shared([counts[1:]])
    del counts
    others = [torch.zeros(3) for _ in range(100)]
    assert address in map(Tensor.data_ptr, others)
    assert not graphs.are_shared(others)


# --- What cannot be captured says so, and leaves everything as it was


def refused(mixed: Mixed, error: type[Exception], match: str, **step_arguments: Any) -> None:
    before = [param.detach().clone() for param in mixed.params]
    for param in mixed.params:
        param.grad = torch.ones_like(param)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1)  # torch warns of graphs that are empty
        with pytest.raises(error, match=match):
            mixed.optimizer.step(**step_arguments)
    assert all(map(torch.equal, mixed.params, before))
    mixed.step()
    mixed.check()


def test_a_cpu_lr_cannot_be_captured(backend: str) -> None:
    mixed = Mixed(backend, {}, torch.tensor(1e-2, device="cpu"))
    refused(mixed, ValueError, "lr=0.01 as a CPU tensor in the capture")


def test_a_first_step_cannot_be_captured(backend: str) -> None:
    """Of one parameter, while the others have state."""
    mixed = Mixed(backend, {})
    mixed.optimizer.state.pop(mixed.params[2])
    mixed.twin.state.pop(mixed.twins[2])
    refused(mixed, RuntimeError, "the first step of some parameters")


def test_a_sum_that_is_carried_on_by_the_host_cannot_be_captured(backend: str) -> None:
    mixed = Mixed(backend, {})
    numel = sum(param.numel() for param in mixed.params)
    refused(mixed, RuntimeError, "Leave out numel", grad_sumsq=1.0, numel=numel)
    mixed.capture()
    with pytest.raises(RuntimeError, match="after steps of a CUDA graph"):
        mixed.optimizer.step(grad_sumsq=1.0, numel=numel)


def test_steps_that_may_be_skipped_count_in_each_replay(backend: str) -> None:
    mixed = Mixed(backend, {})
    mixed.optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    refused(mixed, RuntimeError, "the first step that may be skipped")
    mixed.step()
    replay = mixed.capture()
    mixed.optimizer.found_inf.fill_(1)  # type: ignore[attr-defined]
    before = [param.detach().clone() for param in mixed.params]
    for _ in range(3):
        replay()
    assert mixed.optimizer.skipped_steps == 3
    assert all(map(torch.equal, mixed.params, before))


def test_steps_that_clip_count_in_each_replay(backend: str) -> None:
    mixed = Mixed(backend, {})
    mixed.optimizer.max_grad_norm = mixed.twin.max_grad_norm = 1.0
    refused(mixed, RuntimeError, "the first step that clips")  # ends with a step whose norm is far above
    replay = mixed.capture()  # after a step whose gradients are zero
    for _ in range(3):
        replay()
    assert mixed.optimizer.metrics()["clipped_share"] == 4 / 5
    mixed.step()
    assert mixed.optimizer.metrics()["clipped_share"] == mixed.twin.metrics()["clipped_share"] == 5 / 6


@pytest.mark.parametrize("mode", ["skip", "clip"])
def test_steps_that_stand_out_are_decided_in_each_replay(
    backend: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outliers, "MEASURED_STEPS", 2)
    mixed = Mixed(backend, {})
    for each in (mixed.optimizer, mixed.twin):
        each.outliers, each.outlier_sigma = mode, 0.05
    refused(mixed, RuntimeError, "the first step")  # ends with a step
    replay = mixed.capture()
    for _ in range(6):
        replay()
    mixed.step()
    numbers = [each.param_groups[0][outliers.KEY].cpu() for each in (mixed.optimizer, mixed.twin)]
    torch.testing.assert_close(*numbers, rtol=1e-5, atol=0)
    assert 0 < float(numbers[0][4]) < 8


@pytest.mark.backends(without=("cpu", "triton"))
def test_the_torch_backend_cannot_be_captured(backend: str) -> None:
    refused(Mixed(backend, {}), RuntimeError, 'wanted backend="triton"')

"""Moments in 8 bits: which tensors have them, and what is stored, by each backend as by the definition."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.state import eight_bit
from swd_fused.state.rounding import scrambled
from tests.definition import Group
from tests.eight_bit_definition import EightBitAdamS, random_bytes
from tests.runs import error, is_interpreted, random_grads, random_params, run, steps_for, to_numpy

# Rows of whole blocks, with a short last one, and shorter than a block; vectors; more dimensions; and small tensors.
SHAPES = [(20, 256), (17, 300), (130, 32), (4200,), (3, 40, 50), (9, 3, 3, 64), (40,), (5, 5)]
SMALL_SHAPES = [(2, 256), (2, 300), (3, 32), (300,), (40,), (5, 5)]
LEAST_VECTOR = eight_bit.LEAST_VECTOR
CODED_KEYS = {"step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_root_codes", "exp_avg_sq_root_scales"}


@pytest.fixture(autouse=True)
def _small_tensors_too(backend_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors count as other tensors. In Triton's interpreter tensors are smaller, and so is the smallest that is
    coded."""
    least = 90 if is_interpreted(backend_name) else eight_bit.LEAST_NUMEL
    for name in ("LEAST_NUMEL", "LEAST_VECTOR"):
        monkeypatch.setattr(eight_bit, name, least)


@pytest.fixture
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("backend") if "backend" in request.fixturenames else "torch"  # type: ignore[no-any-return]


def shapes_for(backend: str) -> list[tuple[int, ...]]:
    return SMALL_SHAPES if is_interpreted(backend) else SHAPES


def one_group(params: list[Any], **options: Any) -> list[dict[str, Any]]:
    return [{"params": params, "lr": 1e-2, "weight_decay": 2e-3, "betas": (0.9, 0.99), **options}]


def coded_keys(optimizer: FusedAdamS) -> list[bool]:
    return ["exp_avg_codes" in optimizer.state[param] for param in optimizer.numbered_params()]


def second_moments(optimizer: FusedAdamS) -> list[Tensor]:
    moments = []
    for param in optimizer.numbered_params():
        state = optimizer.state[param]
        if "exp_avg_sq" in state:
            moments.append(state["exp_avg_sq"])
        else:
            codes, scales = state["exp_avg_sq_root_codes"], state["exp_avg_sq_root_scales"]
            moments.append(eight_bit.decoded("exp_avg_sq", codes, scales))
    return moments


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 0.5},
    {"schedule": "lagged"},
    {"amsgrad": True},
    {"decay": "decoupled", "weight_decay": 0.1},
    {"decay": "l2", "weight_decay": 0.1},
    {"maximize": True, "seed": 2**40 + 3},
]


WRONG_NOISE = {
    "codes stick": lambda key, block, element: (128, 128),
    "the same bits in each step": lambda key, block, element: random_bytes(7, block, element),
    "the same bits for both moments": lambda key, block, element: random_bytes(key, block, element)[:1] * 2,
}


@pytest.mark.backends(split=True)
def test_against_the_definition(backend: str) -> None:
    """To float32's rounding, but for the few codes that it changes. With other noise the definition is far away."""
    shapes = shapes_for(backend)
    params, grads = random_params(shapes), random_grads(shapes, steps_for(backend, 6))
    start = [to_numpy(param) for param in params]
    optimizer = FusedAdamS(one_group(params), state_dtype="8bit", backend=backend)
    run(params, grads, optimizer)

    def judge_with(noise: Any = None) -> EightBitAdamS:
        judge = EightBitAdamS(start, [Group(**one_group(list(range(len(params))))[0])])
        judge.least_numel, judge.noise = eight_bit.LEAST_NUMEL, noise or judge.noise  # type: ignore[method-assign]
        for step_grads in grads:
            judge.step([to_numpy(grad) for grad in step_grads])
        return judge

    judge = judge_with()
    moved = float(np.sqrt(np.mean([np.mean((a - b) ** 2) for a, b in zip(judge.params, start, strict=True)])))
    assert error(params, judge.params) < 1e-4 * moved
    for name, noise in WRONG_NOISE.items():
        assert error(params, judge_with(noise).params) > 1e-3 * moved, name
    assert error(second_moments(optimizer), judge.exp_avg_sq) < 1e-4 * float(judge.exp_avg_sq_mean)
    assert float(optimizer.exp_avg_sq_mean) == pytest.approx(float(judge.exp_avg_sq_mean), rel=1e-6)


@pytest.mark.backends(without=("torch",), split=True)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_codes_on_all_backends(backend: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    shapes = shapes_for(backend)
    grads = random_grads(shapes, steps_for(backend, 5), dtype)
    grads[-1] = [None if i == 1 else grad for i, grad in enumerate(grads[-1])]  # type: ignore[misc]
    states, results = [], []
    for name in ("torch", backend):
        torch.manual_seed(0)
        params = random_params(shapes, dtype)
        extra = {"stochastic_rounding": True} if dtype == torch.bfloat16 else {}
        optimizer = FusedAdamS(one_group(params), state_dtype="8bit", backend=name, **{**options, **extra})
        run(params, grads, optimizer)
        states.append([optimizer.state[param] for param in params])
        results.append(params)
    differing = total = 0
    for own, other in zip(*states, strict=True):
        assert own.keys() == other.keys()
        for key in own:
            is_apart = ~torch.isclose(own[key].float(), other[key].float(), rtol=1e-4, atol=1e-6)
            differing, total = differing + int(is_apart.sum()), total + is_apart.numel()
            if key.endswith("codes"):
                assert int((own[key].int() - other[key].int()).abs().max()) <= 1
    assert total
    assert differing <= 2e-4 * total + 1
    for param, other in zip(*results, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-4)


@pytest.mark.backends(interpreted=False)
def test_the_sum_of_what_is_stored_has_no_bias(backend: str) -> None:
    """Rounded to nearest it would fall behind, by more from step to step."""
    torch.manual_seed(3)
    sizes = torch.rand(64, 512).pow(4)  # codes of all sizes within a block
    params = [torch.nn.Parameter(torch.zeros(64, 512))]
    optimizer = FusedAdamS(params, state_dtype="8bit", backend=backend)
    shadow = torch.zeros(64, 512, dtype=torch.float64)
    for t in range(300):
        params[0].grad = torch.randn(64, 512) * sizes / (1 + t / 100)
        shadow = 0.999 * shadow + 0.001 * params[0].grad.double().square()
        optimizer.step()
    (stored,) = second_moments(optimizer)
    assert float(stored.double().sum() / shadow.sum()) == pytest.approx(1, abs=3e-3)


def test_no_second_moment_vanishes(backend: str) -> None:
    """A weight whose second moment rounds to zero would take a step divided by eps."""
    params = random_params([(4, 1024)])
    start = params[0].detach().clone()
    optimizer = FusedAdamS(params, lr=1e-3, state_dtype="8bit", backend=backend)
    grad = torch.full((4, 1024), 1e-6)
    grad[:, ::256] = 1.0
    for _ in range(3):
        run(params, [[grad]], optimizer)
        (second,) = second_moments(optimizer)
        assert (second > 0).all()
    assert float((params[0].detach() - start).abs().max()) < 5e-3


def test_zero_gradients_change_nothing(backend: str) -> None:
    """Loaders of checkpoints take such a step on a fresh optimizer. Codes whose scale has no inverse are zeros."""
    params = random_params([(4, 1024)])
    start = params[0].detach().clone()
    optimizer = FusedAdamS(params, state_dtype="8bit", backend=backend)
    run(params, [[torch.zeros(4, 1024)]] * 2, optimizer)
    assert torch.equal(params[0], start)
    assert not optimizer.state[params[0]]["exp_avg_codes"].any()
    assert not second_moments(optimizer)[0].any()


def test_a_gradient_that_is_not_finite_is_not_forgotten(backend: str) -> None:
    """It takes its block with it, and the others stay as they are. With skip_nonfinite nothing is changed."""
    for skip in (False, True):
        params = random_params([(4, 1024)])
        optimizer = FusedAdamS(params, state_dtype="8bit", skip_nonfinite=skip, backend=backend)
        run(params, [[torch.ones(4, 1024)]], optimizer)
        before = copy.deepcopy(optimizer.state_dict()["state"][0])
        grad = torch.ones(4, 1024)
        grad[1, 300] = -torch.nan
        run(params, [[grad]], optimizer)
        (second,) = second_moments(optimizer)
        is_lost = torch.zeros(4, 1024, dtype=torch.bool)
        if skip:
            assert all(torch.equal(value, optimizer.state[params[0]][key]) for key, value in before.items())
        else:
            is_lost[1, 256:512] = True
        assert torch.equal(second.isnan(), is_lost)


# --- Which tensors


def test_biases_and_norms_keep_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded ones have to, so that a checkpoint does not depend on it."""
    monkeypatch.setattr(eight_bit, "LEAST_VECTOR", LEAST_VECTOR)
    assert not eight_bit.fits(torch.empty(16_384))
    assert eight_bit.fits(torch.empty(1 << 20))
    assert eight_bit.fits(torch.empty(16, 256))


def test_small_tensors_and_short_rows_keep_float32(backend: str) -> None:
    shapes = [(64, 64), (4095,), (4096,), (1024, 15), (1024, 16), ()]
    params = random_params(shapes)
    if is_interpreted(backend):
        pytest.skip("the size that is asked for is another one there")
    optimizer = FusedAdamS(params, state_dtype="8bit", backend=backend)
    run(params, [[torch.randn(shape) for shape in shapes]], optimizer)
    assert coded_keys(optimizer) == [True, False, True, False, True, False]
    assert optimizer.state[params[0]].keys() == CODED_KEYS


@pytest.mark.parametrize("number", [0, (1 << 25) - 1, (1 << 31) + 5, (1 << 40) + 7])
@pytest.mark.parametrize("key", [1, 0x80000000, 0xFFFFFFFF])
def test_random_bits_are_those_of_whole_numbers(number: int, key: int) -> None:
    """They are computed in int32, which wraps around: here in Python's numbers, which do not."""

    def pair_bits(pair: int) -> int:
        of_pair = (key + scrambled(pair >> 32)) & 0xFFFFFFFF
        return scrambled(of_pair ^ (pair * 0x9E3779B9 & 0xFFFFFFFF))

    hashes = [pair_bits(number * 128 + place) for place in range(128)]
    noises = eight_bit.noise_of_blocks(torch.tensor(key), torch.tensor([number]))
    for low, noise in zip((0, 8), noises, strict=True):
        assert noise[0].tolist() == [bits >> shift & 0xFF for bits in hashes for shift in (low, low + 16)]


# --- State dicts, and writes by others


def trained(options: dict[str, Any], steps: int = 3, shape: tuple[int, ...] = (16, 300)) -> FusedAdamS:
    torch.manual_seed(0)
    params = random_params([shape])
    optimizer = FusedAdamS(params, **options)
    run(params, random_grads([shape], steps), optimizer)
    return optimizer


@pytest.mark.backends(interpreted=False)
@pytest.mark.parametrize("key", ["exp_avg_sq_root_codes", "exp_avg_sq_root_scales"])
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_writes_by_others_are_seen(backend: str, key: str, schedule: str) -> None:
    """A second moment that somebody has changed has another sum."""
    results = []
    for resumes in (False, True):
        optimizer = trained({"state_dtype": "8bit", "backend": backend, "schedule": schedule})
        (param,) = optimizer.numbered_params()
        value = optimizer.state[param][key]
        value.copy_(value // 2 + 1 if key.endswith("codes") else value * 2)
        if resumes:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
        run([param], random_grads([(16, 300)], 1), optimizer)
        results.append((param.detach().clone(), float(optimizer.exp_avg_sq_mean)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_numbers_beside_codes_are_dropped(backend: str) -> None:
    """Or the neighbour, whose moments are numbers, would take them for its own."""
    shapes = [(16, 300), (16, 300)]
    params, grads = random_params(shapes), random_grads(shapes, 2)
    groups = [{"params": params[:1]}, {"params": params[1:], "state_dtype": None}]
    optimizer = FusedAdamS(groups, state_dtype="8bit", backend=backend)
    run(params, grads[:1], optimizer)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0].update({key: torch.ones(16, 300) for key in ("exp_avg", "exp_avg_sq")})
    optimizer.load_state_dict(state_dict)
    assert optimizer.state[params[0]].keys() == CODED_KEYS
    run(params, grads[1:], optimizer)
    assert not torch.equal(optimizer.state[params[1]]["exp_avg_sq"], state_dict["state"][1]["exp_avg_sq"])

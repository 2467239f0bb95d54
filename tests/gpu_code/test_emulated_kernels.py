"""The compiled step, executed: the PTX of the kernels in the emulator, against the definition and bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swd_fused.backends.triton.kernels.tables import RESULT, TENSOR
from swd_fused.state.element_numbers import ElementNumbers
from swd_fused.state.rounding import rounding_keys, stochastically_rounded
from tests.definition import WRONG, AdamS, AgreesElsewhere, AgreesWithAll, AgreesWithGradient, MeanOfStepBefore
from tests.masters_definition import nearest
from tests.runs import defined, error, fused, moments, random_grads, random_params

from .emulated_step import Change, EmulatedStep
from .offline_compiler import CONFIGURATIONS
from .ptx_emulator import RaceError

EXACT, LAGGED = "exact_step_kernel", "lagged_step_kernel"

# Shorter and longer than blocks of 256, 512 and 1024, and than the 4096 to 8192 elements that pass 1 takes at once.
SHAPES = [(1,), (513,), (1031,), (0,), (8192 + 1024 + 7,), (8192,)]
SMALL = [(1,), (513,), (1031,), (0,), (2048,)]  # for what takes long
STEPS = 3


def two_groups(count: int) -> list[dict[str, Any]]:
    """That differ in everything, one of them maximized and without decay."""
    first = {"lr": 1e-2, "weight_decay": 2e-3, "betas": (0.9, 0.99), "eps": 1e-8}
    second = {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6, "maximize": True}
    return [{"params": [*range(i, count, 2)], **group} for i, group in enumerate((first, second))]


def groups_for(configuration: str, count: int) -> list[dict[str, Any]]:
    """Where kernels know of cautious groups, the first one is cautious, and the other one decays as well."""
    groups = two_groups(count)
    if CONFIGURATIONS[configuration].variant.cautious:
        groups[0]["cautious_decay"], groups[1]["weight_decay"] = True, 1e-3
    return groups


def start(
    configuration: str, shapes: list[tuple[int, ...]] = SHAPES
) -> tuple[list[torch.nn.Parameter], list[list[Tensor]]]:
    dtypes = CONFIGURATIONS[configuration].dtypes
    return random_params(shapes, dtypes.param), random_grads(shapes, STEPS, dtypes.grad)


def take_steps(
    model: EmulatedStep,
    grads: list[list[Tensor]],
    kernel: str = EXACT,
    grad_scale: float = 1.0,
    seed: int | None = None,
) -> None:
    """A lagged run begins with an exact step, as the optimizer has it."""
    for step, step_grads in enumerate(grads):
        model.set_grads(step_grads, grad_scale)
        if kernel == LAGGED and step == 1:
            model.launch("last_exp_avg_sq_sum_kernel")
        model.launch(EXACT if step == 0 else kernel, seed=seed)
        assert model.get("counter", np.int32) == 0


PRECISION: dict[str, dict[str, Any]] = {
    "bf16 with masters": {"master_weights": True},
    "fp16 with masters": {"master_weights": True},
    "bf16 with bf16 exp_avg": {"state_dtype": torch.bfloat16},
    "fp32 amsgrad": {"amsgrad": True},
}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (EXACT, configuration, {})
        for configuration in CONFIGURATIONS
        if "chance" not in configuration and "8 bits" not in configuration
    ),
    (EXACT, "fp32", {"offset": 1}),
    (EXACT, "bf16", {"offset": 1, "max_grad_norm": 0.5}),
    (EXACT, "fp32", {"max_grad_norm": 0.5}),
    (EXACT, "fp32 amsgrad", {"max_grad_norm": 0.5}),
    (EXACT, "fp32", {"programs": 1}),
    (LAGGED, "fp32", {}),
    (LAGGED, "bf16", {"offset": 1}),
    (LAGGED, "fp32 amsgrad", {}),
]
OTHER_ARCHITECTURES: list[tuple[str, str, dict[str, Any]]] = [
    (EXACT, "fp32", {"arch": 80}),
    (EXACT, "fp32", {"arch": 100}),
    (EXACT, "bf16", {"arch": 100}),
    (EXACT, "bf16", {"arch": 75}),  # which has no instructions that convert bfloat16
]


@pytest.mark.parametrize(
    ("kernel", "configuration", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_ARCHITECTURES)],
    ids=str,
)
def test_steps_are_as_near_to_the_definition_as_plain_pytorch(
    kernel: str, configuration: str, options: dict[str, Any]
) -> None:
    params, grads = start(configuration)
    groups = groups_for(configuration, len(params))
    model = EmulatedStep(configuration, params, groups, **options)
    take_steps(model, grads, kernel)
    lagged, clip, amsgrad = kernel == LAGGED, options.get("max_grad_norm"), "amsgrad" in configuration
    reference = defined(params, grads, groups, MeanOfStepBefore if lagged else AdamS, clip, amsgrad=amsgrad)
    plain = plain_run(
        configuration, params, grads, groups, schedule="lagged" if lagged else "exact", max_grad_norm=clip
    )
    for tensors, plain_tensors, right in (
        (model.weights, plain["weight"], reference.params),
        (model.tensors(TENSOR.exp_avg), plain["exp_avg"], reference.exp_avg),
        (model.tensors(TENSOR.exp_avg_sq), plain["exp_avg_sq"], reference.exp_avg_sq),
    ):
        assert error(tensors, right) <= 2 * error(plain_tensors, right)
    if amsgrad:
        maxima = model.tensors(TENSOR.max_exp_avg_sq)
        assert error(maxima, reference.max_exp_avg_sq) <= 2 * error(plain["max_exp_avg_sq"], reference.max_exp_avg_sq)
    results = model.get("results")
    np.testing.assert_allclose(results[RESULT.grad_norm], float(reference.grad_norm), rtol=1e-7)
    if not lagged:
        np.testing.assert_allclose(results[RESULT.exp_avg_sq_mean], float(reference.exp_avg_sq_mean), rtol=1e-6)
    np.testing.assert_array_equal(model.get("steps", np.float32), STEPS)


def plain_run(
    configuration: str, params: list[torch.nn.Parameter], grads: list[list[Tensor]], groups: Any, **options: Any
) -> dict[str, list[Tensor]]:
    """By the torch backend, from the same start."""
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer = fused(copies, groups, backend="torch", **options, **PRECISION.get(configuration, {}))
    for step_grads in grads:
        for param, grad in zip(copies, step_grads, strict=True):
            param.grad_dtype = grad.dtype
            param.grad = grad.clone()
        optimizer.step()
    state = {key: moments(optimizer, copies, key) for key in optimizer.state[copies[0]]}
    return {**state, "weight": [optimizer.master_param(param) for param in copies]}


@pytest.mark.parametrize("definition", [AgreesWithAll, AgreesElsewhere, AgreesWithGradient])
def test_wrong_cautious_decay_is_told_apart(definition: type[AdamS]) -> None:
    params, grads = start("fp32 cautious")
    groups = groups_for("fp32 cautious", len(params))
    model = EmulatedStep("fp32 cautious", params, groups)
    take_steps(model, grads)
    right, wrong = (defined(params, grads, groups, kind).params for kind in (AdamS, definition))
    assert error(model.weights, wrong) > 10 * error(model.weights, right)


@pytest.mark.parametrize("definition", WRONG)
def test_wrong_definitions_are_told_apart(definition: type[AdamS]) -> None:
    params, grads = start("fp32")
    groups = two_groups(len(params))
    model = EmulatedStep("fp32", params, groups, max_grad_norm=0.5)
    take_steps(model, grads)
    wrong = defined(params, grads, groups, definition, 0.5)
    plain = plain_run("fp32", params, grads, groups, max_grad_norm=0.5)
    right = defined(params, grads, groups, AdamS, 0.5).params
    assert error(model.weights, wrong.params) > 2 * error(plain["weight"], right)


def test_sixty_tensors_of_all_sizes_take_their_steps_together() -> None:
    sizes = np.random.default_rng(0).integers(1, 3000, 60)
    shapes = [(int(size),) for size in sizes]
    params, grads = start("fp32", shapes)
    groups = two_groups(len(params))
    model = EmulatedStep("fp32", params, groups, programs=7)
    take_steps(model, grads)
    right = defined(params, grads, groups).params
    assert error(model.weights, right) <= 2 * error(plain_run("fp32", params, grads, groups)["weight"], right)


@pytest.mark.parametrize("configuration", ["bf16 with masters", "fp16 with masters"])
def test_parameters_are_their_masters_rounded(configuration: str) -> None:
    params, grads = start(configuration)
    model = EmulatedStep(configuration, params, two_groups(len(params)))
    take_steps(model, grads)
    for param, master in zip(model.params, model.weights, strict=True):
        assert torch.equal(param, nearest(master, param.dtype))


def test_stochastic_rounding_has_the_bits_of_the_definition_in_pytorch() -> None:
    """Of what the kernel computes: the same step in float32 shows it."""
    params, grads = start("bf16 rounded by chance")
    groups = two_groups(len(params))
    rounded = EmulatedStep("bf16 rounded by chance", params, groups, rounding_seed=7)
    exact = EmulatedStep("fp32 with bf16 gradients", params, groups)
    for model in (rounded, exact):
        take_steps(model, grads[:1])
    keys = rounding_keys(7, torch.arange(len(params)), torch.ones(len(params)))
    numbers = ElementNumbers(0, (1,))
    wanted = [stochastically_rounded(p, key, numbers) for p, key in zip(exact.params, keys, strict=True)]
    assert all(map(torch.equal, rounded.params, wanted))
    assert not all(torch.equal(p, q.to(torch.bfloat16)) for p, q in zip(rounded.params, exact.params, strict=True))


@pytest.mark.parametrize("kernel", [EXACT, LAGGED])
def test_scaled_gradients_are_unscaled_exactly(kernel: str) -> None:
    """By a power of two, so that all bits must be the same."""
    params, grads = start("fp32")
    groups = two_groups(len(params))
    models = [EmulatedStep("fp32", params, groups) for _ in range(2)]
    for model, scale in zip(models, (1.0, 1024.0), strict=True):
        take_steps(model, grads[:2], kernel, grad_scale=scale)
    assert all(map(torch.equal, models[0].params, models[1].params))
    np.testing.assert_array_equal(models[0].get("results"), models[1].get("results"))


@pytest.mark.parametrize("kernel", [EXACT, LAGGED])
def test_amsgrad_keeps_nan(kernel: str) -> None:
    """As torch.maximum does, and not the instruction of that name."""
    params, grads = start("fp32 amsgrad", [(600,)])
    grads[1][0][5] = torch.nan
    model = EmulatedStep("fp32 amsgrad", params, [{"params": [0]}])
    take_steps(model, grads[:2], kernel)
    (maxima,) = model.tensors(TENSOR.max_exp_avg_sq)
    assert maxima.isnan().nonzero().tolist() == [[5]]


@pytest.mark.parametrize(("kernel", "configuration"), [(EXACT, "fp32"), (EXACT, "fp32 amsgrad"), (LAGGED, "bf16")])
def test_nothing_changes_where_an_infinity_was_found(kernel: str, configuration: str) -> None:
    params, grads = start(configuration)
    model = EmulatedStep(configuration, params, two_groups(len(params)))
    take_steps(model, grads[:2], kernel)
    before = [model.sums(), model.get("steps"), model.get("last"), *model.state()]
    model.set_grads(grads[2], found_inf=True)
    model.launch(kernel)
    after = [model.sums(), model.get("steps"), model.get("last"), *model.state()]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    results = model.get("results")
    assert results[RESULT.skipped] == 1
    norm = np.sqrt(sum(float(grad.double().square().sum()) for grad in grads[2]))
    np.testing.assert_allclose(results[RESULT.grad_norm], norm, rtol=1e-7)
    assert model.get("counter", np.int32) == 0


def test_with_beta1_zero_exp_avg_is_the_gradient() -> None:
    """Also after one beside which it would be lost."""
    params = random_params(SMALL)
    model = EmulatedStep("fp32", params, [{"params": range(len(params)), "betas": (0.0, 0.99)}])
    for size in (100.0, 3e-7):
        grads = [size * (1 + torch.rand(shape)) for shape in SMALL]
        model.set_grads(grads)
        model.launch(EXACT)
    assert all(map(torch.equal, model.tensors(TENSOR.exp_avg), grads))


COMPILED_ANYWAY = ("fp32", "bf16", "fp32 in 8 bits")


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(name, marks=() if name in COMPILED_ANYWAY else pytest.mark.slow) for name in CONFIGURATIONS],
)
def test_the_sums_that_a_step_leaves_are_those_of_what_is_stored(configuration: str) -> None:
    check_sums_that_steps_leave(configuration, SHAPES)


def check_sums_that_steps_leave(configuration: str, shapes: list[tuple[int, ...]]) -> None:
    """Bit for bit, so that a resumed run is the uninterrupted one. One tensor has no gradient in the second step."""
    params, grads = start(configuration, shapes)
    model = EmulatedStep(configuration, params, two_groups(len(params)), programs=3)
    for kernel in (EXACT, LAGGED):
        model.set_grads(grads[0])
        model.launch(kernel)
        if kernel == EXACT:
            model.launch("last_exp_avg_sq_sum_kernel")  # which lagged steps find themselves
            model.drop_grad(1)
        left = [model.sums(), model.get("last")]
        assert all((sums > 0).all() for sums in left)
        model.forget_sums()
        model.launch("stored_sums_kernel")
        model.launch("last_exp_avg_sq_sum_kernel")
        np.testing.assert_array_equal(np.concatenate([model.sums(), model.get("last")]), np.concatenate(left))


def test_sums_are_read_again_only_where_others_have_stepped_a_tensor() -> None:
    params, grads = start("fp32")
    model = EmulatedStep("fp32", params, two_groups(len(params)))
    take_steps(model, grads[:1])
    assert model.launch("stored_sums_kernel").loads.requests_of_width[128] == 0
    left = model.sums()
    model.forget_sums(segments=1)
    statistics = model.launch("stored_sums_kernel")
    assert statistics.loads.bytes < 4 * sum(model.numels)
    np.testing.assert_array_equal(model.sums(), left)


@pytest.mark.parametrize(("kernel", "configuration"), [(EXACT, "fp32"), (EXACT, "fp32 amsgrad"), (LAGGED, "bf16")])
def test_any_order_of_the_warps_gives_the_same_bits(kernel: str, configuration: str) -> None:
    params, grads = start(configuration, SMALL)
    everything = []
    for seed in (None, 0, 1):
        model = EmulatedStep(configuration, params, two_groups(len(params)), programs=3)
        take_steps(model, grads[:2], kernel, seed=seed)
        everything.append(model.everything())
    assert everything[0] == everything[1] == everything[2]


def race(kernel: str, configuration: str, change: Change | None = None) -> None:
    params, grads = start(configuration, SMALL)
    model = EmulatedStep(configuration, params, two_groups(len(params)), programs=3, change=change)
    for seed in (None, 0):
        model.set_grads(grads[0])
        model.launch(kernel, seed=seed, find_races=True)


@pytest.mark.parametrize("configuration", ["fp32", "fp32 amsgrad", "bf16 with masters"])
@pytest.mark.parametrize("kernel", [EXACT, LAGGED])
def test_there_is_no_race(kernel: str, configuration: str) -> None:
    race(kernel, configuration)


LEFT_OUT = {
    "release": lambda ptx: ptx.replace(".gpu.release.", ".gpu.relaxed."),
    "acquire": lambda ptx: ptx.replace(".gpu.acquire.", ".gpu.relaxed."),
    "release and acquire of the last one": lambda ptx: ptx.replace(".gpu.acq_rel.", ".gpu.relaxed."),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_race_is_found_without(what: str) -> None:
    change = LEFT_OUT[what]
    with pytest.raises(RaceError, match="no order between them"):
        race(EXACT, "fp32", change)


# Bytes for each element, in and out: gradients twice in the exact step, and everything else of the update once.
BYTES = [
    (EXACT, "fp32", 4 + 16 + 12),
    (LAGGED, "fp32", 16 + 12),
    (EXACT, "fp32 cautious", 4 + 16 + 12),
    (EXACT, "bf16", 2 + 12 + 10),
    (LAGGED, "bf16", 12 + 10),
    (EXACT, "bf16 with masters", 2 + 14 + 12),
    (EXACT, "fp16 with masters", 2 + 14 + 14),
    (EXACT, "bf16 with bf16 exp_avg", 2 + 10 + 8),
    (EXACT, "fp32 amsgrad", 4 + 12 + 20 + 16),
]


@pytest.mark.parametrize("kernel", ["exact_step_kernel", "lagged_step_kernel"])
def test_small_tensors_need_few_float64_instructions(kernel: str) -> None:
    """After many steps. When all threads found a tensor's scalars, an exact step had 1,110 of them for each."""
    count = 100
    params = [torch.ones(64) for _ in range(count)]
    model = EmulatedStep("fp32", params, [{"params": range(count)}], programs=2, arch=75)
    model.set_grads(params)
    model.set_steps(100_000)
    statistics = model.launch(kernel)
    assert 0 < statistics.float64_instructions <= 320 * count


@pytest.mark.parametrize(("kernel", "configuration", "each"), BYTES)
def test_a_step_moves_as_few_bytes_as_there_are(kernel: str, configuration: str, each: int) -> None:
    shapes = [(500_000,), (300_000,), (200_000,)]
    params, grads = start(configuration, shapes)
    model = EmulatedStep(configuration, params, groups_for(configuration, len(params)), programs=8)
    model.set_grads(grads[0])
    statistics = model.launch(kernel)
    assert each <= statistics.bytes / 1e6 < 1.01 * each
    assert each <= statistics.sector_bytes / 1e6 < 1.05 * each
    print(
        f"{kernel}, {configuration}: {statistics.bytes / 1e6:.2f} bytes, {statistics.sector_bytes / 1e6:.2f} in sectors"
    )

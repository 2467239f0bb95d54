"""What makes no sense is refused with what was got, what was wanted and what to do, whichever way it comes in, and
everything is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamS
from swd_fused.options import GROUP_OPTIONS, Compatibility
from tests.core.test_options import ARGUMENTS
from tests.runs import assert_same, random_grads, random_params, run

nan, inf = float("nan"), float("inf")
SHAPES = [(30,), (4, 5)]

Params = list[torch.nn.Parameter]
Options = dict[str, Any]


def at_cpu(value: float) -> Tensor:
    return torch.tensor(value, device="cpu")


# Whether an argument, a key of a new group, or set in a group between steps.
OF_GROUPS: list[tuple[str, Any]] = [
    *(
        ("lr", value)
        for value in (-1.0, nan, float("inf"), "0.1", *map(at_cpu, (-1.0, nan, float("inf"))), torch.ones(2))
    ),
    *(("betas", value) for value in ((-0.5, 0.9), (0.9, -0.1), (0.9, nan), (0.9,), 0.9, (0.9, "0.9"))),
    *(("betas", value) for value in ((at_cpu(nan), at_cpu(0.9)), (torch.ones(2), at_cpu(0.9)))),
    *(("betas", value) for value in ((1.0, 0.999), (at_cpu(1.5), at_cpu(0.9)))),
    *(("eps", value) for value in (-1e-8, nan)),
    *(("weight_decay", value) for value in (-0.1, nan)),
    *(("max_decay", value) for value in (0, 0.0, 1.5)),
    *((name, value) for name in ("amsgrad", "maximize", "corrected_decay") for value in ("no", 1)),
    *(("bias_correction", value) for value in (0.5, 1, None)),
    *(("largest_lr", value) for value in (0, -1.0, nan, "1")),
    *(("adamw_weight_decay", value) for value in (-1, nan, "0.1")),
    *(("state_dtype", value) for value in ("4bit", torch.int8)),
    *(("ema_decay", value) for value in (1.5, True)),
    ("process_group", "world"),
    ("differentiable", True),
    ("offload", True),
]
MISSPELT_OR_OF_ALL = [
    *(("weigth_decay", 0.1), ("maximise", True), ("max_grad_norms", 1.0), ("schedule", "lagged"), ("decay", "l2")),
    *((name, 1) for name in ("seed", "backend", "max_grad_norm", "total_numel")),
    *((name, 0.1) for name in ("wd", "adamw_wd", "learning_rate", "ema")),
]
FOR_ALL: list[tuple[Options, str, Any]] = [
    *(({}, "max_grad_norm", value) for value in (-1.0, 0, nan, "1", True)),
    *(({}, "outliers", value) for value in ("keep", True, 6.0)),
    *(({"outliers": "clip"}, "outlier_sigma", value) for value in (0, -1.0, nan, float("inf"), "6", None)),
    ({"schedule": "lagged"}, "outliers", "clip"),
    ({"schedule": "lagged"}, "max_grad_norm", 1.0),
    ({"max_grad_norm": 1.0}, "schedule", "lagged"),
    ({"skip_nonfinite": True}, "schedule", "lagged"),
    *(({"decay": decay}, "schedule", "lagged") for decay in ("l2", "decoupled", "independent")),
    *(({}, "schedule", value) for value in ("laged", None)),
    ({}, "backend", "tpu"),
    *(({}, "total_numel", value) for value in (0, True, 1.5, "900")),
]


def refusal(name: str) -> Any:
    return pytest.raises(ValueError, match=rf"FusedAdamS got (an unknown key )?({name})=")


@pytest.mark.parametrize(("name", "value"), OF_GROUPS, ids=str)
def test_arguments_and_new_groups(name: str, value: Any) -> None:
    first, second = random_params(SHAPES)
    with refusal(name):
        FusedAdamS([first], **{name: value})
    add_group(first, second, name, value)


def add_group(first: torch.nn.Parameter, second: torch.nn.Parameter, name: str, value: Any) -> None:
    optimizer = FusedAdamS([first])
    with refusal(name):
        optimizer.add_param_group({"params": [second], name: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("name", "value"), MISSPELT_OR_OF_ALL, ids=str)
def test_keys_that_are_misspelt_or_hold_for_all_groups(name: str, value: Any) -> None:
    add_group(*random_params(SHAPES), name, value)  # type: ignore[arg-type]


def state_of(optimizer: FusedAdamS, params: Params) -> Any:
    return copy.deepcopy(([param.detach() for param in params], [optimizer.state.get(param) for param in params]))


def assert_refused(optimizer: FusedAdamS, params: Params, name: str) -> None:
    before = state_of(optimizer, params)
    for param in params:
        param.grad = torch.ones_like(param)
    with refusal(name):
        optimizer.step()
    assert_same(state_of(optimizer, params), before)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("name", "value"),
    [*OF_GROUPS, *MISSPELT_OR_OF_ALL, *(("calibration_steps", v) for v in (-1, 1.5, True, None))],
    ids=str,
)
def test_what_is_set_in_a_group_is_refused_by_the_next_step(name: str, value: Any, steps_before: int) -> None:
    """In the second group; and when it is set right the run goes on as if nothing had been."""
    options: Options = {"adamw_weight_decay": 0.1} if name == "calibration_steps" else {}
    params, grads = random_params(SHAPES), random_grads(SHAPES, 4)
    others = copy.deepcopy(params)
    optimizer, untouched = (
        FusedAdamS([{"params": two[:1]}, {"params": two[1:]}], **options) for two in (params, others)
    )
    run(params, grads[:steps_before], optimizer)
    group = optimizer.param_groups[1]
    usual = group.copy()
    group[name] = value
    for _ in range(2):
        assert_refused(optimizer, params, name)
    group.clear()
    group.update(usual)
    run(params, grads[steps_before:], optimizer)
    run(others, grads, untouched)
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize(("options", "name", "value"), FOR_ALL, ids=str)
def test_what_holds_for_all_groups(options: Options, name: str, value: Any) -> None:
    """As an argument; and set later, when the run goes on as one in which nobody has tried to."""
    params, grads = random_params(SHAPES), random_grads(SHAPES, 4)
    others = copy.deepcopy(params)
    with refusal(f"{name}|schedule"):
        FusedAdamS(params, **{**options, name: value})
    optimizer, untouched = FusedAdamS(params, **options), FusedAdamS(others, **options)
    run(params, grads[:2], optimizer)
    shown, before = repr(optimizer), getattr(optimizer, name)
    with refusal(f"{name}|schedule"):
        setattr(optimizer, name, value)
    assert (repr(optimizer), getattr(optimizer, name)) == (shown, before)
    run(params, grads[2:], optimizer)
    run(others, grads, untouched)
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize("name", sorted(ARGUMENTS | Compatibility.__optional_keys__ | set(GROUP_OPTIONS)))
def test_no_option_takes_anything(name: str) -> None:
    params = random_params(SHAPES)
    if name not in ("largest_lr_so_far", "process_group") or name in ARGUMENTS:
        with pytest.raises(ValueError, match=f"FusedAdamS got {name}=<object"):
            FusedAdamS(params, **{name: object()})  # type: ignore[arg-type]
    if name in GROUP_OPTIONS:
        optimizer = FusedAdamS(params)
        optimizer.param_groups[0][name] = object()
        assert_refused(optimizer, params, name)


CONTRADICTIONS: list[tuple[Options, str]] = [
    ({"schedule": "lagged", "max_grad_norm": 1.0}, 'schedule="lagged" with max_grad_norm=1.0.*Use schedule="exact"'),
    ({"adam_w_mode": False, "schedule": "lagged"}, 'schedule="lagged" with decay=\'l2\'.*Use schedule="exact"'),
    ({"decay": "l2", "corrected_decay": True}, "corrected_decay=True with decay='l2'.*Leave it out"),
    ({"decay": "l2", "cautious_decay": True}, "cautious_decay=True with decay='l2'.*Leave it out"),
    ({"decay": "independent", "corrected_decay": True}, "corrected_decay=True with decay='independent'"),
    ({"decay": "independent", "weight_decay": 0.1}, r"wanted .* \[0, 0\.05\].*AdamW's value times its lr"),
    ({"decay": "independent", "adamw_weight_decay": 0.1}, "with decay='independent'.*use another decay"),
    ({"decay": "decoupled", "adamw_weight_decay": 0.1}, "with decay='decoupled'"),
    ({"weight_decay": 0.0, "adamw_weight_decay": 0.1}, "all parameter groups have weight_decay=0"),
    ({"master_weights": True, "stochastic_rounding": True}, "Use one of the two"),
    ({"schedule": "lagged", "outliers": "skip"}, 'schedule="lagged" with outliers=\'skip\'.*Use schedule="exact"'),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS, ids=str)
def test_contradictions(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdamS(random_params(SHAPES, torch.bfloat16), **options)


def test_unknown_arguments() -> None:
    meant = {"weigth_decay": "weight_decay", "wd": "weight_decay", "adamw_wd": "adamw_weight_decay", "temperature": ""}
    for name, option in {**meant, "learning_rate": "lr", "ema": "ema_decay"}.items():
        advice = f" Did you mean {option}?" if option else ""
        with pytest.raises(TypeError) as error:
            FusedAdamS(random_params(SHAPES), **{name: 0.1})
        assert str(error.value) == f"FusedAdamS got an unknown argument {name}=0.1.{advice}"


def test_keys_of_schedulers_and_frameworks_pass_and_may_change() -> None:
    """As in torch's groups, they are kept and have no effect."""
    params, grads = random_params(SHAPES), random_grads(SHAPES, 4)
    others = copy.deepcopy(params)
    names = ["initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "momentum", "name", "step"]
    names += ["lr_scale", "lr_mult", "wd_mult", "weight_decay_mult", "no_decay", "layer_decay", "beta1", "is_expert"]
    extra = dict.fromkeys(names, 0.5)
    groups = torch.optim.AdamW(params, weight_decay=5e-4).param_groups
    optimizer = FusedAdamS([{**groups[0], **extra}])
    for t, step_grads in enumerate(grads):
        assert extra.items() <= optimizer.param_groups[0].items()
        extra.update(step=t, swa_lr=t)
        optimizer.param_groups[0].update(extra)
        run(params, [step_grads], optimizer)
    assert FusedAdamS(optimizer.param_groups).param_groups[0].keys() == optimizer.param_groups[0].keys()
    run(others, grads, FusedAdamS(others))
    assert all(map(torch.equal, params, others))


def test_one_key_that_takes_the_place_of_another() -> None:
    """With the very same value: only the name tells."""
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params)
    group = optimizer.param_groups[0]
    group["weight_decay_mult"] = 0.5
    run(params, random_grads(SHAPES, 2), optimizer)
    group["weigth_decay"] = group.pop("weight_decay_mult")
    assert_refused(optimizer, params, "weigth_decay")


def test_a_tensor_lr_is_checked_each_time_it_changes() -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params, lr=at_cpu(0.01))
    run(params, random_grads(SHAPES, 2), optimizer)
    for bad in (-1.0, nan):
        optimizer.param_groups[0]["lr"].fill_(bad)
        assert_refused(optimizer, params, "lr")
    optimizer.param_groups[0]["lr"].fill_(-1e-20)  # what schedulers that end at zero miss it by
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert all(map(torch.equal, params, before))


# --- Parameters


def expanded() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(3, 1).expand(3, 4))]


def one() -> torch.nn.Parameter:
    return random_params([(30,)])[0]


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (lambda: [torch.nn.Parameter(torch.ones(3, dtype=torch.complex64).conj())], ValueError, "lazily conjugated"),
        (
            lambda: [torch.nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)],
            ValueError,
            "int64.* neither floating-point",
        ),
        (expanded, ValueError, r"strides \(1, 0\), which has elements that share memory"),
        # torch warns of these that it will be an error, and steps twice; kernels update all at the same time.
        (lambda: [one()] * 2, ValueError, r"shape \(30,\) twice in one group.*dict.fromkeys"),
        (lambda: [("first", one())] * 2, ValueError, "twice in one group"),
        (lambda: [{"params": each} for each in [one()] * 2], ValueError, "more than one parameter group"),
        (lambda: [{"params": set(random_params(SHAPES))}], TypeError, "ordered"),
        (one, TypeError, "iterable"),
        (lambda: ["not a tensor"], TypeError, "can only optimize Tensors"),
        (lambda: [one() * 2], ValueError, "non-leaf"),
        (lambda: [("weight", one()), one()], ValueError, "names"),
        (lambda: [{"params": one()}, {"params": [("b", one())]}], ValueError, "names"),
        (list, ValueError, "empty parameter list"),
    ],
)
def test_parameters(params: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedAdamS(params())


@pytest.mark.parametrize("steps_before", [0, 1])
def test_parameters_that_are_put_into_a_group_later(steps_before: int) -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamS([{"params": params[:1]}, {"params": params[1:]}])
    run(params, random_grads(SHAPES, steps_before), optimizer)
    for wrong, message in ((params[0], r"parameter of shape \(30,\) twice"), (*expanded(), "share memory")):
        optimizer.param_groups[1]["params"].append(wrong)
        before = state_of(optimizer, params)
        with pytest.raises(ValueError, match=message):
            run(params, random_grads(SHAPES, 1), optimizer)
        assert_same(state_of(optimizer, params), before)
        del optimizer.param_groups[1]["params"][1]
    optimizer.step()


def test_a_backend_that_does_not_serve() -> None:
    params = [torch.nn.Parameter(torch.ones(3, device="meta"))]
    message = r'backend="cpu" cannot serve torch.float32 parameters on meta'
    with pytest.raises(RuntimeError, match=message):
        FusedAdamS(params, backend="cpu")
    optimizer = FusedAdamS(params)
    with pytest.raises(RuntimeError, match=message):
        optimizer.backend = "cpu"
    assert optimizer.backend == "auto"


# --- State dicts


def change(where: str, key: Any, value: Any = None) -> Callable[[Any], Any]:
    """Returns a function that puts something else into a state dict, or takes it away."""

    def changed(state_dict: Any) -> Any:
        entry = {
            "group": state_dict["param_groups"][0],
            "state": state_dict["state"],
            "second": state_dict["state"][1],
            "top": state_dict,
        }[where]
        if value is None:
            del entry[key]
        else:
            entry[key] = value(entry.get(key)) if callable(value) else value
        return state_dict

    return changed


def of_other_groups(_: Any) -> Any:
    return FusedAdamS([{"params": each} for each in random_params(SHAPES)]).state_dict()


def of_sgd(_: Any) -> Any:
    params = random_params(SHAPES)
    sgd = torch.optim.SGD(params, momentum=0.9)
    run(params, random_grads(SHAPES, 1), sgd)
    return sgd.state_dict()


def quantized(moment: Tensor) -> Tensor:
    return torch.quantize_per_tensor(moment, 0.1, 0, torch.qint8)


# Where a step would find it, the good state would be gone already.
BAD_STEPS: list[Any] = [*(nan, inf, -3, 1.5, 1e300, "3", 10**400, True, [3])]
BAD_STEPS += map(torch.tensor, (nan, -1.0, 1.5, [1.0, 2.0], 1 + 1j))
BAD_STEPS += [torch.tensor(1e300, dtype=torch.float64)]
OTHER_MOMENTS: list[Callable[[Tensor], Tensor]] = [
    *(methodcaller("to", kind) for kind in (torch.complex64, torch.float8_e4m3fn, torch.int32)),
    *(quantized, Tensor.to_sparse, Tensor.to_sparse_csr),
]
CODED = {"state_dtype": "8bit"}
MASTERS = {"master_weights": True}
DAMAGE: list[tuple[Options, Callable[[Any], Any], str]] = [
    ({}, of_other_groups, r"groups of \[1, 1\] parameters.* groups of \[2\].*saved with"),
    ({}, of_sgd, "has momentum_buffer, but no step, exp_avg, exp_avg_sq"),
    ({}, lambda right: {"optimizer": right, "epoch": 3}, "got optimizer, epoch, wanted a dict"),
    ({}, lambda right: [right], "load_state_dict got list, wanted"),
    ({}, change("top", "param_groups"), "got state, wanted"),
    ({}, change("top", "param_groups", {"lr": 0.1}), "wanted .* a list of dicts as param_groups"),
    ({}, change("top", "state", lambda _: []), "wanted .* a dict as state"),
    ({}, change("state", 1, 3), "state of parameter 1 .* it is a int"),
    ({}, change("second", "exp_avg", 3), "parameter 1 .* exp_avg is a int, wanted a dense tensor"),
    ({}, change("second", "exp_avg", torch.ones(8)), r"shape \(8,\), wanted .*and shape \(4, 20\)"),
    *(({}, change("second", key), f"but no {key}") for key in ("step", "exp_avg", "exp_avg_sq")),
    *(({}, change("group", key, value), key) for key, value in (("betas", (nan, 0.9)), ("bias_correction", 0.5))),
    ({}, change("group", "calibration_steps", -1), "calibration_steps"),
    ({}, lambda right: change("group", "weigth_decay", 0.1)(with_key(right, "weigth_decay")), "weigth_decay"),
    ({}, lambda right: change("group", "seed", 1)(with_key(right, "seed")), "seed"),
    *(({}, change("second", "step", lambda _, n=n: n), "parameter 1 .* step is") for n in (*BAD_STEPS, None)),
    *(
        (
            {},
            change("second", key, lambda moment, other=other: other(moment.cpu())),
            f"parameter 1 .* {key} is a .* tensor of .*, wanted a dense tensor",
        )
        for key in ("exp_avg", "exp_avg_sq")
        for other in OTHER_MOMENTS
    ),
    *(({}, change("group", "lr", lambda _, lr=lr: torch.tensor(lr)), "lr=tensor") for lr in (nan, inf, -1.0)),
    *(({}, change("group", "decay", lambda _, kind=kind: kind), "decay=.*wanted one of") for kind in ("weird", [1])),
    ({}, change("group", "params"), "each with its params"),
    (CODED, change("second", "exp_avg_scales"), "has .*, but no exp_avg_scales"),
    (CODED, change("second", "exp_avg_sq_root_codes"), "but no exp_avg_sq_root_codes"),
    (CODED, change("second", "exp_avg_sq_root_codes", Tensor.float), "of torch.float32 .*, wanted .* of torch.uint8"),
    (CODED, change("second", "exp_avg_codes", lambda codes: codes[:3]), r"\(3, 20\), wanted .* shape \(4, 20\)"),
    (
        CODED,
        change("second", "exp_avg_scales", lambda scales: scales.repeat(1, 2)),
        r"shape \(4, 2\), wanted .* shape \(4, 1\)",
    ),
    (CODED, change("second", "exp_avg_scales", 3), "is a int, wanted a dense tensor"),
    (MASTERS, change("second", "master_remainder", Tensor.float), "of torch.float32 .*, wanted .* of torch.int16"),
]


def with_key(state_dict: Any, key: str) -> Any:
    state_dict["param_groups"][0][key] = None
    return state_dict


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse")
@pytest.mark.usefixtures("_codes_of_small_tensors")
@pytest.mark.parametrize(("options", "damage", "message"), DAMAGE)
def test_a_state_dict_that_is_refused_changes_nothing(
    options: Options, damage: Callable[[Any], Any], message: str
) -> None:
    shapes, dtype = [(30,), (4, 20)], torch.bfloat16 if options is MASTERS else torch.float32
    params, grads = random_params(shapes, dtype), random_grads(shapes, 3, dtype)
    others = copy.deepcopy(params)
    optimizer, untouched = FusedAdamS(params, **options), FusedAdamS(others, **options)
    run(params, grads[:2], optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damage(copy.deepcopy(before)))
    assert_same(optimizer.state_dict(), before)
    run(params, grads[2:], optimizer)
    run(others, grads, untouched)
    assert all(map(torch.equal, params, others))


# --- What a step is given

GIVEN: list[tuple[Options, Options, str]] = [
    *(
        ({}, {"grad_sumsq": value}, "wanted one number >= 0")
        for value in (-1.0, "3", nan, True, at_cpu(-1.0), at_cpu(nan))
    ),
    ({}, {"grad_sumsq": torch.ones(2)}, "wanted one number"),
    ({}, {"numel": 3}, "numel=3 without grad_sumsq"),
    *(({}, {"grad_sumsq": 1.0, "numel": value}, "numel=.*wanted how many") for value in (0, True, 2.5, -3, "3")),
    ({"schedule": "lagged"}, {"grad_sumsq": 1.0}, 'Use "exact"'),
    ({"amsgrad": True}, {"grad_sumsq": 1.0}, "amsgrad=True, whose maxima"),
    ({"betas": (0.9, 0.95)}, {"grad_sumsq": 1.0}, "different betas"),
    ({"bias_correction": False}, {"grad_sumsq": 1.0}, "different betas or bias_correction"),
]


@pytest.mark.parametrize("by_provider", [False, True])
@pytest.mark.parametrize(("options", "given", "message"), GIVEN, ids=str)
def test_a_given_sum(options: Options, given: Options, message: str, by_provider: bool) -> None:
    if by_provider and "grad_sumsq" not in given:
        pytest.skip("a provider returns both")
    params = random_params(SHAPES)
    of_all = {name: value for name, value in options.items() if name == "schedule"}
    of_first = {name: value for name, value in options.items() if name != "schedule"}
    optimizer = FusedAdamS([{"params": params[:1], **of_first}, {"params": params[1:]}], **of_all)
    before = state_of(optimizer, params)
    for param in params:
        param.grad = torch.ones_like(param)
    if by_provider:
        optimizer.grad_sumsq_provider = lambda: (given["grad_sumsq"], given.get("numel"))
    with pytest.raises(ValueError, match=message):
        optimizer.step(**({} if by_provider else given))
    assert_same(state_of(optimizer, params), before)


def test_a_provider_that_is_none_or_gives_something_else() -> None:
    params = random_params(SHAPES)
    optimizer = FusedAdamS(params)
    optimizer.grad_sumsq_provider = lambda: 12.0  # type: ignore[assignment,return-value]
    with pytest.raises(TypeError, match="cannot unpack"):
        run(params, random_grads(SHAPES, 1), optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("grad_sumsq", [nan, at_cpu(nan), float("inf")], ids=str)
def test_a_step_that_may_be_skipped_takes_any_sum(grad_sumsq: Any) -> None:
    """It is what bad gradients have, and what tells to skip."""
    params = random_params(SHAPES)
    before = [param.detach().clone() for param in params]
    optimizer = FusedAdamS(params, skip_nonfinite=True)
    for param in params:
        param.grad = torch.full_like(param, nan)
    optimizer.step(grad_sumsq=grad_sumsq)
    assert all(map(torch.equal, params, before))
    assert int(optimizer.skipped_steps) == 1

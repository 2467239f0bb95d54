"""Each error says what was got, what was wanted and what to do, and leaves everything as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.core.torch_expectations.contestants import assert_same
from tests.runs import random_grads, random_params, run

nan = float("nan")

BAD_NUMBERS = [
    ({"lr": -1.0}, r"lr=-1\.0, wanted a finite number >= 0"),
    ({"lr": nan}, "lr=nan, wanted a finite"),
    ({"lr": float("inf")}, "lr=inf, wanted a finite"),
    ({"lr": "0.1"}, "lr='0.1', wanted a finite"),
    ({"lr": torch.tensor(-1.0)}, "lr=.*wanted a finite"),
    ({"lr": torch.ones(2)}, "lr=.*one element"),
    ({"eps": -1e-8}, "eps=-1e-08, wanted a finite"),
    ({"eps": nan}, "eps=nan"),
    ({"weight_decay": -0.1}, r"weight_decay=-0\.1, wanted"),
    ({"weight_decay": nan}, "weight_decay=nan"),
    ({"betas": (1.0, 0.999)}, r"betas=\(1\.0, 0\.999\), wanted two numbers in \[0, 1\)"),
    ({"betas": (0.9, -0.1)}, "betas="),
    ({"betas": (0.9, nan)}, "betas="),
    ({"betas": (0.9,)}, "betas="),
    ({"max_decay": 0.0}, r"max_decay=0\.0, wanted a number in \(0, 1\]"),
    ({"max_decay": 1.5}, r"max_decay=1\.5"),
]
BAD_OPTIONS = [
    ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0, wanted a number > 0. Use None"),
    ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ({"max_grad_norm": nan}, "max_grad_norm"),
    ({"schedule": "later"}, "schedule='later', wanted one of"),
    ({"schedule": "lagged", "max_grad_norm": 1.0}, 'schedule="lagged" with max_grad_norm=1.0.*Use schedule="exact"'),
    ({"backend": "tpu"}, "backend='tpu', wanted one of"),
    ({"betas": (torch.tensor(1.5), torch.tensor(0.9))}, r"betas=.* wanted two numbers in \[0, 1\)"),
    ({"betas": (torch.ones(2), torch.tensor(0.9))}, "betas=.* wanted two numbers, or tensors with one"),
    ({"differentiable": True}, "differentiable=True.*Use torch.optim.AdamW"),
    ({"offload": True}, r"offload=True.*offload_policy=CPUOffloadPolicy\(\).*offload_optimizer.*follow\(engine\)"),
    ({"fused": 1}, "fused=1, wanted True, False or None"),
    ({"capturable": None}, "capturable=None, wanted True or False"),
    ({"total_numel": 1}, "total_numel=1, but this rank alone has 3 elements"),
    ({"total_numel": 0}, "total_numel=0, wanted a whole number > 0"),
    ({"total_numel": True}, "total_numel=True, wanted a whole number"),
]


@pytest.mark.parametrize(("options", "message"), [*BAD_NUMBERS, *BAD_OPTIONS], ids=str)
def test_constructor(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdamS(random_params([(3,)]), **options)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("weigth_decay", " Did you mean weight_decay?"),
        ("adamw_mode", " Did you mean adam_w_mode?"),
        ("exp_avg_sq_dtype", ""),
        ("temperature", ""),
    ],
)
def test_unknown_arguments(name: str, advice: str) -> None:
    with pytest.raises(TypeError) as error:
        FusedAdamS(random_params([(3,)]), **{name: 0.1})
    assert str(error.value) == f"FusedAdamS got an unknown argument {name}=0.1.{advice}"


IN_GROUPS = [
    ({"weigth_decay": 0.1}, r"unknown key weigth_decay=0\.1 in a parameter group. Did you mean weight_decay\?"),
    ({"maximise": True}, r"Did you mean maximize\?"),
    ({"max_grad_norms": 1.0}, r"Did you mean max_grad_norm\?"),
    (
        {"schedule": "lagged"},
        r"schedule='lagged' in a .* holds for all groups.*FusedAdamS\(\.\.\., schedule='lagged'\)",
    ),
    *(({name: 1}, f"{name}=1 in a parameter group, but it holds for all") for name in ("decay", "seed", "backend")),
    *(({name: 1}, f"{name}=1 in a parameter group, but it holds for all") for name in ("max_grad_norm", "total_numel")),
    ({"bias_correction": 1}, "bias_correction=1, wanted True or False"),
    ({"differentiable": True}, "differentiable=True"),
    ({"offload": True}, r"offload=True, which is gone.*CPUOffloadPolicy\(\)"),
]


@pytest.mark.parametrize(("options", "message"), [*BAD_NUMBERS, *IN_GROUPS], ids=str)
def test_add_param_group(options: dict[str, Any], message: str) -> None:
    first, second = random_params([(3,), (4,)])
    optimizer = FusedAdamS([first])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [second], **options})
    assert len(optimizer.param_groups) == 1


def test_keys_of_schedulers_and_frameworks_pass() -> None:
    """As in torch's groups, they are kept and have no effect."""
    adamw = torch.optim.AdamW(random_params([(3,)]))
    names = ["initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "momentum", "name", "step"]
    names += ["lr_scale", "lr_mult", "wd_mult", "weight_decay_mult", "no_decay", "layer_decay", "beta1", "is_expert"]
    extra = dict.fromkeys(names, 0.5)
    optimizer = FusedAdamS([{**adamw.param_groups[0], **extra}])
    assert extra.items() <= optimizer.param_groups[0].items()
    again = FusedAdamS(optimizer.param_groups)
    assert again.param_groups[0].keys() == optimizer.param_groups[0].keys()


def test_a_parameter_twice_in_one_group() -> None:
    """torch warns that it will be an error, and steps twice; kernels update all parameters at the same time."""
    first, second = random_params([(3,), (4,)])
    with pytest.raises(ValueError, match=r"shape \(4,\) twice in one group.*dict.fromkeys"):
        FusedAdamS([first, second, second])
    with pytest.raises(ValueError, match="twice in one group"):
        FusedAdamS([("first", first), ("tied", first)])


def test_padding_may_make_a_buffer_longer_than_the_model() -> None:
    FusedAdamS(random_params([(128,)]), total_numel=100)


class GradientElsewhere(torch.nn.Parameter):
    """What moving a parameter's data between backward and step leaves behind; without a GPU torch forbids it."""

    @property
    def grad(self) -> torch.Tensor:
        return torch.ones(self.shape, device="meta")


def assert_refused(
    optimizer: FusedAdamS, params: list[torch.nn.Parameter], error: type[Exception], message: str
) -> None:
    before = [param.detach().clone() for param in params], copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=message):
        optimizer.step()
    assert all(map(torch.equal, params, before[0]))
    assert_same(optimizer.state_dict(), before[1])


@pytest.mark.parametrize("schedule", ["exact", "lagged"])
@pytest.mark.parametrize("steps_before", [0, 2])
class TestStep:
    """Before the first step, when there is no state, and after some."""

    @pytest.fixture
    def params(self) -> list[torch.nn.Parameter]:
        return random_params([(30,), (4, 5), (7,)])

    @pytest.fixture
    def optimizer(self, params: list[torch.nn.Parameter], backend: str, steps_before: int, schedule: str) -> FusedAdamS:
        optimizer = FusedAdamS(params, backend=backend, schedule=schedule)
        run(params, random_grads([(30,), (4, 5), (7,)], steps_before), optimizer)
        for param in params:
            param.grad = torch.ones_like(param)
        return optimizer

    def test_sparse_gradient(self, params: list[torch.nn.Parameter], optimizer: FusedAdamS) -> None:
        params[1].grad = torch.eye(4, 5).to_sparse()
        assert_refused(optimizer, params, RuntimeError, r"sparse_coo gradient of shape \(4, 5\).*wanted a dense one")

    def test_gradient_on_another_device(self, params: list[torch.nn.Parameter], optimizer: FusedAdamS) -> None:
        params[1].__class__ = GradientElsewhere
        message = "on meta for a parameter .* on .*, wanted one on the parameter's device"
        assert_refused(optimizer, params, RuntimeError, message)

    def test_gradient_of_another_shape(self, params: list[torch.nn.Parameter], optimizer: FusedAdamS) -> None:
        data = params[1].data
        params[1].grad = None
        params[1].data = torch.zeros(5, 4)
        params[1].grad = torch.ones(5, 4)
        params[1].data = data
        assert_refused(
            optimizer, params, RuntimeError, r"gradient of shape \(5, 4\).*\(4, 5\).*wanted one of the param"
        )

    def test_parameter_of_another_shape(self, params: list[torch.nn.Parameter], optimizer: FusedAdamS) -> None:
        """As a resized embedding: the state, if there is one, belongs to the old one."""
        params[2].grad = None
        params[2].data = torch.ones(9)
        params[2].grad = torch.ones(9)
        if not optimizer.state:
            optimizer.step()
            assert (params[2] < 1).all()
            return
        message = r"state of shape \(7,\).* now has shape \(9,\).*del optimizer.state"
        assert_refused(optimizer, params, RuntimeError, message)

    def test_hyper_parameters_set_to_nonsense(self, params: list[torch.nn.Parameter], optimizer: FusedAdamS) -> None:
        for name, value in (("lr", -1.0), ("lr", nan), ("betas", (nan, 0.9)), ("betas", 0.9)):
            usual = optimizer.param_groups[0][name]
            optimizer.param_groups[0][name] = value
            assert_refused(optimizer, params, ValueError, f"{name}=.*, wanted")
            optimizer.param_groups[0][name] = usual

    def test_a_missing_moment(self, params: list[torch.nn.Parameter], optimizer: FusedAdamS) -> None:
        if not optimizer.state:
            optimizer.step()
        del optimizer.state[params[1]]["exp_avg_sq"]
        message = r"parameter of shape \(4, 5\) with step, exp_avg, but without exp_avg_sq.*del optimizer.state"
        assert_refused(optimizer, params, RuntimeError, message)


@pytest.mark.backends(split=True)
@pytest.mark.parametrize("schedule", ["exact", "lagged"])
def test_nothing_changes_in_any_bucket(backend: str, schedule: str) -> None:
    """Two buckets, since the groups differ in amsgrad: the second one's gradient is bad."""
    params = random_params([(5,), (6,)])
    groups = [{"params": params[:1]}, {"params": params[1:], "amsgrad": True}]
    optimizer = FusedAdamS(groups, backend=backend, schedule=schedule)
    run(params, random_grads([(5,), (6,)], 2), optimizer)
    params[1].grad = torch.ones(6).to_sparse()
    assert_refused(optimizer, params, RuntimeError, "sparse_coo gradient")


@pytest.mark.backends(split=True)
def test_a_parameter_that_was_cut_short(backend: str) -> None:
    """With its gradient, and at the same addresses: the state is longer."""
    memory, grad = torch.randn(50), torch.ones(50)
    param = torch.nn.Parameter(memory)
    param.grad = grad
    optimizer = FusedAdamS([param], backend=backend)
    optimizer.step()
    param.grad = None
    param.data = memory[:30]
    param.grad = grad[:30]
    assert_refused(optimizer, [param], RuntimeError, r"state of shape \(50,\).* now has shape \(30,\)")


@pytest.mark.backends(split=True)
def test_a_gradient_whose_memory_was_freed(backend: str) -> None:
    params = random_params([(50,)])
    optimizer = FusedAdamS(params, backend=backend)
    run(params, random_grads([(50,)], 1), optimizer)
    params[0].grad = torch.ones(50)
    params[0].grad.untyped_storage().resize_(0)
    assert_refused(optimizer, params, RuntimeError, "whose memory was freed")


def test_sets_have_no_order() -> None:
    with pytest.raises(TypeError, match="ordered"):
        FusedAdamS([{"params": set(random_params([(3,), (4,)]))}])


def test_lazily_conjugated_parameters() -> None:
    with pytest.raises(ValueError, match="lazily conjugated"):
        FusedAdamS([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64).conj())])


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match=r"got no parameters.*Pass model.parameters"):
        FusedAdamS([])
    parameters = torch.nn.Linear(2, 2).parameters()
    FusedAdamS(parameters)
    with pytest.raises(ValueError, match="a generator that was used before is empty"):
        FusedAdamS(parameters)


def test_a_tensor_instead_of_an_iterable() -> None:
    with pytest.raises(TypeError, match="iterable"):
        FusedAdamS(torch.nn.Parameter(torch.ones(3)))  # type: ignore[arg-type]


def test_integer_parameters() -> None:
    integers = torch.nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match=r"dtype torch.int64 .* wanted a floating-point"):
        FusedAdamS([integers])


def test_expanded_parameters() -> None:
    expanded = torch.nn.Parameter(torch.ones(3, 1).expand(3, 4))
    with pytest.raises(ValueError, match=r"strides \(1, 0\), wanted one whose elements have memory of their own"):
        FusedAdamS([expanded])


def test_a_backend_that_does_not_serve() -> None:
    param = torch.nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(RuntimeError, match=r'backend="cpu" cannot serve torch.float32 parameters on meta'):
        FusedAdamS([param], backend="cpu")


def test_match_adamw() -> None:
    with pytest.raises(ValueError, match=r"match_adamw.*wanted a finite number >= 0, as AdamW takes it"):
        FusedAdamS(random_params([(3,)])).match_adamw(-0.1)


def test_match_adamw_where_nothing_decays() -> None:
    optimizer = FusedAdamS(random_params([(3,)]), weight_decay=0.0)
    with pytest.raises(ValueError, match=r"weight_decay=0\.1, but all parameter groups have weight_decay=0"):
        optimizer.match_adamw(0.1)
    optimizer.match_adamw(0.0)


class TestStateDict:
    @pytest.fixture
    def params(self) -> list[torch.nn.Parameter]:
        return random_params([(30,), (7,)])

    @pytest.fixture
    def optimizer(self, params: list[torch.nn.Parameter]) -> FusedAdamS:
        optimizer = FusedAdamS(params)
        run(params, random_grads([(30,), (7,)], 2), optimizer)
        return optimizer

    def refuse(self, optimizer: FusedAdamS, state_dict: dict[str, Any], message: str) -> None:
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        assert_same(optimizer.state_dict(), before)

    def test_other_groups(self, optimizer: FusedAdamS) -> None:
        other = FusedAdamS([{"params": random_params([(30,)])}, {"params": random_params([(7,)])}])
        self.refuse(optimizer, other.state_dict(), r"groups of \[1, 1\] parameters.* groups of \[2\].*saved with")

    def test_other_shapes(self, optimizer: FusedAdamS) -> None:
        params = random_params([(30,), (8,)])
        other = FusedAdamS(params)
        run(params, random_grads([(30,), (8,)], 1), other)
        self.refuse(optimizer, other.state_dict(), r"exp_avg of parameter 1 has shape \(8,\), the parameter has \(7,\)")

    def test_another_algorithm(self, optimizer: FusedAdamS) -> None:
        params = random_params([(30,), (7,)])
        other = torch.optim.SGD(params, momentum=0.9)
        run(params, random_grads([(30,), (7,)], 1), other)
        self.refuse(optimizer, other.state_dict(), "has momentum_buffer, but no step, exp_avg, exp_avg_sq")

    def test_nonsense_hyper_parameters(self, optimizer: FusedAdamS) -> None:
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["param_groups"][0]["betas"] = (nan, 0.9)
        self.refuse(optimizer, state_dict, "betas=")

    def test_something_else(self, optimizer: FusedAdamS) -> None:
        right = copy.deepcopy(optimizer.state_dict())
        state, groups = right["state"], right["param_groups"]
        for wrong, message in (
            (
                {"optimizer": right, "epoch": 3},
                "with optimizer, epoch, but without state, param_groups.*one of the entr",
            ),
            ({"state": state}, "with state, but without param_groups"),
            ([right], "load_state_dict got a list"),
            ({"state": state, "param_groups": {"lr": 0.1}}, "param_groups that are not a list of dicts"),
            ({"state": state, "param_groups": [{"lr": 0.1}]}, 'dicts with a key "params"'),
            ({"state": [], "param_groups": groups}, "got a list as state"),
            ({"state": {**state, 1: 3}, "param_groups": groups}, "state of parameter 1 is a int"),
            (
                {"state": {**state, 1: {**state[1], "exp_avg": 3}}, "param_groups": groups},
                "exp_avg of parameter 1 is a",
            ),
        ):
            self.refuse(optimizer, wrong, message)  # type: ignore[arg-type]

    @pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
    def test_a_missing_moment(self, optimizer: FusedAdamS, key: str) -> None:
        state_dict = copy.deepcopy(optimizer.state_dict())
        del state_dict["state"][1][key]
        self.refuse(optimizer, state_dict, f"state of parameter 1 has .*, but no {key}")


def test_state_on_another_device_is_refused_at_a_step(backend: str) -> None:
    """On "meta" operators do nothing, and say nothing."""
    (param,) = params = random_params([(3,)])
    optimizer = FusedAdamS(params, backend=backend)
    run(params, random_grads([(3,)], 1), optimizer)
    before = param.detach().clone()
    optimizer.state[param]["exp_avg"] = torch.zeros(3, device="meta")
    with pytest.raises(RuntimeError, match=r"state of shape \(3,\) on meta"):
        run(params, random_grads([(3,)], 1), optimizer)
    assert torch.equal(param, before)


def test_a_state_dtype_set_later_is_checked() -> None:
    params = random_params([(3,)])
    optimizer = FusedAdamS(params)
    optimizer.param_groups[0]["state_dtype"] = "4bit"
    with pytest.raises(ValueError, match="state_dtype='4bit', wanted one of"):
        run(params, random_grads([(3,)], 1), optimizer)

"""State dicts, copies, pickles, parameter groups and what is said about them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.core.torch_expectations.contestants import (
    Make,
    adamw,
    assert_same,
    configs,
    contestants,
    copies,
    fresh,
    params_like,
    train,
)


@contestants
@configs
def test_state_dict_round_trip_while_training_goes_on(make: Make, config: dict[str, Any]) -> None:
    params = params_like((4,), (3, 2))
    optimizer = make(params, **fresh(config))
    for part in range(3):
        train(params, optimizer, 2, seed=10 * part)
        twins = copies(params)
        other = make(twins, **fresh(config))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_same(optimizer.state_dict()["state"], other.state_dict()["state"])
        for own, its in ((params, optimizer), (twins, other)):
            train(own, its, 2, seed=100 * part)
        assert_same(params, twins)


@contestants
def test_hyper_parameters_come_from_the_state_dict(make: Make) -> None:
    params = params_like((4,))
    optimizer = make(params, lr=0.5, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.3, amsgrad=True, maximize=True)
    other = make(copies(params))
    other.load_state_dict(optimizer.state_dict())
    for key, value in optimizer.param_groups[0].items():
        assert key == "params" or other.param_groups[0][key] == value


@contestants
def test_state_belongs_to_places_not_to_parameters(make: Make) -> None:
    params = params_like((4,), (4,))
    optimizer = make(params)
    train(params, optimizer, 2)
    swapped = copies(params)[::-1]
    other = make(swapped)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, its in zip(params, swapped, strict=True):
        assert_same(optimizer.state[mine]["exp_avg"], other.state[its]["exp_avg"])


@contestants
def test_a_state_dict_is_of_one_step(make: Make) -> None:
    """Whether it follows the optimizer or not: the step count fits the moments, also later and also elsewhere."""
    params = params_like((4,))
    optimizer = make(params)
    at_step = {}
    train(params, optimizer, 1)
    saved = optimizer.state_dict()
    for step in range(1, 7):
        at_step[step] = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
        train(params, optimizer, 1, seed=step)
    at_step[7] = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    other = make(copies(params))
    other.load_state_dict(saved)
    for state in (saved["state"][0], other.state[other.param_groups[0]["params"][0]]):
        assert_same(dict(state), at_step[int(state["step"])])


@contestants
def test_saved_to_a_file_and_loaded_with_weights_only(make: Make) -> None:
    params = params_like((4,), (3, 2))
    optimizer = make(params, lr=torch.tensor(0.01))
    train(params, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same(loaded, optimizer.state_dict())
    make(copies(params)).load_state_dict(loaded)


@contestants
@pytest.mark.parametrize("number", [int, float, torch.tensor])
def test_older_state_dicts(make: Make, number: Any) -> None:
    """Without keys that came later, and with step counts that are numbers."""
    params = params_like((4,), (3, 2))
    optimizer = make(params)
    train(params, optimizer, 2)
    twins = copies(params)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "differentiable", "fused"):
            group.pop(key, None)
    for state in saved["state"].values():
        state["step"] = number(int(state["step"]))
    other = make(twins)
    other.load_state_dict(saved)
    for own, its in ((params, optimizer), (twins, other)):
        train(own, its, 2)
    assert_same(params, twins)


@contestants
def test_state_of_no_parameter_is_kept(make: Make) -> None:
    params = params_like((4,))
    optimizer = make(params)
    train(params, optimizer, 1)
    optimizer.state["note"] = {"epoch": 3}
    other = make(copies(params))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for kept in (other, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert kept.state["note"] == {"epoch": 3}
        train(kept.param_groups[0]["params"], kept, 1)


@contestants
def test_groups_that_do_not_fit_are_refused(make: Make) -> None:
    optimizer = make(params_like((4,), (3,)))
    other = make([{"params": p} for p in params_like((4,), (3,))])
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(other.state_dict())


@contestants
def test_state_dict_hooks(make: Make) -> None:
    params = params_like((4,))
    optimizer = make(params)
    train(params, optimizer, 1)
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda own: seen.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda own: seen.append("first"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda own, state_dict: {**state_dict, "note": 1})
    optimizer.register_state_dict_post_hook(lambda own, state_dict: seen.append("post"))
    saved = optimizer.state_dict()
    assert seen == ["first", "pre", "post"]
    assert saved["note"] == 1


@contestants
def test_load_state_dict_hooks(make: Make) -> None:
    params = params_like((4,))
    optimizer = make(params)
    train(params, optimizer, 1)
    other = make(copies(params))
    seen: list[str] = []

    def with_another_lr(own: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] = 0.25
        return state_dict

    other.register_load_state_dict_pre_hook(with_another_lr)
    other.register_load_state_dict_pre_hook(lambda own, state_dict: seen.append("first"), prepend=True)
    other.register_load_state_dict_post_hook(lambda own: seen.append(f"post, {own.param_groups[0]['lr']}"))
    other.load_state_dict(optimizer.state_dict())
    assert seen == ["first", "post, 0.25"]
    assert optimizer.param_groups[0]["lr"] == 1e-3


@contestants
@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_copies_go_on_by_themselves(make: Make, way: Any) -> None:
    params = params_like((4,), (3, 2))
    optimizer = make(params, lr=torch.tensor(0.01), amsgrad=True)
    train(params, optimizer, 2)
    twins, other = way((params, optimizer))
    public = [name for name in vars(optimizer) if not name.startswith("_")]
    assert public == [name for name in vars(other) if not name.startswith("_")] or set(public) <= set(vars(other))
    start = copies(params)
    train(twins, other, 2)
    assert_same(params, start)
    train(params, optimizer, 2)
    assert_same(params, twins)


@contestants
def test_deepcopy_keeps_hooks_out(make: Make) -> None:
    """torch copies what `__getstate__` names: state, groups and defaults, no hooks."""
    params = params_like((4,))
    optimizer = make(params)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    twin = copy.deepcopy(optimizer)
    train(twin.param_groups[0]["params"], twin, 1)
    assert seen == []
    train(params, optimizer, 1)
    assert seen == [1]


@contestants
def test_named_parameters(make: Make) -> None:
    """Names are kept, saved and loaded as AdamW does it."""
    named = [(name, param) for name, param in zip("ab", params_like((4,), (3,)), strict=True)]
    other_names = [(name, param) for name, param in zip("cd", params_like((4,), (3,)), strict=True)]
    optimizer = make(iter(named))
    train([param for _, param in named], optimizer, 1)
    assert optimizer.param_groups[0]["param_names"] == ["a", "b"]
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["a", "b"]
    for params in (other_names, [param for _, param in other_names]):
        pairs = []
        for kind in (make, adamw):
            other = kind(params)
            if kind is make:
                other.load_state_dict(saved)
            else:
                source = adamw(iter(named))
                source.load_state_dict(source.state_dict())
                other.load_state_dict(source.state_dict())
            pairs.append(other.param_groups[0].get("param_names"))
        assert pairs[0] == pairs[1]


@contestants
def test_groups_may_be_added(make: Make) -> None:
    params = params_like((4,), (3,), (2,))
    optimizer = make(params[:1])
    train(params[:1], optimizer, 1)
    optimizer.add_param_group({"params": params[1], "lr": 0.5})
    optimizer.add_param_group({"params": iter(params[2:])})
    train(params, optimizer, 2)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5, 1e-3]
    assert [float(optimizer.state[param]["step"]) for param in params] == [3, 2, 2]


@contestants
def test_a_group_may_be_empty(make: Make) -> None:
    params = params_like((4,))
    train(params, make([{"params": []}, {"params": params}]), 2)


@contestants
def test_parameters_in_two_groups_are_refused(make: Make) -> None:
    params = params_like((4,))
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        make([{"params": params}, {"params": params}])
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        make(params).add_param_group({"params": params})


@contestants
@pytest.mark.parametrize(
    ("params", "error"),
    [
        (torch.nn.Parameter(torch.ones(2)), TypeError),
        ([], ValueError),
        ([torch.nn.Parameter(torch.ones(2)) * 2], ValueError),  # not a leaf
        ([{"params": {torch.nn.Parameter(torch.ones(2))}}], TypeError),  # a set
        ([("weight", torch.nn.Parameter(torch.ones(2))), torch.nn.Parameter(torch.ones(3))], ValueError),
        (
            [{"params": [torch.nn.Parameter(torch.ones(2))]}, {"params": [("b", torch.nn.Parameter(torch.ones(2)))]}],
            ValueError,
        ),
        (["not a tensor"], TypeError),
    ],
    ids=["tensor", "nothing", "not a leaf", "set", "some named", "one group named", "text"],
)
def test_what_is_no_list_of_parameters_is_refused(make: Make, params: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make(params)


@contestants
@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": torch.tensor([0.1, 0.1])},
        {"betas": (1.0, 0.0)},
        {"betas": (0.0, 1.0)},
        {"eps": -1e-3},
        {"weight_decay": -1.0},
    ],
    ids=str,
)
def test_impossible_hyper_parameters_are_refused(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lr|learning rate|beta|eps|weight_decay"):
        make(params_like((4,)), **options)


@contestants
def test_printing(make: Make) -> None:
    optimizer = make([{"params": p} for p in params_like((4,), (3,))], lr=0.125)
    text = repr(optimizer)
    assert text.startswith(f"{type(optimizer).__name__} (")
    assert text.endswith(")")
    for line in ("Parameter Group 0", "Parameter Group 1", "    lr: 0.125", "    betas: (0.9, 0.999)"):
        assert line in text.splitlines()


@contestants
def test_defaults_are_there_for_frameworks(make: Make) -> None:
    optimizer = make(params_like((4,)), lr=0.125)
    assert optimizer.defaults["lr"] == 0.125
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, FusedAdamS) or make is adamw

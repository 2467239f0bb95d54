"""`swd_fused.param_groups`: what decays, by names, classes and shapes, in models whole, shared, frozen and sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swd_fused import FusedAdamS, param_groups


class GemmaRMSNorm(nn.Module):
    """A norm of another library, over two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 4))


class Experts(nn.Module):
    """Weights and biases of several experts in one tensor each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 4))
        self.up_bias = nn.Parameter(torch.zeros(3, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.temperature = nn.Parameter(torch.ones(1))
        self.layer_scale = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.LSTM(4, 4)
        self.image_norm = nn.LayerNorm([2, 4])
        self.channel_norm = nn.BatchNorm2d(4)
        self.other_norm = GemmaRMSNorm()
        self.experts = Experts()
        self.head = nn.Linear(4, 8, bias=False)


ATTENTION = ["attention.in_proj_weight", "attention.out_proj.weight"]
RECURRENT = ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0"]
MATRICES = ["linear.weight", *ATTENTION, *RECURRENT, "experts.up", "head.weight"]
EMBEDDINGS = ["tokens.weight", "pos_embed"]


def names(groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {group["name"]: [name for name, _ in group["params"]] for group in groups}


def test_only_matrices_decay() -> None:
    model = Model()
    groups = param_groups(model, 1e-3)
    assert [group["weight_decay"] for group in groups] == [1e-3, 0.0]
    left_open = torch.optim.AdamW(param_groups(model), weight_decay=0.3).param_groups
    assert [group["weight_decay"] for group in left_open] == [0.3, 0.0]
    found = names(groups)
    assert sorted(found["decay"]) == sorted(MATRICES)
    assert sorted(found["decay"] + found["no_decay"]) == sorted(name for name, _ in model.named_parameters())
    assert all(dict(model.named_parameters())[name] is param for group in groups for name, param in group["params"])
    with_embeddings = names(param_groups(model, 1e-3, decay_embeddings=True))["decay"]
    assert sorted(with_embeddings) == sorted(MATRICES + EMBEDDINGS)
    with torch.device("meta"):
        assert names(param_groups(Model())) == found


class VisionTransformer(nn.Module):
    """The parameters that timm, torchvision and transformers give their vision models, under their names."""

    def __init__(self) -> None:
        super().__init__()
        for name in TOKENS:
            setattr(self, name, nn.Parameter(torch.zeros(1, 1, 4)))
        for name in POSITIONS:
            setattr(self, name, nn.Parameter(torch.zeros(1, 5, 4)))
        for name in BIASES:
            setattr(self, name, nn.Parameter(torch.zeros(9, 2)))
        self.patch_embed = nn.Conv2d(3, 4, 2)
        self.pos_proj = nn.Linear(4, 4)
        self.token_mixer = nn.Parameter(torch.zeros(5, 5))
        self.composed = nn.Parameter(torch.zeros(4, 4))


TOKENS = ["cls_token", "cls_token1", "dist_token", "reg_token", "class_token", "mask_token", "register_tokens"]
POSITIONS = [
    *("pos_embed", "pos_embed1", "pos_embed_window", "pos_embedding", "position_embeddings", "positional_embedding"),
    *("position_embedding_table", "patch_pos", "pixel_pos", "rel_pos_h", "rel_pos_w"),
]
BIASES = ["relative_position_bias_table", "attention_biases"]


def test_tokens_and_positions_of_vision_models_do_not_decay() -> None:
    model = nn.ModuleDict({"backbone": VisionTransformer(), "head": nn.Linear(4, 1)})
    matrices = [f"backbone.{name}" for name in ("token_mixer", "composed", "patch_embed.weight", "pos_proj.weight")]
    matrices.append("head.weight")
    assert sorted(names(param_groups(model))["decay"]) == sorted(matrices)
    embeddings = [f"backbone.{name}" for name in (*TOKENS, *POSITIONS)]
    assert sorted(names(param_groups(model, decay_embeddings=True))["decay"]) == sorted(matrices + embeddings)


class KnowsItself(VisionTransformer):
    def no_weight_decay(self) -> set[str]:
        """As timm's models have it, with names that some variants lack."""
        return {"cls_token", "composed", "pos_proj.*", "freqs"}


def test_models_say_what_must_not_decay() -> None:
    model = nn.ModuleDict({"backbone": KnowsItself()})
    assert names(param_groups(model))["decay"] == ["backbone.token_mixer", "backbone.patch_embed.weight"]
    with_embeddings = names(param_groups(model, decay_embeddings=True))["decay"]
    assert "backbone.dist_token" in with_embeddings
    assert "backbone.cls_token" not in with_embeddings


def test_shared_weights_are_listed_once_and_follow_the_embedding() -> None:
    model = Model()
    model.head.weight = model.tokens.weight
    found = names(param_groups(model))
    assert "tokens.weight" in found["no_decay"]
    assert "head.weight" not in found["decay"] + found["no_decay"]
    FusedAdamS(param_groups(model))  # torch would warn of a parameter that is there twice
    assert "tokens.weight" in names(param_groups(model, decay_embeddings=True))["decay"]
    head_first = nn.ModuleDict({"head": nn.Linear(4, 8, bias=False), "tokens": nn.Embedding(8, 4)})
    head_first["tokens"].weight = head_first["head"].weight
    assert names(param_groups(head_first)) == {"no_decay": ["head.weight"]}


def test_frozen_parameters() -> None:
    model = Model()
    model.experts.requires_grad_(False)
    assert not [name for group in names(param_groups(model)).values() for name in group if "experts" in name]
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"without parameters that require gradients.*Freeze parameters after"):
        param_groups(model)
    model.linear.weight.requires_grad_(True)
    assert names(param_groups(model)) == {"decay": ["linear.weight"]}


def test_further_parameters_without_decay() -> None:
    model = Model()
    found = names(param_groups(model, no_decay=["experts.*", "head.weight"]))
    assert sorted(found["decay"]) == sorted(set(MATRICES) - {"experts.up", "head.weight"})
    assert names(param_groups(model, no_decay="experts.*")) == names(param_groups(model, no_decay=["experts.*"]))
    with pytest.raises(ValueError, match=r"no_decay=\['router.*'\], which no parameter of Model is called"):
        param_groups(model, no_decay=["experts.*", "router.*"])


class Transformer(nn.Module):
    """Its head comes before its last norm, so that only `get_output_embeddings` tells what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_groups_of_adamc() -> None:
    """Embeddings and the output layer, which no norm follows, are apart; embeddings also where they decay."""
    model = Transformer()
    layers, rest = (
        ["layers.0.weight", "layers.1.weight"],
        ["layers.0.bias", "layers.1.bias", "norm.weight", "norm.bias"],
    )
    groups = param_groups(model, 0.1, corrected_decay=True)
    assert names(groups) == {"corrected_decay": layers, "decay": ["head.weight"], "no_decay": ["embed.weight", *rest]}
    assert [(group["weight_decay"], group.get("corrected_decay", False)) for group in groups] == [
        (0.1, True),
        (0.1, False),
        (0.0, False),
    ]
    optimizer = FusedAdamS(groups, lr=1e-2, decay="decoupled")
    assert [group["corrected_decay"] for group in optimizer.param_groups] == [True, False, False]
    assert sorted(names(param_groups(model, decay_embeddings=True, corrected_decay=True))["decay"]) == [
        "embed.weight",
        "head.weight",
    ]
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    assert names(param_groups(convolutions, corrected_decay=True))["decay"] == ["3.weight"], "the last matrix"
    convolutions.get_classifier = lambda: (convolutions[0], nn.Identity())  # type: ignore[assignment]
    assert names(param_groups(convolutions, corrected_decay=True))["decay"] == ["0.weight"]
    model.head.weight = model.embed.weight
    assert names(param_groups(model, corrected_decay=True)) == {
        "corrected_decay": layers,
        "no_decay": ["embed.weight", *rest],
    }
    assert names(param_groups(model, decay_embeddings=True, corrected_decay=True))["decay"] == ["embed.weight"]
    model.get_output_embeddings = lambda: None  # type: ignore[method-assign, assignment, return-value]
    found = names(param_groups(model, corrected_decay=True))
    assert found["corrected_decay"] == layers, "a head that shares the embedding's weights is the output layer"


def flattened(module: nn.Module) -> nn.Module:
    module.weight._fsdp_flattened = True
    return module


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (list(nn.Linear(2, 2).parameters()), TypeError, "got a list, wanted a torch.nn.Module"),
        (flattened(nn.Linear(2, 2)), ValueError, "FullyShardedDataParallel has flattened.*fully_shard"),
        (nn.ReLU(), ValueError, "ReLU without parameters"),
    ],
)
def test_models_that_cannot_be_sorted(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        param_groups(model)

"""Sorts a model's parameters into groups by how they decay."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # all batch and instance norms
)
# Classes and parameters of other libraries, by their names: LlamaRMSNorm, FrozenBatchNorm2d, ViTEmbeddings; bias_ih_l0,
# attention_biases, relative_position_bias_table; pos_embed1, rel_pos_h, cls_token, register_tokens, not token_mixer.
NORM_CLASS = re.compile(r"Norm(\dd)?$")
EMBEDDING_CLASS = re.compile(r"Embeddings?$")
BIAS = re.compile(r"(^|_)bias(es)?(_|$)")
EMBEDDING = re.compile(r"(^|_)((emb(ed(ding)?s?)?|pos(ition(s|al)?)?)\d*(_|$)|tokens?\d*$)")


def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    decay_embeddings: bool = False,
    no_decay: Iterable[str] = (),
    corrected_decay: bool = False,
) -> list[dict[str, Any]]:
    """Returns parameter groups for FusedAdamS, or any torch optimizer, in which only matrices decay.

    Biases, the parameters of norms, all scalars and vectors, embeddings, and what a module itself lists in
    `no_weight_decay()`, as timm's models do, are in a group with `weight_decay=0`. The groups are called "decay" and
    "no_decay", have the parameters' names, and are left out if they are empty. A parameter that several modules share
    is listed once, and does not decay if it must not in one of them: with `decay_embeddings=False` that is the head of
    a language model which shares its weights with the embedding. Frozen parameters are left out.

    The model may be sharded by DTensors (`fully_shard`, tensor parallelism) or on the meta device: only names, classes
    and global shapes count. Call it after whatever replaces parameters, as `fully_shard` and `to_empty` do.

    Args:
        model: the model to train.
        weight_decay: of the group that decays, in the terms of the optimizer it is for. FusedAdamS's is not AdamW's.
            None leaves it to the optimizer's own.
        decay_embeddings: whether embeddings decay, among them those for positions and single tokens (`cls_token`).
        no_decay: names of further parameters that must not decay, as `model.named_parameters()` has them. `*` stands
            for any text, as in "*.router.weight".
        corrected_decay: whether to make the groups of AdamC: a group "corrected_decay", with that option of FusedAdamS,
            takes from "decay" all matrices but those of the output layer and embeddings, which no norm follows. The
            output layer is what the model returns from `get_output_embeddings()` or `get_classifier()`, as those of
            transformers and timm do, or else a layer that shares an embedding's weights, or else its last matrix.

    Example:
        >>> optimizer = FusedAdamS(param_groups(model, weight_decay=1e-3), lr=3e-4)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups got a {type(model).__name__}, wanted a torch.nn.Module: names and classes of modules tell "
            "what decays. Pass the model itself, not its parameters."
        )
    patterns = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    unmatched, by_modules = dict.fromkeys(patterns), []
    params: dict[Tensor, str] = {}
    exempt, embeddings, others = (set[Tensor]() for _ in range(3))
    for prefix, module in model.named_modules():
        listed = getattr(module, "no_weight_decay", None)
        by_modules += [f"{prefix}.{name}".lstrip(".") for name in listed()] if callable(listed) else []
        for name, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
                raise ValueError(
                    f"param_groups got {name}, which FullyShardedDataParallel has flattened: what it was is no longer "
                    "known. Shard by torch.distributed.fsdp.fully_shard instead, or sort parameters by their names."
                )
            matching = [pattern for pattern in (*patterns, *by_modules) if fnmatchcase(name, pattern)]
            for pattern in matching:
                unmatched.pop(pattern, None)
            if param.requires_grad:
                params.setdefault(param, name)
                is_embedding = _is_embedding(name, module)
                (embeddings if is_embedding else others).add(param)
                if matching or not _is_matrix(name, param, module) or (is_embedding and not decay_embeddings):
                    exempt.add(param)
    if unmatched:
        raise ValueError(
            f"param_groups got no_decay={list(unmatched)}, which no parameter of {type(model).__name__} is called. "
            f"Names are those of model.named_parameters(), such as {next(iter(params.values()), 'none at all')!r}."
        )
    if not params:
        raise ValueError(
            f"param_groups got a {type(model).__name__} without parameters that require gradients, wanted at least "
            "one. Freeze parameters after this call, and train some."
        )
    decaying = [param for param in params if param not in exempt]
    without_norm = set(decaying)
    if corrected_decay:
        without_norm = embeddings | (_output_layer(model) or embeddings & others or set(decaying[-1:]))
    own = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": [], "name": "corrected_decay", **own, "corrected_decay": True},
        {"params": [], "name": "decay", **own},
        {"params": [], "name": "no_decay", "weight_decay": 0.0},
    ]
    for param, name in params.items():
        groups[2 if param in exempt else int(param in without_norm)]["params"].append((name, param))
    return [group for group in groups if group["params"]]


def _output_layer(model: nn.Module) -> set[Tensor]:
    """Returns the parameters of what a model itself calls its output layer: one module, or some."""
    for name in ("get_output_embeddings", "get_classifier"):
        layers = getattr(model, name, lambda: None)()
        found = layers if isinstance(layers, (tuple, list)) else [layers]
        params: set[Tensor] = {param for layer in found if isinstance(layer, nn.Module) for param in layer.parameters()}
        if params:
            return params
    return set()


def _is_matrix(name: str, param: Tensor, module: nn.Module) -> bool:
    """Returns whether a parameter is neither a bias, nor of a norm, nor another vector."""
    dims = len(getattr(param, "ds_shape", param.shape))  # DeepSpeed's ZeRO-3 leaves empty tensors that tell their shape
    is_of_norm = isinstance(module, NORMS) or NORM_CLASS.search(type(module).__name__)
    return dims > 1 and not BIAS.search(name.rpartition(".")[2]) and not is_of_norm


def _is_embedding(name: str, module: nn.Module) -> bool:
    return bool(
        isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        or EMBEDDING_CLASS.search(type(module).__name__)
        or EMBEDDING.search(name.rpartition(".")[2])
    )

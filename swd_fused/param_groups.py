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
# Names of classes and parameters in other libraries: LlamaRMSNorm, FrozenBatchNorm2d, ViTEmbeddings; bias_ih_l0,
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

    A group with `weight_decay=0` has biases, the parameters of norms, all scalars and vectors, embeddings, and the
    parameters that a module lists in `no_weight_decay()`, as timm's models do. The groups are called "decay" and
    "no_decay", have the parameters' names, and are left out if they are empty. A parameter that several modules share
    is listed once, and does not decay if one of them exempts it: with `decay_embeddings=False` this exempts the head of
    a language model that shares its weights with the embedding. Frozen parameters are left out.

    The model may be sharded by DTensors (`fully_shard`, tensor parallelism) or on the meta device: only names, classes
    and global shapes count. Call this after anything that replaces parameters, as `fully_shard` and `to_empty` do.

    Args:
        model: the model to train.
        weight_decay: that of the group that decays. It means what the optimizer takes it for: FusedAdamS's is not
            AdamW's. None leaves it to the optimizer's default.
        decay_embeddings: whether embeddings decay, including those for positions and single tokens (`cls_token`).
        no_decay: names, as in `model.named_parameters()`, of further parameters that must not decay. `*` stands for
            any text, as in "*.router.weight".
        corrected_decay: whether to make AdamC's groups: a group "corrected_decay", with that option of FusedAdamS, has
            all matrices from "decay" but those of the output layer and embeddings, which no norm follows. The
            output layer is the one that `get_output_embeddings()` or `get_classifier()` returns, as in transformers and
            timm; or else a layer that shares an embedding's weights, or else the model's last matrix.

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
    """Returns the parameters of the modules that a model itself names as its output layer."""
    for name in ("get_output_embeddings", "get_classifier"):
        layers = getattr(model, name, lambda: None)()
        found = layers if isinstance(layers, (tuple, list)) else [layers]
        params: set[Tensor] = {param for layer in found if isinstance(layer, nn.Module) for param in layer.parameters()}
        if params:
            return params
    return set()


def _is_matrix(name: str, param: Tensor, module: nn.Module) -> bool:
    """Returns whether a parameter has two dimensions or more, and belongs neither to a bias nor to a norm."""
    dims = len(getattr(param, "ds_shape", param.shape))  # DeepSpeed's ZeRO-3 leaves empty tensors with this attribute
    is_of_norm = isinstance(module, NORMS) or NORM_CLASS.search(type(module).__name__)
    return dims > 1 and not BIAS.search(name.rpartition(".")[2]) and not is_of_norm


def _is_embedding(name: str, module: nn.Module) -> bool:
    return bool(
        isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        or EMBEDDING_CLASS.search(type(module).__name__)
        or EMBEDDING.search(name.rpartition(".")[2])
    )

"""Plain shards where no mean over the model is used: the wrapper need not be told apart."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from swd_fused import FusedAdamS
from tests.distributed.ranks import once_on_ranks
from tests.runs import random_grads, random_params, run

SHAPES = [(5,), (3, 4), (7,)]
PEERS = {"decoupled": torch.optim.AdamW, "l2": torch.optim.Adam}
NEED_THE_NORM: list[dict[str, Any]] = [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}]


def trained(
    optimizer_class: Any, later: dict[str, Any] | None = None, by_zero: dict[str, Any] | None = None, **options: Any
) -> list[torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that torch.jit.script is deprecated

    torch.manual_seed(0)
    params, grads = random_params(SHAPES, torch.float64), random_grads(SHAPES, 4, torch.float64)
    inner = functools.partial(optimizer_class, **options)
    optimizer = ZeroRedundancyOptimizer(params, inner, lr=0.01, weight_decay=0.1, **(by_zero or {}))
    run(params, grads[:2], optimizer)
    for name, value in (later or {}).items():
        setattr(optimizer.optim, name, value)
    run(params, grads[2:], optimizer)
    return [param.detach() for param in params]


def message_of(**options: Any) -> str:
    try:
        trained(FusedAdamS, **options)
    except RuntimeError as error:
        return str(error)
    return ""


def cases() -> dict[str, Any]:
    answers: dict[str, Any] = {decay: trained(FusedAdamS, decay=decay) for decay in PEERS}
    answers["by zero"] = trained(FusedAdamS, by_zero={"decay": "decoupled"})
    answers |= {peer.__name__: trained(peer) for peer in PEERS.values()}
    answers |= {f"{options}": message_of(decay="decoupled", **options) for options in NEED_THE_NORM}
    return answers | {"later": message_of(decay="decoupled", later={"max_grad_norm": 1.0}), "scheduled": message_of()}


@pytest.mark.parametrize("decay", PEERS)
def test_zero_without_a_schedule_is_adams(decay: str) -> None:
    for answers in once_on_ranks(2, cases):
        for param, peer in zip(answers[decay], answers[PEERS[decay].__name__], strict=True):
            torch.testing.assert_close(param, peer, rtol=0, atol=1e-14)


def test_decay_may_be_a_keyword_of_zero() -> None:
    """Which puts it into the groups, too."""
    for answers in once_on_ranks(2, cases):
        assert all(map(torch.equal, answers["by zero"], answers["decoupled"]))


@pytest.mark.parametrize("case", [*map(str, NEED_THE_NORM), "later"])
def test_the_norm_of_a_shard_is_refused(case: str) -> None:
    for answers in once_on_ranks(2, cases):
        assert re.search("from ZeroRedundancyOptimizer, .* the gradients' norm would be that of this", answers[case])


def test_the_mean_of_a_shard_is_refused() -> None:
    for answers in once_on_ranks(2, cases):
        assert re.search("from ZeroRedundancyOptimizer, .* the schedule's mean would be that of", answers["scheduled"])

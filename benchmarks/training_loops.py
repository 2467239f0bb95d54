"""Times `optimizer.step()` inside training loops: new gradients and a learning-rate scheduler in each step, and caches
as cold as a forward and a backward pass leave them. Hot loops over `step` alone flatter whoever keeps more from step to
step. Each step is compared with its peer's, alone and as a part of the whole training step, in which forward and
backward take as long for all: their difference would be smaller than their noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.small_models import SmallGPT, SmallResNet
from benchmarks.step_times.contenders import AVERAGED_PEER, CLIPPED_PEER, CONTENDERS, PEER, Contender
from benchmarks.step_times.harness import Case, Row, Step, Times, carry_out, command, crossed, milliseconds

STEPS_IN_A_ROW = 5  # of which the first, which finds the caches as another contender left them, is not counted
REPEATS = 41
BUDGET = 60.0  # seconds of one model's rounds
QUICK = ("MLP", "CNN")

Loss = Callable[[], Tensor]
Model = Callable[[], tuple[nn.Module, Loss]]


def squared(model: nn.Module, batch: Callable[[], Tensor]) -> tuple[nn.Module, Loss]:
    return model, lambda: model(batch()).square().mean()


def mlp() -> tuple[nn.Module, Loss]:
    layers = [nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6)]
    return squared(nn.Sequential(*layers), lambda: torch.randn(64, 17))


def cnn() -> tuple[nn.Module, Loss]:
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10)]
    return squared(nn.Sequential(*layers), lambda: torch.randn(64, 1, 8, 8))


def gpt() -> tuple[nn.Module, Loss]:
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(192, 6, 768, **options) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(512, 192), *blocks, nn.Linear(192, 512))
    return squared(model, lambda: torch.randint(0, 512, (8, 64)))


def resnet() -> tuple[nn.Module, Loss]:
    model, generator = SmallResNet(), torch.Generator().manual_seed(0)
    return model, lambda: model.loss(model.batch(32, generator))


def large_gpt() -> tuple[nn.Module, Loss]:
    """With few tokens for its size, 512: a larger batch would hide the optimizer."""
    model, generator = SmallGPT(vocabulary=8192, width=512, layers=8), torch.Generator().manual_seed(0)
    return model, lambda: model.loss(model.batch(4, generator))


MODELS = {"MLP": mlp, "CNN": cnn, "ResNet": resnet, "GPT": gpt, "large GPT": large_gpt}
OURS = ("exact", "lagged", "exact + clip", "exact + clip + outliers")
PEERS = (PEER, CLIPPED_PEER, AVERAGED_PEER, "FusedAdamW + clip + average (cpu)")
COMPARED = [CONTENDERS[name] for name in (*PEERS, *(f"FusedAdamS {own} (cpu)" for own in OURS))]


class Loop:
    """A model in training. A turn is several steps, and its seconds are those of all but the first.

    How long forward and backward took goes into `forward_backward`.
    """

    def __init__(self, contender: Contender, made: tuple[nn.Module, Loss], forward_backward: list[float]) -> None:
        model, self._loss = made
        params = list(model.parameters())
        self._optimizer = contender.make(params)
        self._scheduler = CosineAnnealingLR(self._optimizer, 10**6)  # which wraps the optimizer's step
        self._step = contender.step_of(self._optimizer, params)
        self._forward_backward = forward_backward

    def turn(self) -> list[float]:
        passes, steps = zip(*(self._train() for _ in range(STEPS_IN_A_ROW)), strict=True)
        self._forward_backward += passes[1:]
        return list(steps[1:])

    def _train(self) -> tuple[float, float]:
        self._optimizer.zero_grad()
        start = perf_counter()
        self._loss().backward()
        before = perf_counter()
        self._step()
        end = perf_counter()
        self._scheduler.step()
        return before - start, end - before


def case_of(name: str, among: Sequence[Contender] = COMPARED) -> Case:
    forward_backward: list[float] = []
    peers = {contender.name: contender.peer for contender in among}

    def loop(contender: Contender, _: None) -> Step:
        torch.manual_seed(0)
        return Loop(contender, MODELS[name](), forward_backward).turn

    def whole_step(contender: str, times: Times) -> Row:
        rest = median(forward_backward[-sum(map(len, times.values())) :])  # without those that warmed up
        own, peer = median(times[contender]), median(times[peers[contender]])
        return {"forward_backward_s": rest, "whole_ratio": (rest + own) / (rest + peer)}

    parameters = sum(param.numel() for param in MODELS[name]()[0].parameters())
    title, columns = f"{name}, {parameters:,}", {"model": name, "parameters": parameters}
    builds = {contender.name: partial(loop, contender) for contender in among}
    measured: Row = {"timer": lambda turn: turn(), "more": whole_step}
    return Case(title, columns, builds, REPEATS, peers=peers, budget=BUDGET, **measured)


def cell(row: Row) -> str:
    if row["contender"] == row["peer"]:
        return f"{milliseconds(row['median_s'])} of\n{milliseconds(row['median_s'] + row['forward_backward_s'])} ms"
    return f"{row['ratio']:.2f}\n({row['whole_ratio'] - 1:+.1%})"


def main(arguments: Sequence[str] | None = None) -> None:
    options = command("training_loops", __doc__).parse_args(arguments)
    title = "Time of a step relative to its peer, and what that adds to the whole training step"
    carry_out(
        options,
        [case_of(name) for name in (QUICK if options.quick else MODELS)],
        lambda rows: crossed(rows, title, "model", "contender", cell),
    )


if __name__ == "__main__":
    main()

"""Times `optimizer.step()` inside training loops: new gradients and a learning-rate scheduler in each step, and caches
as cold as a forward and a backward pass leave them. Hot loops over `step` alone flatter whoever keeps more from step to
step. Each step is compared with its peer's, alone and as a part of the whole training step, in which forward and
backward take as long for all: their difference would be smaller than their noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.conditions import positive
from benchmarks.small_models import SmallGPT, SmallResNet
from benchmarks.step_times.contenders import MAX_GRAD_NORM, PEER
from benchmarks.step_times.harness import Case, Row, Step, carry_out, command, grouped, table
from swd_fused import FusedAdamS

STEPS_IN_A_ROW = 5  # of which the first, which finds the caches as another contender left them, is not counted
CLIPPED_PEER = "clip_grad_norm_ + AdamW fused"

Loss = Callable[[], Tensor]
Build = Callable[[Iterable[Tensor]], Optimizer]
Make = Callable[[], tuple[nn.Module, Loss]]


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

# By name: how the optimizer is made. Those whose name begins with "clip_grad_norm_" clip before the step.
CONTENDERS: dict[str, Build] = {
    PEER: lambda params: AdamW(params, fused=True),
    "exact": FusedAdamS,
    "lagged": lambda params: FusedAdamS(params, schedule="lagged"),
    CLIPPED_PEER: lambda params: AdamW(params, fused=True),
    "exact with clipping": lambda params: FusedAdamS(params, max_grad_norm=MAX_GRAD_NORM),
}
PEERS = {"exact with clipping": CLIPPED_PEER, CLIPPED_PEER: CLIPPED_PEER}


class Loop:
    """A model in training. How long forward and backward took goes into `forward_backward`."""

    def __init__(self, contender: str, make: Make, forward_backward: list[float]) -> None:
        torch.manual_seed(0)
        self._model, self._loss = make()
        self._clips_before = contender.startswith("clip_grad_norm_")
        self._optimizer = CONTENDERS[contender](list(self._model.parameters()))
        self._scheduler = CosineAnnealingLR(self._optimizer, 10**6)
        self.forward_backward = forward_backward

    def __call__(self) -> float:
        """Takes a training step and returns how long the optimizer took."""
        self._optimizer.zero_grad()
        start = perf_counter()
        self._loss().backward()
        before = perf_counter()
        if self._clips_before:
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        end = perf_counter()
        self._scheduler.step()
        self.forward_backward.append(before - start)
        return end - before


def counted_steps(step: Step) -> list[float]:
    loop = cast(Loop, step)
    loop()
    loop.forward_backward.pop()
    return [loop() for _ in range(STEPS_IN_A_ROW - 1)]


def case_of(name: str, repeats: int, budget: float, threads: int) -> Case:
    forward_backward: list[float] = []

    def build() -> Mapping[str, Step]:
        torch.set_num_threads(threads)
        return {contender: Loop(contender, MODELS[name], forward_backward) for contender in CONTENDERS}

    def whole_step(contender: str, times: Mapping[str, list[float]]) -> Row:
        rest = median(forward_backward[-sum(map(len, times.values())) :])  # without those that warmed up
        own, peer = median(times[contender]), median(times[PEERS.get(contender, PEER)])
        return {"forward_backward_s": rest, "whole_ratio": (rest + own) / (rest + peer)}

    parameters = sum(param.numel() for param in MODELS[name]()[0].parameters())
    title, columns = f"{name}, {threads} threads", {"model": name, "parameters": parameters}
    return Case(title, columns, build, repeats, PEERS, budget, timer=counted_steps, more=whole_step)


def tables(rows: Sequence[Row]) -> list[Table]:
    named = ("exact", "lagged", "exact with clipping")
    cells = []
    for own in grouped(rows, "model", "threads"):
        first, by_name = own[0], {row["contender"]: row for row in own}
        whole = first["forward_backward_s"] + first["median_s"]
        times = f"{1e3 * first['median_s']:.3g} of {1e3 * whole:.3g} ms"
        figures = [f"{by_name[n]['ratio']:.2f}, {100 * (by_name[n]['whole_ratio'] - 1):+.2f}%" for n in named]
        cells.append([f"{first['model']}, {first['parameters']:,}", str(first["threads"]), times, *figures])
    title = "Time of a step in training loops relative to its peer, alone and with forward and backward"
    return [table(title, ["model", "threads", PEER, *named], cells)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("training_loops", __doc__, repeats=41, threads=None)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument("--threads", type=positive, action="append", help="default: 1 and 2")
    parser.add_argument(
        "--budget", type=float, default=60.0, metavar="SECONDS", help="for one model's rounds; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    cases = [
        case_of(model, options.repeats, options.budget, threads)
        for threads in options.threads or (1, 2)
        for model in options.model or MODELS
    ]
    carry_out("training_loops", cases, options.out, tables)


if __name__ == "__main__":
    main()

"""Training with moments in 8 bits: a small convolutional net and a small GPT, with FusedAdamS and with its peers.

All contenders of a seed start from the same weights and see the same batches, with the same hyper-parameters. Each is
compared with its own float32 reference: FusedAdamS's kinds with FusedAdamS, the packages, which have AdamW only, with
torch's AdamW at a constant weight decay of about the same size. The second moments that are stored are compared with
float32 ones that get the gradients of the same run. One more run in float32, from weights that are moved by a
millionth, shows how far runs part that differ by rounding alone.

Takes about 25 minutes on two cores. Needs scikit-learn; peers take part where they are installed:
pip install bitsandbytes torchao. The same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from benchmarks import eight_bit_findings
from benchmarks.conditions import write_rows
from benchmarks.demo import convolutional_net
from benchmarks.small_models import SmallGPT
from benchmarks.studies import arguments
from benchmarks.studies.checkpoint import Checkpoint
from benchmarks.studies.rows import read_rows
from benchmarks.studies.runner import Results, Study, command, conditions_of
from benchmarks.studies.samples import digits, noisy, noisy_digits, windows_of
from benchmarks.studies.store import Store
from benchmarks.studies.training import Lesson, Point, lr_of_steps, train
from swd_fused import FusedAdamS

BETAS = (0.9, 0.999)
SAME: dict[str, Any] = {"betas": BETAS, "eps": 1e-8}
BLOCK = 256
LEAST_NUMEL = 4096  # bitsandbytes, torchao and FusedAdamS leave smaller tensors in float32
EVERY = 25  # steps between points of curves
WARM_UP = 40
LAST_LR = 0.05  # of the largest, at the end of a cosine

Decays = tuple[float, float]  # AdamS's and AdamW's
Optimizer = Any  # some have no common base class


# --- What is stored of the second moment


def exp_avg_sq(optimizer: Optimizer, param: Tensor) -> Tensor:
    stored: Tensor = optimizer.state[param]["exp_avg_sq"]
    return stored.dequantize() if hasattr(stored, "codes") else stored  # torchao's


def of_fused_adams(optimizer: Optimizer, param: Tensor) -> Tensor:
    state = optimizer.state[param]
    if "exp_avg_sq_root_codes" not in state:
        return exp_avg_sq(optimizer, param)
    codes, scales = state["exp_avg_sq_root_codes"], state["exp_avg_sq_root_scales"]
    return unscaled(codes, scales, rows=codes.shape[0] if codes.dim() > 1 else 1).square()


def of_bitsandbytes(optimizer: Optimizer, param: Tensor) -> Tensor:
    state = optimizer.state[param]
    stored: Tensor = state["state2"]
    return stored if stored.dtype != torch.uint8 else unscaled(state["qmap2"][stored.long()], state["absmax2"], rows=1)


def unscaled(codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Multiplies each block of codes by its scale. Blocks do not reach from one of the rows into another."""
    matrix = codes.float().reshape(rows, -1)
    blocks = pad(matrix, (0, -matrix.shape[1] % BLOCK)).view(rows, -1, BLOCK) * scales.reshape(rows, -1, 1)
    return blocks.view(rows, -1)[:, : matrix.shape[1]].reshape(codes.shape)


# --- The optimizers


@dataclass(frozen=True)
class Contender:
    """`second_moment` reads what the optimizer stores for a parameter. `reference` is the contender in float32."""

    name: str
    reference: str
    build: Callable[[Sequence[Tensor], Decays], Optimizer]
    second_moment: Callable[[Optimizer, Tensor], Tensor] = exp_avg_sq
    package: str | None = None
    move_start: float = 0.0


def adams(params: Sequence[Tensor], decays: Decays, **options: Any) -> Optimizer:
    return FusedAdamS(params, weight_decay=decays[0], **SAME, **options)


def adamw(params: Sequence[Tensor], decays: Decays) -> Optimizer:
    return torch.optim.AdamW(params, weight_decay=decays[1], fused=True, **SAME)


def bitsandbytes_adamw(params: Sequence[Tensor], decays: Decays) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, weight_decay=decays[1], min_8bit_size=LEAST_NUMEL, **SAME)


def torchao_adamw(params: Sequence[Tensor], decays: Decays) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, weight_decay=decays[1], **SAME)


ADAMS, EIGHT_BIT, ADAMW = "FusedAdamS float32", "FusedAdamS 8bit", "AdamW fused"
MOVED = "FusedAdamS float32, start moved by 1e-6"

CONTENDERS = (
    Contender(ADAMS, ADAMS, adams, of_fused_adams),
    Contender(EIGHT_BIT, ADAMS, partial(adams, state_dtype="8bit"), of_fused_adams),
    # What a difference between two runs means: rounding alone grows to this.
    Contender(MOVED, ADAMS, adams, of_fused_adams, move_start=1e-6),
    Contender(ADAMW, ADAMW, adamw),
    Contender("bitsandbytes AdamW8bit", ADAMW, bitsandbytes_adamw, of_bitsandbytes, "bitsandbytes"),
    Contender("torchao AdamW8bit", ADAMW, torchao_adamw, package="torchao"),
)
REFERENCES = {contender.name: contender.reference for contender in CONTENDERS}


# --- What is trained


class Task(Protocol):
    lr: float
    decays: Decays

    def model(self) -> nn.Module: ...

    def batch(self, generator: torch.Generator) -> Any: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets."""

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor: ...


class NoisyDigits:
    lr, decays = 1e-3, (5e-4, 0.12)

    def __init__(self) -> None:
        self.data = digits()

    def model(self) -> nn.Module:
        return convolutional_net()

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return noisy_digits(self.data, 64, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def held_out(self) -> tuple[Tensor, Tensor]:
        images = self.data.test_images.repeat(8, 1, 1, 1)
        return noisy(images, torch.Generator().manual_seed(1)), self.data.test_labels.repeat(8)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        logits: Tensor = model(inputs)
        return logits


class Characters:
    """The characters of Python's standard library, of which the last tenth is held out."""

    lr, decays = 2e-3, (3e-5, 0.025)
    context, most = 64, 4_000_000

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)[: self.most]
        printable = bytes(code for code in text.encode("ascii", "ignore") if code == 10 or 32 <= code < 127)
        codes, tokens = torch.frombuffer(bytearray(printable), dtype=torch.uint8).unique(return_inverse=True)
        self.vocabulary, count = len(codes), len(tokens) // 10
        self.train_tokens, self.held_out_tokens = tokens[:-count], tokens[-count:]

    def model(self) -> nn.Module:
        return SmallGPT(self.vocabulary, self.context, width=144, layers=4)

    def batch(self, generator: torch.Generator) -> Tensor:
        return windows_of(self.train_tokens, 8, self.context, generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model.loss(batch)  # type: ignore[operator]
        return loss

    def held_out(self) -> tuple[Tensor, Tensor]:
        tokens = windows_of(self.held_out_tokens, 256, self.context, torch.Generator().manual_seed(1))
        return tokens[:, :-1], tokens[:, 1:].flatten()

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        logits: Tensor = model.logits(inputs)  # type: ignore[operator]
        return logits.flatten(0, 1)


TASKS: dict[str, type[Task]] = {"cnn": NoisyDigits, "gpt": Characters}
STEPS, QUICK_STEPS = {"cnn": 1500, "gpt": 1000}, {"cnn": 6, "gpt": 4}


@lru_cache
def task_of(name: str) -> Task:
    return TASKS[name]()


# --- A run


@dataclass(frozen=True)
class Run:
    task: str
    contender: str
    seed: int
    steps: int

    @property
    def key(self) -> str:
        return f"{self.task}-{self.contender}-{self.seed}-{self.steps}"

    @property
    def windows(self) -> int:
        return math.ceil(self.steps / EVERY)


class Watched(Lesson):
    """Keeps float32 second moments of the same gradients, and the largest update."""

    def __init__(self, task: Task, contender: Contender, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        model = task.model()
        self.params = list(model.parameters())
        with torch.no_grad():
            for param in self.params if contender.move_start else ():
                param.mul_(1 + contender.move_start * torch.randn_like(param))
        self.task, self.contender = task, contender
        self.shadow = [torch.zeros_like(param) for param in self.params]
        self.numel = sum(param.numel() for param in self.params)
        self.largest_update = 0.0
        optimizer = contender.build(self.params, task.decays)
        lengths = [min(EVERY, steps - start) for start in range(0, steps, EVERY)]
        super().__init__(model, optimizer, lr_of_steps(optimizer, partial(lr_share, steps=steps), steps), lengths)
        self.generator.manual_seed(seed)

    def batches(self) -> Iterator[Any]:
        while True:
            yield self.task.batch(self.generator)

    def loss(self, batch: Any) -> Tensor:
        return self.task.loss(self.model, batch)

    def weight_decay(self) -> float:
        if not hasattr(self.optimizer, "effective_weight_decay"):
            return self.task.decays[1]
        return float(self.optimizer.effective_weight_decay()[0])

    @torch.no_grad()
    def take_step(self) -> None:
        before = [param.detach().clone() for param in self.params]
        grads = [param.grad for param in self.params]
        torch._foreach_mul_(self.shadow, BETAS[1])
        torch._foreach_addcmul_(self.shadow, grads, grads, value=1 - BETAS[1])
        super().take_step()
        lr = float(self.optimizer.param_groups[0]["lr"])
        torch._foreach_mul_(before, 1 - lr * self.weight_decay())
        moved = max(norm.item() for norm in torch._foreach_norm(torch._foreach_sub(before, self.params), math.inf))
        self.largest_update = max(self.largest_update, moved / lr)

    @torch.no_grad()
    def point(self, is_last: bool) -> Point:
        """Measures how much larger than in float32 the sum of the stored second moments is, and the schedule's mean.

        AdamW has no schedule: there the mean is that of what is stored.
        """
        shadow = sum(moment.sum(dtype=torch.float64).item() for moment in self.shadow)
        stored = (self.contender.second_moment(self.optimizer, param) for param in self.params)
        of_sum = of_mean = sum(moment.sum(dtype=torch.float64).item() for moment in stored) / shadow - 1
        if hasattr(self.optimizer, "exp_avg_sq_mean"):
            whole = float(self.optimizer.exp_avg_sq_mean) * (1 - BETAS[1] ** self.steps) * self.numel
            of_mean = whole / shadow - 1
        point = {"step": self.steps, "train_loss": self.means()[0], "sum_of_v": of_sum, "mean_of_v": of_mean}
        return {**point, **self.tested(), "largest_update": self.largest_update} if is_last else point

    def tested(self) -> Point:
        self.model.eval()
        inputs, targets = self.task.held_out()
        logits = self.task.logits(self.model, inputs)
        accuracy = (logits.argmax(-1) == targets).double().mean().item()
        return {"held_out_loss": cross_entropy(logits, targets).item(), "held_out_accuracy": accuracy}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "shadow": self.shadow, "largest_update": self.largest_update}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.shadow, self.largest_update = state["shadow"], state["largest_update"]


def lr_share(step: int, steps: int) -> float:
    cosine = (1 + math.cos(math.pi * (step - 1) / steps)) / 2
    return min(1.0, step / WARM_UP) * (LAST_LR + (1 - LAST_LR) * cosine)


def trained(run: Run, checkpoint: Checkpoint, after_window: Callable[[], None]) -> dict[str, Any]:
    task = task_of(run.task)
    contender = next(contender for contender in CONTENDERS if contender.name == run.contender)
    lesson = Watched(task, contender, run.seed, run.steps)
    points = train(lesson, checkpoint, after_window)
    row = {
        "task": run.task,
        "contender": run.contender,
        "seed": run.seed,
        "steps": run.steps,
        "parameters": lesson.numel,
        "train_loss": fmean(point["train_loss"] for point in points[-2:]),  # of the last 50 steps
        **{name: points[-1][name] for name in ("held_out_loss", "held_out_accuracy", "sum_of_v")},
        "mean_of_v_rms": math.sqrt(fmean(point["mean_of_v"] ** 2 for point in points)),
        "largest_update": points[-1]["largest_update"],
        "lr": task.lr,
        "adams_weight_decay": task.decays[0],
        "adamw_weight_decay": task.decays[1],
    }
    return {"row": row}


# --- The command


def parser() -> argparse.ArgumentParser:
    result = arguments.parser("eight_bit_training", __doc__, jobs=2)
    result.add_argument("--task", action="append", choices=list(TASKS), help="repeatable; default: all")
    named = "those with TEXT in their name; repeatable"
    result.add_argument("--contender", action="append", metavar="TEXT", help=named)
    return result


def selected(texts: Sequence[str] | None) -> list[Contender]:
    """Includes references."""
    chosen = [c for c in CONTENDERS if not texts or any(text in c.name for text in texts)]
    needed = {c.name for c in chosen} | {c.reference for c in chosen}
    return [c for c in CONTENDERS if c.name in needed]


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    contenders = selected(options.contender)
    if not contenders:
        parser().error(f"No contender's name contains {' or '.join(options.contender)}.")
    there = [c for c in contenders if c.package is None or find_spec(c.package)]
    table = options.out / "eight_bit_training.csv"
    steps = QUICK_STEPS if options.quick else STEPS

    def planned(results: Results) -> list[Run]:
        tasks = options.task or list(TASKS)
        return [Run(t, c.name, seed, steps[t]) for t in tasks for seed in range(options.seeds or 3) for c in there]

    with command("eight_bit_training") as console:
        if not options.draw:
            for contender in contenders:
                if contender not in there:
                    console.print(f"Without {contender.name}. To compare: pip install {contender.package}")
            study = Study("8 bits", Store(options.out / "runs.jsonl"), trained, planned, workers=options.jobs)
            results = study.carry_out(console)
            records = sorted(results.values(), key=lambda record: list(REFERENCES).index(record["row"]["contender"]))
            records.sort(key=lambda record: record["row"]["task"])  # stable
            write_rows(table, [{**record["row"], **conditions_of(record)} for record in records])
        rows = read_rows(table)
        for part in eight_bit_findings.report(rows, REFERENCES):
            console.print(part, soft_wrap=isinstance(part, str), highlight=False)
        console.print(f"{table}", soft_wrap=True)


if __name__ == "__main__":
    main()

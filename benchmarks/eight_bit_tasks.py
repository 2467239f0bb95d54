"""What is trained with moments in 8 bits: a small convolutional net and a small GPT."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.eight_bit_contenders import Decays
from benchmarks.small_models import SmallGPT


class Task(Protocol):
    steps: int
    quick_steps: int
    lr: float
    decays: Decays

    def model(self) -> nn.Module: ...

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor: ...

    def held_out(self, model: nn.Module) -> tuple[float, float]:
        """Returns loss and accuracy."""


class NoisyDigits:
    """scikit-learn's digits with noise added to each batch, so that 1,347 images cannot be learnt by heart."""

    steps, quick_steps = 1500, 6
    lr, batch_size, noise = 1e-3, 64, 1.0
    decays = (5e-4, 0.12)

    def __init__(self) -> None:
        from benchmarks.demo import digits

        self.data = digits()

    def model(self) -> nn.Module:
        from benchmarks.demo import convolutional_net

        return convolutional_net()

    def noisy(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return images + self.noise * torch.randn(images.shape, generator=generator)

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(self.data.train_labels), (self.batch_size,), generator=generator)
        images = self.noisy(self.data.train_images[chosen], generator)
        return cross_entropy(model(images), self.data.train_labels[chosen])

    def held_out(self, model: nn.Module) -> tuple[float, float]:
        labels = self.data.test_labels.repeat(8)
        images = self.noisy(self.data.test_images.repeat(8, 1, 1, 1), torch.Generator().manual_seed(1))
        logits = model(images)
        return cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()


class Characters:
    """The characters of Python's standard library, of which the last tenth is held out."""

    steps, quick_steps = 1000, 4
    lr, batch_size, context = 2e-3, 8, 64
    decays = (3e-5, 0.025)
    most = 4_000_000

    def __init__(self) -> None:
        text = "".join(
            path.read_text(encoding="utf-8", errors="ignore")
            for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        )
        printable = bytes(
            code for code in text[: self.most].encode("ascii", "ignore") if code == 10 or 32 <= code < 127
        )
        codes, tokens = torch.frombuffer(bytearray(printable), dtype=torch.uint8).unique(return_inverse=True)
        self.vocabulary = len(codes)
        held_out = len(tokens) // 10
        self.train_tokens, self.held_out_tokens = tokens[:-held_out], tokens[-held_out:]

    def model(self) -> nn.Module:
        return SmallGPT(self.vocabulary, self.context, width=144, layers=4)

    def batch(self, tokens: Tensor, size: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(tokens) - self.context, (size, 1), generator=generator)
        return tokens[starts + torch.arange(self.context + 1)]

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        loss: Tensor = model.loss(self.batch(self.train_tokens, self.batch_size, generator))  # type: ignore[operator]
        return loss

    def held_out(self, model: nn.Module) -> tuple[float, float]:
        tokens = self.batch(self.held_out_tokens, 256, torch.Generator().manual_seed(1))
        logits = model.logits(tokens[:, :-1])  # type: ignore[operator]
        accuracy = (logits.argmax(-1) == tokens[:, 1:]).double().mean()
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item(), accuracy.item()


TASKS: dict[str, type[Task]] = {"cnn": NoisyDigits, "gpt": Characters}


@lru_cache
def task_of(name: str) -> Task:
    return TASKS[name]()

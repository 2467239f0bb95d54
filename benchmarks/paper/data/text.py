"""Texts as tokens, a word each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.paper.data.folders import DataError

UNKNOWN, END = "<unk>", "<eos>"


@dataclass
class Text:
    train: Tensor
    test: Tensor
    vocabulary: int
    validation: Tensor | None = None  # where the text comes with one

    def without(self, held_out: int) -> Text:
        """The last tokens for training are for validation instead."""
        if held_out == 0:
            return self
        if self.validation is not None:
            raise ValueError(f"got held_out={held_out}, wanted 0: the text has a validation part of its own")
        return replace(self, train=self.train[:-held_out], validation=self.train[-held_out:])

    def for_testing_on(self, part: str) -> Text:
        """With the validation part in the place of the test part, or with that alone."""
        if part == "validation":
            if self.validation is None:
                raise DataError("The text has no validation part, wanted held_out= tokens of the training part.")
            return replace(self, test=self.validation, validation=None)
        return replace(self, validation=None)

    def limited(self, train_tokens: int) -> Text:
        return self if train_tokens == 0 else replace(self, train=self.train[:train_tokens])

    def on(self, device: torch.device) -> Text:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def frequent_words(train: Sequence[str], most: int) -> dict[str, int]:
    """Their tokens. 0 is that of all others."""
    frequent = [word for word, _ in Counter(train).most_common(most) if word != UNKNOWN]
    return {word: i for i, word in enumerate([UNKNOWN, *frequent[: most - 1]])}


def as_tokens(words: Sequence[str], index: dict[str, int]) -> Tensor:
    return torch.tensor([index.get(word, 0) for word in words])

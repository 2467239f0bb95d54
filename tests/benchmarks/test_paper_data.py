"""Data are read in their standard format, and what is missing or broken is said clearly. Nothing is downloaded."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.paper.data import IMAGES, DataError
from benchmarks.paper.data.images import Tensors, flipped_and_cropped

RNG = np.random.default_rng(0)
# --- CIFAR

FILES10 = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
CASES = {
    "cifar10": (FILES10, "cifar-10-batches-bin", 10),
    "cifar100": (["train", "test"], "cifar-100-binary", 100),
}


def write_cifar(root: Path, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    files, folder, classes = CASES[name]
    (root / folder).mkdir()
    batches = []
    for file in files:
        images = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
        labels = RNG.integers(0, classes, 4, dtype=np.uint8)
        batches.append((images, labels))
        coarse = [np.full((4, 1), 7, np.uint8)] if name == "cifar100" else []
        np.concatenate([*coarse, labels[:, None], images], axis=1).tofile(root / folder / f"{file}.bin")
    return batches


@pytest.mark.parametrize("name", CASES)
def test_cifar_is_read(tmp_path: Path, name: str) -> None:
    batches = write_cifar(tmp_path, name)
    data = IMAGES[name](tmp_path)
    train = np.concatenate([images for images, _ in batches[:-1]]).reshape(-1, 3, 32, 32).astype(np.float64)
    assert data.train_labels.tolist() == np.concatenate([labels for _, labels in batches[:-1]]).tolist()
    assert data.test_labels.tolist() == batches[-1][1].tolist()
    mean, std = train.mean((0, 2, 3), keepdims=True), train.std((0, 2, 3), ddof=1, keepdims=True)
    np.testing.assert_allclose(data.train_images.numpy(), (train - mean) / std, rtol=1e-4, atol=1e-4)
    assert data.classes == CASES[name][2]


def test_the_subset_has_as_many_images_of_the_whole_set_as_two_cores_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, "cifar10")
    of_file = iter(range(6))

    def whole_file(path: Path, kind: object) -> tuple[np.ndarray, np.ndarray]:
        return np.full((10_000, 3072), next(of_file), np.uint8), np.arange(10_000) % 10

    monkeypatch.setattr(sys.modules["benchmarks.paper.data.cifar"], "read_binary", whole_file)
    data = IMAGES["cifar10-subset"](tmp_path)
    assert data.train_images[:, 0, 0, 0].unique(return_counts=True)[1].tolist() == [2000] * 5
    assert data.train_labels.tolist() == [*range(10)] * 1000
    assert (len(data.test_images), len(data.test_labels)) == (5000, 5000)


# --- What is missing


@pytest.mark.parametrize(("name", "file"), [("cifar10", "data_batch_1"), ("cifar100", "train")])
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

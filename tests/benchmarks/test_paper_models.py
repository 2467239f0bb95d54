"""The paper's models have the shapes and parameter counts that they are known by."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.paper.data import DataError
from benchmarks.paper.language_training import in_columns, stretches
from benchmarks.paper.models import IMAGE_MODELS, LANGUAGE_MODELS


def parameters(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


# With 10 classes of RGB images. The large ones are what is commonly given for these nets on CIFAR-10.
COUNTS = {
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "vgg16-bn": 14_728_266,
    "vgg16": 14_728_266 - 2 * 4224,  # BatchNorm has two numbers for each of the 4,224 channels
    "densenet121": 6_956_298,
    "googlenet": 6_166_250,
    "small-resnet": 19_954,
    "medium-resnet": 78_042,
    "large-resnet": 308_650,
    "small-vgg-bn": 17_930 + 2 * 104,
    "small-vgg": 17_930,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name: str) -> None:
    assert parameters(IMAGE_MODELS[name](3, 10, 32)) == COUNTS[name]


def test_every_model_is_counted() -> None:
    assert set(COUNTS) | {"resnet50"} == set(IMAGE_MODELS)


SMALL_SIZES = [(name, 1, 10, size) for name in COUNTS if name.startswith(("small", "medium")) for size in (28, 8)]


@pytest.mark.parametrize(("name", "channels", "classes", "size"), [*((n, 3, 100, 32) for n in COUNTS), *SMALL_SIZES])
def test_output_shape(name: str, channels: int, classes: int, size: int) -> None:
    model = IMAGE_MODELS[name](channels, classes, size).eval()
    with torch.no_grad():
        assert model(torch.randn(2, channels, size, size)).shape == (2, classes)


def test_every_parameter_of_every_model_is_trained() -> None:
    for name in COUNTS:
        size = 8 if name.startswith("small") else 32
        model = IMAGE_MODELS[name](3, 10, size)
        model(torch.randn(2, 3, size, size)).sum().backward()
        assert all(param.grad is not None for param in model.parameters()), name


def test_the_resnets_end_at_an_eighth_of_the_resolution() -> None:
    for name, size, width in (("resnet18", 4, 512), ("small-resnet", 4, 32)):
        model = IMAGE_MODELS[name](3, 10, 32)
        with torch.no_grad():
            assert torch.nn.Sequential(*list(model)[:-3])(torch.randn(2, 3, 32, 32)).shape == (2, width, size, size)


def test_resnet50_is_torchvisions() -> None:
    pytest.importorskip("torchvision", exc_type=Exception)
    model = IMAGE_MODELS["resnet50"](3, 1000, 224).eval()
    assert parameters(model) == 25_557_032
    with torch.no_grad():
        assert model(torch.randn(1, 3, 224, 224)).shape == (1, 1000)


def test_resnet50_without_torchvision_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(DataError, match="Install the torchvision"):
        IMAGE_MODELS["resnet50"](3, 1000, 224)


def test_the_lstm_has_the_papers_14_million_parameters() -> None:
    vocabulary, width = 10_000, 512
    lstm_layer = 4 * (2 * width * width + 2 * width)
    expected = vocabulary * width + 2 * lstm_layer + vocabulary * (width + 1)
    model = LANGUAGE_MODELS["lstm"](vocabulary)
    assert parameters(model) == expected == 14_452_496
    assert model.lstm.dropout == model.dropout.p == 0.5


def test_language_model_carries_its_hidden_state() -> None:
    model = LANGUAGE_MODELS["small-lstm"](11).eval()
    tokens = torch.randint(11, (6, 3))
    with torch.no_grad():
        whole, _ = model(tokens, model.no_hidden(3, torch.device("cpu")))
        first, hidden = model(tokens[:4], model.no_hidden(3, torch.device("cpu")))
        second, _ = model(tokens[4:], hidden)
    assert whole.shape == (6, 3, 11)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_text_is_cut_into_columns_and_every_word_but_the_first_is_a_target() -> None:
    text = in_columns(torch.arange(203), 2, "a text")
    assert text.shape == (101, 2)
    assert text[:3].tolist() == [[0, 101], [1, 102], [2, 103]]
    pieces = list(stretches(text))
    assert [len(tokens) for tokens, _ in pieces] == [35, 35, 30]
    assert torch.equal(torch.cat([targets for _, targets in pieces]), text[1:])
    assert all(torch.equal(tokens + 1, targets) for tokens, targets in pieces)
    with pytest.raises(DataError, match=r"a text has 5 words, too short .* wanted 6 words"):
        in_columns(torch.arange(5), 3, "a text")

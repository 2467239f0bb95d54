"""The tensors that are stepped: named lists of parameter shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Suite:
    """Shapes, and how often each contender steps them unless the command line says otherwise."""

    shapes: tuple[Shape, ...]
    repeats: int

    @property
    def elements(self) -> int:
        return sum(prod(shape) for shape in self.shapes)


def gpt2_shapes(layers: int, width: int, vocabulary: int, context: int) -> Iterator[Shape]:
    """GPT-2's parameters in the model's order. The output layer is the token embedding, so it stands once."""
    layer_norm = [(width,), (width,)]
    yield (vocabulary, width)
    yield (context, width)
    for _ in range(layers):
        yield from layer_norm
        for inputs, outputs in ((width, 3 * width), (width, width)):
            yield from ((inputs, outputs), (outputs,))
        yield from layer_norm
        for inputs, outputs in ((width, 4 * width), (4 * width, width)):
            yield from ((inputs, outputs), (outputs,))
    yield from layer_norm


def resnet50_shapes() -> Iterator[Shape]:
    """The parameters of torchvision's ResNet-50 in the model's order."""
    channels = 64
    yield from _conv_and_norm(3, channels, kernel=7)
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            yield from _conv_and_norm(channels, width, kernel=1)
            yield from _conv_and_norm(width, width, kernel=3)
            yield from _conv_and_norm(width, 4 * width, kernel=1)
            if block == 0:  # the shortcut changes width here
                yield from _conv_and_norm(channels, 4 * width, kernel=1)
            channels = 4 * width
    yield from ((1000, channels), (1000,))


def _conv_and_norm(inputs: int, outputs: int, kernel: int) -> Iterator[Shape]:
    yield (outputs, inputs, kernel, kernel)
    yield from ((outputs,), (outputs,))


SUITES = {
    "one-64M": Suite(((64 * 2**20,),), repeats=21),
    "gpt2-124m": Suite(tuple(gpt2_shapes(layers=12, width=768, vocabulary=50257, context=1024)), repeats=15),
    "resnet50": Suite(tuple(resnet50_shapes()), repeats=41),
    "one-1M": Suite(((2**20,),), repeats=401),
    "1000x500": Suite(((500,),) * 1000, repeats=101),
    # Small models, whose steps are mostly the host's work.
    "one-100k": Suite(((100_000,),), repeats=1001),
    "11x8192": Suite(((8192,),) * 11, repeats=1001),
    "one-10": Suite(((10,),), repeats=1001),
}
# Likenesses of them, to run everything and to time nothing: an emulated GPU takes minutes for them.
QUICK_SUITES = {
    "one-64M": Suite(((64, 256),), repeats=2),
    "gpt2-124m": Suite(tuple(gpt2_shapes(layers=3, width=16, vocabulary=512, context=16)), repeats=2),
    "one-1M": Suite(((1000,),), repeats=2),
    "1000x500": Suite(((5,),) * 200, repeats=2),
}

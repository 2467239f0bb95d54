"""What a case is made of, drawn from a seed and a number so that it can be drawn again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fuzz.layouts import LAYOUTS

# Around vector lanes (64), the address table's rounding (512), blocks (4096) and segments (32768) of the C++ kernels.
SIZES = [1, 2, 3, 7, 8, 63, 64, 65, 127, 511, 512, 513, 4095, 4096, 4097, 32767, 32769]
SHAPES: list[tuple[int, ...]] = [
    *((), (0,), (0, 7), (3, 0, 2), (1, 1), (5, 3), (8, 8), (7, 9, 1), (13, 5), (2, 3, 4, 5), (16, 9)),
    *((20, 31), (64, 65)),
]
# Rows of whole blocks, with a short last one, of less than a block, and too short to be coded; vectors; and more
# dimensions. The small ones, which the interpreter takes too, are for cases where smaller tensors are coded.
CODED_SHAPES = [(20, 256), (17, 300), (130, 32), (256, 16), (280, 15), (4200,), (3, 40, 50), (9, 3, 3, 64)]
SMALL_CODED_SHAPES = [(2, 256), (2, 300), (3, 32), (6, 16), (7, 15), (300,), (3, 4, 10)]
LEAST_CODED, SMALL_LEAST_CODED = 4096, 90

MEASURED_STEPS = 1  # of norms, before others stand out

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
MIXED = (torch.float32, torch.float64, *SIXTEEN_BITS, torch.complex64, torch.complex128)

COPIES = ("save and load", "deepcopy", "pickle")
WRITES = ("write exp_avg_sq", "write params", "change lr", "relayout state", "widen state", "float32 and back")
# Errors most often: it takes several buckets, and a bad gradient in a later one, to write half a step.
EVENTS = (*COPIES, *WRITES, "error", "error", "error", "skipped step", "warning as error")


@dataclass
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    group: int
    grad_size: float  # the root mean square of its gradients


@dataclass
class StepSpec:
    present: list[bool]  # which parameters have a gradient
    grad_layouts: list[str]
    events: list[str]
    loss_scale: float | None = None
    nonfinite: float | None = None  # put into one gradient


@dataclass
class Case:
    seed: int
    number: int
    backend: str
    threads: int
    tensors: list[TensorSpec]
    groups: list[dict[str, Any]]
    options: dict[str, Any]
    steps: list[StepSpec]
    least_coded: int  # elements of the smallest tensor whose moments may have 8 bits
    rng: random.Random = field(repr=False)  # goes on where drawing has stopped: for values and for events

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.rng.getrandbits(60))


def draw(seed: int, number: int, triton: bool = False) -> Case:
    """Returns case `number` of `seed`: the same one whenever it is asked for."""
    rng = random.Random(f"{seed}/{number}")
    backend = "triton" if triton else rng.choice(["cpu", "cpu", "torch"])
    has_codes = rng.random() < 0.15
    least_coded = SMALL_LEAST_CODED if triton or rng.random() < 0.3 else LEAST_CODED
    groups = [_group(rng) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    dtypes = rng.choice([(torch.float32,), (torch.float32,), SIXTEEN_BITS, MIXED, MIXED, (torch.float64,)])
    if has_codes and dtypes == (torch.float64,):  # which is never coded
        dtypes = (torch.float32,)
    count = rng.randint(len(groups), 3 if triton else 6)
    tensors = [
        TensorSpec(_shape(rng, triton), rng.choice(dtypes), rng.choice(list(LAYOUTS)), i % len(groups), 1.0)
        for i in range(count)
    ]
    options = _options(rng, tensors)
    if has_codes:
        _set_codes(rng, tensors, groups, options, SMALL_CODED_SHAPES if least_coded < LEAST_CODED else CODED_SHAPES)
    if options["decay"] != "scheduled":  # there it is AdamW's and Adam's, of the order of 0.1, or a share
        for group in groups:
            group["weight_decay"] = rng.choice([0.0, 0.01, 0.05 if options["decay"] == "independent" else 0.1])
            group["corrected_decay"] &= options["decay"] == "decoupled"
            group["cautious_decay"] &= options["decay"] != "l2"
    _set_grad_sizes(rng, tensors, groups, options)
    share = rng.choice([1.0, 1.0, 0.7, 0.4])
    nonfinite = 0.2 if options.get("skip_nonfinite") else 0.1 if has_codes else 0.03
    if options.get("max_grad_norm") and not options.get("skip_nonfinite"):  # then it spoils everything
        nonfinite = 0.0
    steps = [_step(rng, count, share, nonfinite) for _ in range(rng.randint(2, 3) if triton else rng.randint(3, 6))]
    return Case(seed, number, backend, rng.randint(1, 4), tensors, groups, options, steps, least_coded, rng)


def _shape(rng: random.Random, small: bool) -> tuple[int, ...]:
    if rng.random() < 0.5:
        return rng.choice(SHAPES[:-2] if small else SHAPES)
    sizes = SIZES[:8] if small or rng.random() < 0.6 else SIZES  # the large ones are slow to judge
    return (rng.choice(sizes),)


def _group(rng: random.Random) -> dict[str, Any]:
    lr = rng.choice([1e-3, 1e-2, 0.1, 10 ** rng.uniform(-4, -1), 0.0])
    ema_decay = rng.choice([None, None, 0.0, 0.9, 0.999])
    largest_lr = rng.choice([None, None, 0.02])
    return {
        "lr": lr,
        "tensor_lr": largest_lr is not None and rng.random() < 0.45,
        "betas": rng.choice([(0.9, 0.999), (0.9, 0.99), (0.8, 0.95), (0.0, 0.9), (0.5, 0.0)]),
        "eps": rng.choice([1e-8, 1e-8, 1e-6, 1e-4]),
        "weight_decay": rng.choice([0.0, 5e-4, 5e-3, 0.1, 1e305 if lr == 0 else 3.0]),
        "amsgrad": rng.random() < 0.3,
        "maximize": rng.random() < 0.15,
        "max_decay": rng.choice([0.1, 0.1, 0.01, 1.0]),
        "cautious_decay": rng.random() < 0.25,
        "corrected_decay": rng.random() < 0.25,
        "largest_lr": largest_lr,
        "ema_decay": ema_decay,
        "ema_warmup": ema_decay is not None and rng.random() < 0.5,
    }


def _options(rng: random.Random, tensors: list[TensorSpec]) -> dict[str, Any]:
    dtypes = {tensor.dtype for tensor in tensors}
    options: dict[str, Any] = {"decay": rng.choice(["scheduled"] * 6 + ["decoupled", "independent", "l2"])}
    if options["decay"] == "scheduled" and rng.random() < 0.45:
        options["schedule"] = "lagged"
    else:
        options["max_grad_norm"] = rng.choice([None, None, 0.1, 1.0, 10.0])
        options["skip_nonfinite"] = rng.random() < 0.2
        options["outliers"] = rng.choice([None, None, None, "skip", "clip"])
        if options["outliers"]:
            options["outlier_sigma"] = rng.choice([0.1, 0.5, 2.0])
    if dtypes & set(SIXTEEN_BITS) and rng.random() < 0.5:
        options["master_weights"] = True
    elif torch.bfloat16 in dtypes and rng.random() < 0.5:
        options["stochastic_rounding"], options["seed"] = True, rng.getrandbits(40)
    if rng.random() < 0.12:
        options["state_dtype"] = rng.choice([torch.float32, *SIXTEEN_BITS])
    options["bias_correction"] = rng.random() > 0.12
    return options


def _set_codes(
    rng: random.Random,
    tensors: list[TensorSpec],
    groups: list[dict[str, Any]],
    options: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
) -> None:
    """Moments in 8 bits: of all groups, or of one at least, with some tensors that are large enough."""
    for tensor in tensors:
        if rng.random() < 0.6:
            tensor.shape = rng.choice(shapes)
    if rng.random() < 0.5:
        options["state_dtype"] = "8bit"
    else:
        for group in groups:
            group["state_dtype"] = rng.choice(["8bit", "8bit", None, torch.bfloat16])
        rng.choice(groups)["state_dtype"] = "8bit"
    if rng.random() < 0.5:
        options["seed"] = rng.getrandbits(40)


def _set_grad_sizes(
    rng: random.Random, tensors: list[TensorSpec], groups: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    """Mostly ordinary ones. Tiny and huge ones are those whose squares are not to be had in float32.

    Huge ones only where clipping makes them ordinary. Tiny ones not with amsgrad, whose mean is of maxima that are kept
    in float32 and so are zero.
    """
    kind = rng.choice(["ordinary"] * 6 + ["tiny", "huge"])
    if kind == "tiny" and any(group["amsgrad"] for group in groups):
        kind = "ordinary"
    if kind == "huge" and options.get("max_grad_norm") is None:
        kind = "ordinary"
    size = {"ordinary": 1.0, "tiny": 1e-23, "huge": 1e25}[kind]
    for tensor in tensors:
        ordinary = tensor.dtype == torch.float16 or kind == "ordinary"
        tensor.grad_size = 10 ** rng.uniform(-4, 0.5) if ordinary else size


def _step(rng: random.Random, count: int, share: float, nonfinite: float) -> StepSpec:
    step = StepSpec(
        present=[rng.random() < share for _ in range(count)],
        grad_layouts=[rng.choice([*LAYOUTS, "contiguous", "expanded"]) for _ in range(count)],
        events=[rng.choice(EVENTS) for _ in range(rng.choice([0, 1, 1, 2]))],
        loss_scale=rng.choice([None, None, None, 0.5, 64.0, 1000.0]),
    )
    if rng.random() < nonfinite:
        step.nonfinite = rng.choice([float("inf"), float("nan"), -float("inf")])
    return step

"""Writes what the C++ kernels compute here to a file, or compares two such files, of x86-64 and of aarch64.

Steps from given gradients must leave the same bits on both: parameters, moments, 8-bit codes, scales and sums, and with
them the random bits. x86-64 must have AVX2 and FMA for that, since aarch64 fuses multiply with add.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swd_fused import FusedAdamS
from swd_fused.state import eight_bit

Results = dict[str, Tensor]

STEPS = 3
SHOWN = 20
# Of the kernels' vectors, blocks and segments: less than one, whole ones, and a rest. The last three have 8-bit codes.
SHAPES = [(), (7,), (4099,), (130, 32), (5, 264, 4), (9, 1023)]
STORAGE: dict[str, dict[str, Any]] = {
    "float64": {"dtype": torch.float64},
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "float32 first moment in bfloat16": {"dtype": torch.float32, "state_dtype": torch.bfloat16},
    "float32 8 bits": {"dtype": torch.float32, "state_dtype": "8bit"},
    "bfloat16 8 bits": {"dtype": torch.bfloat16, "state_dtype": "8bit"},
    "bfloat16 stochastic": {"dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 2**40 + 3},
    "bfloat16 stochastic 8 bits": {"dtype": torch.bfloat16, "stochastic_rounding": True, "state_dtype": "8bit"},
    "bfloat16 masters": {"dtype": torch.bfloat16, "master_weights": True},
    "bfloat16 masters 8 bits": {"dtype": torch.bfloat16, "master_weights": True, "state_dtype": "8bit"},
    "float16 masters": {"dtype": torch.float16, "master_weights": True},
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0},
    "lagged": {"schedule": "lagged"},
    "amsgrad": {"amsgrad": True},
    "cautious": {"cautious_decay": True, "maximize": True},
    "l2": {"decay": "l2", "weight_decay": 0.1, "betas": (0.4, 0.99)},
}
BACKWARDS = [(), (0,), (1, 0), (2, 1, 0)]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "reversed": lambda x: x.permute(BACKWARDS[x.dim()]).contiguous().permute(BACKWARDS[x.dim()]),
    "gapped": lambda x: torch.stack([x, x], dim=-1)[..., 0],
}


def numbers(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> Tensor:
    """Returns random numbers that are the same everywhere, as those of torch.randn are not. Rounded once, to 16 bits:
    float64 goes to float16 by way of float32 on x86-64 only."""
    whole = torch.randint(-(2**20), 2**20, shape, dtype=torch.int32)
    return (whole.float() * (scale * 2.0**-20)).to(dtype)


def stepped(layout: Callable[[Tensor], Tensor], dtype: torch.dtype, **options: Any) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    params = [nn.Parameter(layout(numbers(shape, 1.0, dtype))) for shape in SHAPES]
    optimizer = FusedAdamS(params, **{"lr": 1e-2, "weight_decay": 2e-3, **options}, backend="cpu")
    for step in range(STEPS):
        for index, param in enumerate(params):
            param.grad = layout(numbers(param.shape, 2.0 ** -(3 * (index % 3) + step), dtype))
        optimizer.step()
    yield "mean", optimizer.exp_avg_sq_mean
    yield "norm", optimizer.grad_norm
    for index, param in enumerate(params):
        for name, value in {"param": param.detach(), **optimizer.state[param]}.items():
            yield f"{tuple(SHAPES[index])} {name}", value.contiguous().clone()


def all_stepped() -> Results:
    eight_bit.LEAST_VECTOR = eight_bit.LEAST_NUMEL
    results = {}
    for storage, mode, layout in itertools.product(STORAGE, MODES, LAYOUTS):
        for name, value in stepped(LAYOUTS[layout], **STORAGE[storage], **MODES[mode]):
            results[f"{storage}, {mode}, {layout}: {name}"] = value
    return results


def write(path: Path) -> int:
    results = all_stepped()
    torch.save({"machine": platform.machine(), "stepped": results}, path)
    print(f"{path}: {platform.machine()}, torch {torch.__version__}, {len(results)} tensors of steps")
    return 0


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def apart(one: Tensor, other: Tensor) -> float:
    """Returns the rms difference, relative to the rms."""
    return float((one - other).square().mean().sqrt() / one.square().mean().sqrt())


def is_same(name: str, one: Tensor, other: Tensor) -> bool:
    """Returns whether all bits are the same. But the norm that a step of 8-bit moments reports without a pass of its
    own is summed in float32 by lanes, of which AVX-512 has more."""
    if "8 bits" in name and name.endswith("norm"):
        return apart(one, other) < 1e-6
    return torch.equal(bits(one), bits(other))


def compare(path: Path, other_path: Path) -> int:
    files = [torch.load(each, weights_only=True) for each in (path, other_path)]
    one, other = (file["stepped"] for file in files)
    assert one.keys() == other.keys()
    differing = [name for name in one if not is_same(name, one[name], other[name])]
    machines = " and ".join(file["machine"] for file in files)
    print(f"{machines}: of {len(one)} tensors that {STEPS} steps left, {len(differing)} differ in some bit")
    for name in differing[:SHOWN]:
        difference = apart(one[name].double(), other[name].double())
        print(f"  {name}: {int((one[name] != other[name]).sum())} of {one[name].numel()}, by {difference:.1e}")
    return int(bool(differing))


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.arm.results", description=__doc__)
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write", help="what is computed here")
    writing.add_argument("file", type=Path)
    writing.set_defaults(run=lambda options: write(options.file))
    comparing = commands.add_parser("compare", help="two files; exits with 1 if they differ")
    comparing.add_argument("files", type=Path, nargs=2)
    comparing.set_defaults(run=lambda options: compare(*options.files))
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())

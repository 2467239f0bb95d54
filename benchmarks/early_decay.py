"""What the paper's lambda acts like when training of the paper's own models begins, beside what FusedAdamS warns of.

A few steps bound all early ones. The schedule divides by the root of v^, and v^ keeps at least what these steps have
left in it, even if every later gradient were zero. The images are Fashion-MNIST's in the format of CIFAR, which the
paper has. Heads for 100 classes see 10 of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from benchmarks.conditions import OtherLoad, conditions, write_rows
from benchmarks.paper.data import load_images
from benchmarks.paper.experiments import CIFAR, LAMBDA1
from benchmarks.paper.models import IMAGE_MODELS
from benchmarks.paper.run import Run
from swd_fused import FusedAdamS
from swd_fused.decay.kinds import FAR_BEYOND_ADAMW
from swd_fused.decay.warning import EARLY_STEPS

CLASSES = {"cifar10": 10, "cifar100": 100}


def growth(steps: int, until: int = EARLY_STEPS, beta2: float = 0.999) -> float:
    """Returns by which factor the decay after `steps` can grow until a later step, whatever the gradients are."""
    return sqrt((1 - beta2**until) / (beta2 ** (until - steps) * (1 - beta2**steps)))


def early_decay(task: Run, steps: int, data: Path | None) -> dict[str, object]:
    """Trains with the paper's settings and returns what the decay acts like in AdamW's terms."""
    load = OtherLoad()
    images = load_images("fashion-mnist", data, torch.device("cpu"), limit=steps * task.batch_size)
    torch.manual_seed(0)
    net = IMAGE_MODELS[task.model](3, CLASSES[task.data], 32).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = FusedAdamS(net.parameters(), lr=1e-3, weight_decay=LAMBDA1)
    for batch, labels in images.train_batches(task.batch_size, torch.Generator().manual_seed(0), augment=False):
        optimizer.zero_grad()
        F.cross_entropy(net(F.pad(batch, (2, 2, 2, 2)).repeat(1, 3, 1, 1)), labels).backward()
        optimizer.step()
    metrics = optimizer.metrics()
    acts_like = metrics["effective_weight_decay/0"]
    return {
        "model": task.model,
        "parameters": sum(param.numel() for param in net.parameters()),
        "batch_size": task.batch_size,
        "weight_decay": LAMBDA1,
        "steps": steps,
        "rms_grad": f"{metrics['rms_grad']:.3g}",
        "acts_like": f"{acts_like:.3g}",
        f"at_most_in_{EARLY_STEPS}_steps": f"{acts_like * growth(steps):.3g}",
        **conditions(load),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.early_decay", description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with Fashion-MNIST; default: Debian's package")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "paper" / "early_decay.csv")
    options = parser.parse_args(arguments)
    rows = []
    for task in CIFAR:
        rows.append(early_decay(task, 5, options.data))
        print(", ".join(f"{name} {value}" for name, value in list(rows[-1].items())[:8]), flush=True)
        write_rows(options.out, rows)
    print(f"FusedAdamS warns of more than {FAR_BEYOND_ADAMW:g}.")


if __name__ == "__main__":
    main()

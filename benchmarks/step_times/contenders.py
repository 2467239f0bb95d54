"""Optimizers that are compared: each makes, from parameters that have gradients, a step that takes no arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.step_times.authors_loop import AuthorsLoop
from benchmarks.step_times.suites import Shape
from swd_fused import FusedAdamS
from swd_fused.state import eight_bit

Step = Callable[[], object]
Build = Callable[[Sequence[Tensor]], Step]

MAX_GRAD_NORM = 1.0

# Gradients of norm 1 have an rms of 1e-4 in the largest suites: this acts like 0.1 in AdamW there and like less in the
# small ones, so `max_decay` never binds.
SCHEDULED_WEIGHT_DECAY = 1e-5


@dataclass(frozen=True)
class Contender:
    """`bytes_per_element` counts reads and writes of large tensors, None where there are temporaries in blocks or
    lists whose traffic depends on the caches. `peer` is the contender that its time is divided by."""

    name: str
    backend: str
    bytes_per_element: float | None
    peer: str
    build: Build


def adamw(params: Sequence[Tensor], *, foreach: bool = False) -> Step:
    return torch.optim.AdamW(params, fused=not foreach, foreach=foreach).step


def with_clipping(build: Build) -> Build:
    def build_with_clipping(params: Sequence[Tensor]) -> Step:
        step = build(params)

        def clip_and_step() -> None:
            # It rewrites the gradients, so from the second call on their norm is the bound. It multiplies all the same.
            clip_grad_norm_(params, MAX_GRAD_NORM)
            step()

        return clip_and_step

    return build_with_clipping


def fused_adams(**options: Any) -> Build:
    return lambda params: FusedAdamS(params, weight_decay=SCHEDULED_WEIGHT_DECAY, **options).step


def peer_of(package: str, name: str) -> Build:
    """An optimizer of another package, which is imported when it takes part. torchao compiles its step, by shape, in
    the first steps: those that warm up."""

    def build(params: Sequence[Tensor]) -> Step:
        step: Step = getattr(import_module(package), name)(list(params), weight_decay=1e-2).step
        return step

    return build


torchao_adamw8bit = peer_of("torchao.optim", "AdamW8bit")
bitsandbytes_adamw8bit = peer_of("bitsandbytes.optim", "AdamW8bit")
flash_adamw = peer_of("flashoptim", "FlashAdamW")
apex_fused_adam = peer_of("apex.optimizers", "FusedAdam")


def authors_loop(params: Sequence[Tensor]) -> Step:
    return AuthorsLoop(params, weight_decay=SCHEDULED_WEIGHT_DECAY).step


PEER = "AdamW fused"
CLIPPED_PEER = "AdamW fused + clip_grad_norm_"
TORCHAO = "torchao AdamW8bit"


def contenders(kernels: str) -> tuple[Contender, ...]:
    """`kernels` is the backend with kernels of our own."""

    def ours(name: str, bytes_each: float | None, backend: str = kernels, **options: Any) -> Contender:
        peer = CLIPPED_PEER if "max_grad_norm" in options else PEER
        build = fused_adams(backend=backend, **options)
        return Contender(f"FusedAdamS {name} ({backend})", backend, bytes_each, peer, build)

    lagged: dict[str, Any] = {"schedule": "lagged"}
    clip: dict[str, Any] = {"max_grad_norm": MAX_GRAD_NORM}
    coded: dict[str, Any] = {"state_dtype": "8bit"}
    return (
        Contender(PEER, "fused", 28, PEER, adamw),
        ours("exact", 32),
        ours("lagged", 28, **lagged),
        # Parameters and gradients of 4 bytes, moments of 1 with 4 for each block of 256.
        ours("exact 8bit", 20.06, **coded),
        ours("lagged 8bit", 16.06, **lagged, **coded),
        Contender(CLIPPED_PEER, "fused", 40, CLIPPED_PEER, with_clipping(adamw)),
        ours("exact + clip", 32, **clip),
        ours("exact", None, "torch"),
        ours("lagged", None, "torch", **lagged),
        ours("exact + clip", None, "torch", **clip),
        *([Contender(TORCHAO, "compile", None, PEER, torchao_adamw8bit)] if find_spec("torchao") else ()),
        Contender("AdamW foreach", "foreach", None, PEER, lambda params: adamw(params, foreach=True)),
        # Eleven operations, of which each reads and writes whole tensors: 8+12 for m, 8+12 for v, 8+4 for the sum of
        # v^, 8 for the decay, 8+8+8 for the denominator, 16 for the update.
        Contender("authors' loop", "loop", 100, PEER, authors_loop),
    )


def gpu_peers() -> tuple[Contender, ...]:
    """Optimizers of other packages for GPUs, where they are installed. torchao's is among the contenders."""
    packages: dict[str, tuple[str, Build]] = {
        "apex FusedAdam": ("apex", apex_fused_adam),
        "bitsandbytes AdamW8bit": ("bitsandbytes", bitsandbytes_adamw8bit),
        "flashoptim FlashAdamW": ("flashoptim", flash_adamw),
    }
    return tuple(
        Contender(name, package, None, PEER, build) for name, (package, build) in packages.items() if find_spec(package)
    )


CONTENDERS = contenders("cpu")
GPU_CONTENDERS = contenders("triton")


def selected(texts: Sequence[str] | None, among: Sequence[Contender] = CONTENDERS) -> list[Contender]:
    """Returns those whose name contains one of the texts, and the peers that their ratios need; without texts, all."""
    if not texts:
        return list(among)
    chosen = [c for c in among if any(text.lower() in c.name.lower() for text in texts)]
    if not chosen:
        raise ValueError(f"No contender's name contains {' or '.join(texts)}: {', '.join(c.name for c in among)}")
    needed = {c.name for c in chosen} | {c.peer for c in chosen}
    return [c for c in among if c.name in needed]


def taking_part(among: Sequence[Contender], shapes: Sequence[Shape]) -> list[Contender]:
    """Returns those that differ for tensors of these shapes: 8-bit moments are for larger ones."""
    can_have_codes = any(eight_bit.fits(torch.empty(shape, device="meta")) for shape in shapes)
    return [c for c in among if can_have_codes or not (c.name.startswith("FusedAdamS") and "8bit" in c.name)]


def parameters(shapes: Sequence[Shape], seed: int = 0, device: str = "cpu") -> list[Tensor]:
    """Returns float32 parameters with gradients whose norm over all of them is 1, where clipping at 1 leaves it too.

    All contenders of a suite step the same ones, since ten copies of a large model would not fit into memory. Only the
    moments are each contender's own.
    """
    generator = torch.Generator(device).manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator, device=device)) for shape in shapes]
    rms = sum(param.numel() for param in params) ** -0.5
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device=device).mul_(rms)
    return list(params)

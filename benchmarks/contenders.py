"""What is compared: each contender makes, from parameters that have gradients, a step that takes no arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.authors_loop import AuthorsLoop
from benchmarks.suites import Shape
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


def fused_adams(
    schedule: str, backend: str, max_grad_norm: float | None = None, state_dtype: str | None = None
) -> Build:
    def build(params: Sequence[Tensor]) -> Step:
        return FusedAdamS(
            params,
            weight_decay=SCHEDULED_WEIGHT_DECAY,
            schedule=schedule,
            backend=backend,
            max_grad_norm=max_grad_norm,
            state_dtype=state_dtype,
        ).step

    return build


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
    return (
        Contender(PEER, "fused", 28, PEER, adamw),
        Contender(f"FusedAdamS exact ({kernels})", kernels, 32, PEER, fused_adams("exact", kernels)),
        Contender(f"FusedAdamS lagged ({kernels})", kernels, 28, PEER, fused_adams("lagged", kernels)),
        # Parameters and gradients of 4 bytes, moments of 1 with 4 for each block of 256.
        Contender(
            f"FusedAdamS exact 8bit ({kernels})", kernels, 20.06, PEER, fused_adams("exact", kernels, None, "8bit")
        ),
        Contender(
            f"FusedAdamS lagged 8bit ({kernels})", kernels, 16.06, PEER, fused_adams("lagged", kernels, None, "8bit")
        ),
        Contender(CLIPPED_PEER, "fused", 40, CLIPPED_PEER, with_clipping(adamw)),
        Contender(
            f"FusedAdamS exact + clip ({kernels})",
            kernels,
            32,
            CLIPPED_PEER,
            fused_adams("exact", kernels, MAX_GRAD_NORM),
        ),
        Contender("FusedAdamS exact (torch)", "torch", None, PEER, fused_adams("exact", "torch")),
        Contender("FusedAdamS lagged (torch)", "torch", None, PEER, fused_adams("lagged", "torch")),
        Contender(
            "FusedAdamS exact + clip (torch)", "torch", None, CLIPPED_PEER, fused_adams("exact", "torch", MAX_GRAD_NORM)
        ),
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
    """Those whose name contains one of the texts, and the peers that their ratios need. All if there are no texts."""
    if not texts:
        return list(among)
    chosen = [c for c in among if any(text.lower() in c.name.lower() for text in texts)]
    if not chosen:
        raise ValueError(f"No contender's name contains {' or '.join(texts)}: {', '.join(c.name for c in among)}")
    needed = {c.name for c in chosen} | {c.peer for c in chosen}
    return [c for c in among if c.name in needed]


def taking_part(among: Sequence[Contender], shapes: Sequence[Shape]) -> list[Contender]:
    """Those that differ for tensors of these shapes: 8-bit moments are for larger ones than some suites have."""
    can_have_codes = any(eight_bit.fits(torch.empty(shape, device="meta")) for shape in shapes)
    return [c for c in among if can_have_codes or not (c.name.startswith("FusedAdamS") and "8bit" in c.name)]


def parameters(shapes: Sequence[Shape], seed: int = 0, device: str = "cpu") -> list[Tensor]:
    """Float32 parameters with gradients whose norm over all of them is 1, where clipping at 1 leaves it too.

    All contenders of a suite step the same ones, since ten copies of a large model would not fit into memory. Only the
    moments are each contender's own.
    """
    generator = torch.Generator(device).manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator, device=device)) for shape in shapes]
    rms = sum(param.numel() for param in params) ** -0.5
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device=device).mul_(rms)
    return list(params)

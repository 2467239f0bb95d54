"""Optimizers that are compared, and the parameters that they step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from benchmarks.step_times.authors_loop import AuthorsLoop
from benchmarks.step_times.harness import Case, Row, Step, Times, quartiles
from benchmarks.step_times.suites import Shape, Suite
from swd_fused import FusedAdamS, FusedAdamW
from swd_fused.state import eight_bit

Params = Sequence[Tensor]
Make = Callable[[Params], Any]

MAX_GRAD_NORM = 1.0
EMA_DECAY = 0.999

# Gradients of norm 1 have an rms of 1e-4 in the largest suites: this acts like 0.1 in AdamW there and like less in the
# small ones, so `max_decay` never binds.
SCHEDULED_WEIGHT_DECAY = 1e-5

PEER = "AdamW fused"
CLIPPED_PEER = "AdamW fused + clip_grad_norm_"
AVERAGED_PEER = "AdamW fused + clip_grad_norm_ + _foreach_lerp_"
TORCHAO = "torchao AdamW8bit"
ALL_REDUCE = "all-reduce of 4 numbers"  # no step


@dataclass(frozen=True)
class Contender:
    """Makes optimizers. One may need clipping before its step, or averages of weights after it.

    `bytes_per_element` counts reads and writes of large tensors, None where there are temporaries in blocks or lists
    whose traffic depends on the caches. `peer` is the contender that its time is divided by.
    """

    name: str
    backend: str
    bytes_per_element: float | None
    peer: str
    make: Make
    clips_before: bool = False
    averages_after: bool = False

    def build(self, params: Params) -> Step:
        return self.step_of(self.make(params), params)

    def step_of(self, optimizer: Optimizer, params: Params) -> Step:
        if not self.clips_before:
            return optimizer.step
        averages = [param.detach().clone() for param in params] if self.averages_after else []

        @torch.no_grad()
        def clip_step_average() -> None:
            # It rewrites the gradients, so from the second call on their norm is the bound. It multiplies all the same.
            clip_grad_norm_(params, MAX_GRAD_NORM)
            optimizer.step()
            if averages:
                torch._foreach_lerp_(averages, list(params), 1 - EMA_DECAY)

        return clip_step_average


def adamw(params: Params, *, foreach: bool = False) -> AdamW:
    return AdamW(params, fused=not foreach, foreach=foreach)


def fused_adams(**options: Any) -> Make:
    return lambda params: FusedAdamS(params, weight_decay=SCHEDULED_WEIGHT_DECAY, **options)


def fused_adamw(**options: Any) -> Make:
    return lambda params: FusedAdamW(params, **options)


def peer_of(package: str, name: str) -> Make:
    """An optimizer of another package, which is imported when it takes part. torchao compiles its step, by shape, in
    the first steps: those that warm up."""
    return lambda params: getattr(import_module(package), name)(list(params), weight_decay=1e-2)


def contenders(kernels: str) -> Mapping[str, Contender]:
    """Returns the contenders by name. `kernels` is the backend with kernels of our own."""

    def ours(name: str, bytes_each: float | None, backend: str = kernels, **options: Any) -> Contender:
        peer = AVERAGED_PEER if "ema_decay" in options else CLIPPED_PEER if "max_grad_norm" in options else PEER
        own, make = ("AdamW", fused_adamw) if name.startswith("AdamW") else ("AdamS ", fused_adams)
        name = f"Fused{own}{name.removeprefix('AdamW')} ({backend})"
        return Contender(name, backend, bytes_each, peer, make(backend=backend, **options))

    lagged: dict[str, Any] = {"schedule": "lagged"}
    clip: dict[str, Any] = {"max_grad_norm": MAX_GRAD_NORM}
    coded: dict[str, Any] = {"state_dtype": "8bit"}
    torchao = Contender(TORCHAO, "compile", None, PEER, peer_of("torchao.optim", "AdamW8bit"))
    found = (
        Contender(PEER, "fused", 28, PEER, adamw),
        ours("exact", 32),
        ours("lagged", 28, **lagged),
        # Parameters and gradients of 4 bytes, moments of 1 with 4 for each block of 256.
        ours("exact 8bit", 20.06, **coded),
        ours("lagged 8bit", 16.06, **lagged, **coded),
        Contender(CLIPPED_PEER, "fused", 40, CLIPPED_PEER, adamw, clips_before=True),
        ours("exact + clip", 32, **clip),
        ours("exact + clip + outliers", 32, outliers="skip", **clip),
        ours("exact", None, "torch"),
        ours("lagged", None, "torch", **lagged),
        ours("exact + clip", None, "torch", **clip),
        # The average is read and written, and lerp_ reads the parameter once more.
        Contender(AVERAGED_PEER, "fused", 52, AVERAGED_PEER, adamw, clips_before=True, averages_after=True),
        ours("AdamW + clip + average", 40, **clip, ema_decay=EMA_DECAY),
        *((torchao,) if find_spec("torchao") else ()),
        Contender("AdamW foreach", "foreach", None, PEER, partial(adamw, foreach=True)),
        # Eleven operations, of which each reads and writes whole tensors: 8+12 for m, 8+12 for v, 8+4 for the sum of
        # v^, 8 for the decay, 8+8+8 for the denominator, 16 for the update.
        Contender("authors' loop", "loop", 100, PEER, partial(AuthorsLoop, weight_decay=SCHEDULED_WEIGHT_DECAY)),
    )
    return {contender.name: contender for contender in found}


def gpu_peers() -> list[Contender]:
    """Returns optimizers of other packages for GPUs, where they are installed. torchao's is among the contenders."""
    known = (
        ("apex", ".optimizers", "FusedAdam"),
        ("bitsandbytes", ".optim", "AdamW8bit"),
        ("flashoptim", "", "FlashAdamW"),
    )
    return [
        Contender(f"{package} {name}", package, None, PEER, peer_of(package + module, name))
        for package, module, name in known
        if find_spec(package)
    ]


CONTENDERS = contenders("cpu")
GPU_CONTENDERS = contenders("triton")


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


def case_of(name: str, suite: Suite, among: Sequence[Contender], **options: Any) -> Case:
    """Returns the case in which contenders step the same parameters of a suite's shapes."""
    title = f"{name}: {suite.elements:,} elements in {len(suite.shapes):,} tensors"
    columns: Row = {"suite": name, "elements": suite.elements, "tensors": len(suite.shapes)}
    peers = {contender.name: contender.peer for contender in among}
    options = {"title": title, "peers": peers, "repeats": suite.repeats, "columns": columns, **options}
    options.setdefault("work", partial(parameters, suite.shapes))
    return Case(contenders={contender.name: contender.build for contender in among}, **options)


def speeds(bytes_each: Mapping[str, float | None], elements: int, peak: float | None) -> Callable[[str, Times], Row]:
    """Returns what adds the rate of memory to a contender's row, and its share of the peak rate."""

    def rates(contender: str, times: Times) -> Row:
        moved, seconds = bytes_each[contender], quartiles(times[contender]).median
        speed = moved * elements / seconds / 1e9 if moved and seconds else None
        share = speed / peak if speed and peak else None
        return {"bytes_per_element": moved, "gb_per_s": speed, "peak_gb_per_s": peak, "share_of_peak": share}

    return rates

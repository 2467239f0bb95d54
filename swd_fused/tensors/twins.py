"""Host twins of parameters that are on a GPU: what a step on the CPU writes to, and the copies between the two."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swd_fused.options import Options
from swd_fused.tensors.transfer import is_fake

CPU = torch.device("cpu")

ALIGNMENT = 64  # bytes: a cache line

# torch rounds each allocation of pinned memory up to a power of two, and takes its time for it. So tensors share chunks
# of such lengths.
LARGEST_CHUNK, SMALLEST_CHUNK = 1 << 30, 1 << 12

# Gradients on their way to the host still take memory of the GPU. The host, which runs far ahead of a GPU, waits when
# they are more than this.
MOST_BYTES_IN_FLIGHT = 256 << 20


# Smaller tensors, biases and norms mostly, stay on the GPU with their state: there are many of them, each copy takes
# its time however little it copies, and together they are next to nothing.
LEAST_OFFLOADED = 1 << 14  # elements


# --- What is offloaded


def is_offloaded(param: Tensor, options: Options) -> bool:
    is_candidate = options.offload and param.is_cuda and param.numel() >= LEAST_OFFLOADED
    return is_candidate and not is_fake(param) and not param.is_inference()


def device_of_step(param: Tensor, options: Options) -> torch.device:
    """Returns where a parameter's state is, and its step is taken."""
    return CPU if is_offloaded(param, options) else param.device


def stand_in(param: Tensor, options: Options) -> Tensor:
    """Returns a tensor that looks like the one that is stepped for a parameter. Nobody reads it, so it takes no memory
    but addresses."""
    return torch.empty_like(param, device=CPU, requires_grad=False) if is_offloaded(param, options) else param


# --- Memory


def pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns host tensors that look like these, in a few chunks of pinned memory. Small ones fill the gaps."""
    sizes = list(map(aligned_bytes, tensors))
    left = sum(sizes)
    chunks: list[Chunk] = []
    made = {}
    for index in sorted(range(len(tensors)), key=sizes.__getitem__, reverse=True):
        size = sizes[index]
        chunk = next((chunk for chunk in chunks if chunk.room >= size), None)
        if chunk is None:
            chunk = Chunk(length_of_chunk(size, left))
            chunks.append(chunk)
        made[index] = chunk.cut(tensors[index])
        left -= size
    return [made[index] for index in range(len(tensors))]


def length_of_chunk(size: int, left: int) -> int:
    """Returns a power of two that holds the next tensor, and no more than what is left if it can be helped."""
    within = 1 << max(left, 1).bit_length() - 1
    return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, within), power_of_two_from(size))


def power_of_two_from(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def aligned_bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // ALIGNMENT) * ALIGNMENT


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides of a tensor, or of a copy of it where they leave gaps."""
    return torch.empty_like(tensor, device="meta").stride()


class Chunk:
    """A flat piece of pinned memory, from which tensors are cut."""

    def __init__(self, length: int) -> None:
        self._memory = torch.empty(length, dtype=torch.uint8, device=CPU, pin_memory=True)
        self._used = 0

    @property
    def room(self) -> int:
        return len(self._memory) - self._used

    def cut(self, like: Tensor) -> Tensor:
        """Returns a tensor with the shape, the dtype and, as far as they are dense, the strides of another one."""
        start, self._used = self._used, self._used + aligned_bytes(like)
        flat = self._memory[start : start + like.numel() * like.element_size()].view(like.dtype)
        return flat.as_strided(like.shape, dense_strides(like))

    def clear(self) -> None:
        """Gives all of it out again."""
        self._used = 0


# --- Copies


class Copies:
    """Copies between GPUs and pinned host memory, on streams of their own beside the computation."""

    def __init__(self) -> None:
        self._down: dict[torch.device, torch.cuda.Stream] = {}
        self._up: dict[torch.device, torch.cuda.Stream] = {}
        self._on_the_way: deque[tuple[torch.cuda.Event, int]] = deque()
        self._bytes_on_the_way = 0
        self._last_up: list[torch.cuda.Event] = []

    def to_host(self, *pairs: tuple[Tensor, Tensor]) -> torch.cuda.Event:
        """Starts to copy what the current stream computes: to each host tensor its value, all of one GPU. The event
        tells when they are there."""
        while self._on_the_way and self._bytes_on_the_way > MOST_BYTES_IN_FLIGHT:
            first, size = self._on_the_way.popleft()
            first.synchronize()
            self._bytes_on_the_way -= size
        device = pairs[0][1].device
        stream = stream_of(device, self._down)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for host, value in pairs:
                copy_as_one_piece(host, value)
                value.record_stream(stream)
            event = waited_for_event()
            event.record(stream)
        size = sum(value.numel() * value.element_size() for _, value in pairs)
        self._on_the_way.append((event, size))
        self._bytes_on_the_way += size
        return event

    def to_gpu(self, params: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        """Starts to copy twins back, after all that current streams do with the parameters."""
        for device in dict.fromkeys(param.device for param in params):
            stream = stream_of(device, self._up)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for param, host in zip(params, hosts, strict=True):
                    if param.device == device:
                        copy_as_one_piece(param, host)
                        param.record_stream(stream)

    def join(self) -> None:
        """Has current streams wait for what is copied to their GPUs."""
        self._last_up = []
        for device, stream in self._up.items():
            torch.cuda.current_stream(device).wait_stream(stream)
            self._last_up.append(stream.record_event())
        while self._on_the_way and self._on_the_way[0][0].query():  # type: ignore[no-untyped-call]
            self._bytes_on_the_way -= self._on_the_way.popleft()[1]

    def wait_for_last(self) -> None:
        """Waits until twins may be written to: those of the step before have been read."""
        for event in self._last_up:
            event.synchronize()
        self._last_up = []


def waited_for_event() -> torch.cuda.Event:
    """Returns an event for which a thread can wait without keeping a core busy."""
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event


def copy_as_one_piece(to: Tensor, value: Tensor) -> None:
    """Starts to copy memory as it lies, where both tensors lie in the same order without gaps, as they mostly do."""
    if to.stride() == value.stride() == dense_strides(value) and to.dtype == value.dtype:
        to, value = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in (to, value))
    to.copy_(value, non_blocking=True)


def stream_of(device: torch.device, streams: dict[torch.device, torch.cuda.Stream]) -> torch.cuda.Stream:
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]


# --- Twins


class Twin:
    """The host's copy of a parameter, and the parameter as it was when both were the same."""

    def __init__(self, host: Tensor, is_pinned: bool) -> None:
        self.host = host
        self.is_pinned = is_pinned
        self.seen: tuple[int, int] | None = None

    def fits(self, param: Tensor) -> bool:
        return self.host.shape == param.shape and self.host.dtype == param.dtype


class Twins:
    """The twins of an optimizer's parameters."""

    def __init__(self) -> None:
        self.copies = Copies()
        self._of: dict[Tensor, Twin] = {}
        self._stand_ins: dict[Tensor, Tensor] = {}  # for parameters that are stepped on the GPU

    def prepare(self, params: Iterable[Tensor], options: Options, state: Mapping[Any, Any]) -> list[torch.cuda.Event]:
        """Makes the twins that are missing, and drops those of parameters that are gone and have no state.

        Parameters that are frozen are never copied. They have a twin all the same, without memory, since all that a
        step is told of is on one device. Those with state have their values: masters may be made of them. The events
        tell when these are there.
        """
        params = [param for param in params if is_offloaded(param, options)]
        frozen = {
            id(param) for param in params if not (param.requires_grad or param.grad is not None or state.get(param))
        }
        new = [param for param in params if not self._is_ready(param, id(param) in frozen)]
        if not new and len(self._of) == len(params):
            return []
        trained = [param for param in new if id(param) not in frozen]
        self._of.update((param, Twin(stand_in(param, options), is_pinned=False)) for param in new)
        for param, host in zip(trained, pinned_like(trained), strict=True):
            self._of[param] = Twin(host, is_pinned=True)
        wanted = {id(param) for param in (*params, *state)}
        self._of = {param: twin for param, twin in self._of.items() if id(param) in wanted}
        followed = [self.follow(param) for param in trained if state.get(param)]
        return [event for event in followed if event is not None]

    def _is_ready(self, param: Tensor, is_frozen: bool) -> bool:
        twin = self._of.get(param)
        return twin is not None and twin.fits(param) and (twin.is_pinned or is_frozen)

    def stepped_for(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Returns the twins of parameters, and those that have none themselves."""
        return [param if (twin := self._of.get(param)) is None else twin.host for param in params]

    def on_host_for(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Returns the twins of parameters, those that are on the host themselves, and for all others tensors that take
        their places."""
        stepped = list(self.stepped_for(params))
        kept, self._stand_ins = self._stand_ins, {}
        for param in (param for param in stepped if not param.is_cpu):
            known = kept.get(param)
            if known is None or known.shape != param.shape or known.dtype != param.dtype:
                known = torch.empty_like(param, device=CPU, requires_grad=False)
            self._stand_ins[param] = known
        return [param if param.is_cpu else self._stand_ins[param] for param in stepped]

    def follow(self, param: Tensor) -> torch.cuda.Event | None:
        """Starts to copy a parameter to its twin if others have written to it. The event tells when it is there."""
        twin = self._of[param]
        if twin.seen == as_seen(param):
            return None
        twin.seen = as_seen(param)
        return self.copies.to_host((twin.host, param.detach()))

    def copy_back(self, params: Sequence[Tensor]) -> None:
        """Starts to copy what was stepped to the parameters."""
        self.copies.to_gpu([param.detach() for param in params], self.stepped_for(params))
        for param in params:
            self._of[param].seen = as_seen(param)

    def forget(self) -> None:
        """Has all twins follow their parameters anew, after some were stepped in vain."""
        for twin in self._of.values():
            twin.seen = None

    def written_since(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Returns the parameters that others have written to since their twins have followed them."""
        return [param for param in params if self._of[param].seen != as_seen(param)]


def as_seen(param: Tensor) -> tuple[int, int]:
    """Returns what another write to a parameter changes, and other memory."""
    return param.data_ptr(), param._version

"""Steps of offloaded parameters that overlap the backward pass: one thread steps what has arrived on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from swd_fused.step.release import ReleasedStep
from swd_fused.step.stepper import Groups, Stepper
from swd_fused.tensors.description import Description, State, StepInput
from swd_fused.tensors.twins import Chunk, Twins, aligned_bytes, power_of_two_from

# Gradients arrive in one slot while the next is stepped, and a third is ready when the host is late. A slot is stepped
# at once, so it is large enough that the host looks through the model a few times in a step, not for each tensor.
SLOTS = 3
SLOT_BYTES = 64 << 20


class Slot:
    """Pinned memory for gradients that are stepped together, and whose they are."""

    def __init__(self, length: int) -> None:
        self.chunk = Chunk(length)
        self.clear()

    def clear(self) -> None:
        self.chunk.clear()
        self.grads: dict[Tensor, Tensor] = {}
        self.arrivals: list[torch.cuda.Event] = []


class Slots:
    """The slots, which wait here until they are filled."""

    def __init__(self) -> None:
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self._made = 0

    def get(self, size: int) -> Slot:
        """Returns an empty slot with room for so many bytes. Waits until the worker has stepped one, if need be."""
        length = max(SLOT_BYTES, power_of_two_from(size))
        if self._made < SLOTS and self._free.empty():
            self._made += 1
            return Slot(length)
        slot = self._free.get()
        if slot.chunk.room < size:
            slot.chunk = Chunk(length)
        return slot

    def put(self, slot: Slot) -> None:
        slot.clear()
        self._free.put(slot)


class Part(NamedTuple):
    """The parameters that are stepped on the host, or those that are stepped on GPUs.

    Both have a list of as many as the groups have, since rounding at random depends on a parameter's place, and no
    tensor in common: two descriptions are kept, and what is not a part's own has neither state nor gradients.
    """

    params: list[Tensor]
    state: State


class OverlappedStep:
    """A step of twins that needs nothing of its own gradients, from the first of these to `optimizer.step()`.

    Hooks start the copies, of gradients to the host and of what was stepped to the GPU. The worker touches nothing but
    host memory, and waits for events. What stays on the GPU is stepped in the end.
    """

    def __init__(
        self,
        stepper: Stepper,
        twins: Twins,
        groups: Groups,
        params: list[Tensor],
        state: State,
        worker: ThreadPoolExecutor,
    ) -> None:
        """`params` are the groups', `state` is theirs, with twins in place of those that have one."""
        self._stepper, self._twins, self._groups = stepper, twins, groups
        self._number_of = {id(param): number for number, param in enumerate(params)}
        by_place = [
            {param: entry for param, entry in state.items() if param.is_cpu == is_cpu} for is_cpu in (True, False)
        ]
        self._on_host = Part(twins.on_host_for(params), by_place[0])
        self._on_gpu = Part(params, by_place[1])
        self._values = stepper.begin(groups)
        self._released = ReleasedStep(stepper.options, keeps_gradients=False)
        self._released.mean = self._mean()
        self._taken: set[int] = set()  # ids of parameters
        self._worker = worker
        self._slot: Slot | None = None
        self._jobs: list[Future[None]] = []
        self._has_failed = False
        self._stepped: deque[list[Tensor]] = deque()  # and not yet copied back

    @property
    def state(self) -> State:
        return {**self._on_host.state, **self._on_gpu.state}

    def _mean(self) -> Tensor:
        """Returns the mean that the step before has left, on the host."""
        parts = [
            self._stepper.described(self._inputs(part, {})) for part in (self._on_host, self._on_gpu) if part.state
        ]
        for part in parts:
            part.begin(self._values)
        sums = self._stepper.step_before.sums_of_parts(parts)
        for part in parts:
            part.end()
        return sums.mean(None, self._stepper.options.total_numel)

    def _inputs(self, part: Part, grads: Mapping[Tensor, Tensor]) -> StepInput:
        every: list[Tensor | None] = [None] * len(part.params)
        for param, grad in grads.items():
            every[self._number_of[id(param)]] = grad
        return self._stepper.inputs(self._groups, self._values, part.state, part.params, every)

    def has_taken(self, param: Tensor) -> bool:
        return id(param) in self._taken

    def take(self, param: Tensor, grad: Tensor, slots: Slots) -> None:
        """Starts to copy a gradient to the host. Called in the backward pass."""
        self._copy_back()
        size = aligned_bytes(grad)
        if self._slot is not None and self._slot.chunk.room < size:
            self._submit(slots)
        if self._slot is None:
            self._slot = slots.get(size)
        slot = self._slot
        followed = self._twins.follow(param)
        host = slot.chunk.cut(grad)
        arrived = self._twins.copies.to_host((host, grad))
        slot.arrivals += [arrived] if followed is None else [followed, arrived]
        slot.grads[param] = host
        self._taken.add(id(param))

    def drop_gradients(self) -> None:
        """Forgets gradients that are not on their way to be stepped."""
        if self._slot is not None:
            self._taken -= set(map(id, self._slot.grads))
            self._slot.clear()

    def abandon(self, slots: Slots) -> None:
        """Gives back the slot that was being filled."""
        if self._slot is not None:
            slots.put(self._slot)
            self._slot = None

    def end(self, rest: Mapping[Tensor, Tensor], slots: Slots) -> None:
        """Ends the step, after these gradients, which no hook has taken."""
        if self._slot is not None:
            self._submit(slots)
        self.wait()
        self._copy_back()
        for job in self._jobs:
            job.result()  # raises what the worker has
        description = self._update({param: grad for param, grad in rest.items() if grad.is_cpu})
        self._copy_back()
        on_gpu = {param: grad for param, grad in rest.items() if not grad.is_cpu}
        if on_gpu:
            description = self._released.update(self._stepper, self._values, self._inputs(self._on_gpu, on_gpu))
        self._released.end(self._stepper, self._groups, description)

    def wait(self) -> None:
        """Waits for the worker."""
        for job in self._jobs:
            job.exception()

    def _submit(self, slots: Slots) -> None:
        slot, self._slot = self._slot, None
        assert slot is not None, "there is one"
        self._jobs.append(self._worker.submit(self._step_slot, slot, slots))

    def _step_slot(self, slot: Slot, slots: Slots) -> None:
        """Steps what is in a slot, once it is there. The worker's work."""
        try:
            for event in slot.arrivals:
                event.synchronize()
            if not self._has_failed:
                self._update(slot.grads)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            slots.put(slot)

    @torch.no_grad()
    def _update(self, grads: Mapping[Tensor, Tensor]) -> Description:
        """Steps parameters on the host."""
        self._twins.copies.wait_for_last()
        description = self._released.update(self._stepper, self._values, self._inputs(self._on_host, grads))
        self._stepped.append([param for param in grads if param.is_cuda])
        return description

    def _copy_back(self) -> None:
        """Starts to copy what was stepped so far to the GPU. Not called by the worker, whose streams are others."""
        while self._stepped:
            params = self._stepped.popleft()
            written = self._twins.written_since(params)
            if written:
                raise RuntimeError(
                    f"A parameter of shape {tuple(written[0].shape)} was written to between its gradient and "
                    "optimizer.step(), with offload=True, which steps it meanwhile. Write to "
                    "parameters after step()."
                )
            self._twins.copy_back(params)

"""A bucket: tensors that are stepped together, as parallel lists, with the numbers that kernels need."""

from __future__ import annotations

import copy
from itertools import compress
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.checks import check_grads
from swd_fused.core.backend import Backend
from swd_fused.core.values import Hyper
from swd_fused.devices import graphs
from swd_fused.devices.transfer import HostCopy, can_be_read_later, from_host, is_fake, scalar_dtype
from swd_fused.distributed.sharding import Sharding, local_tensor
from swd_fused.options import Options
from swd_fused.state.eight_bit import CODES, block_numbers
from swd_fused.state.rounding import element_numbers
from swd_fused.state.storage import are_plain, as_real, columns_of

DEVICE, DTYPE = attrgetter("device"), attrgetter("dtype")

# Stands for the address of a missing gradient, in csrc/cpu/operands.h too. Not 0, which is the address of an empty
# gradient; and aligned, as gradients mostly are.
NO_GRAD = -16


class Entries(NamedTuple):
    """Holds parameters with the state that the optimizer owns and the state, staged, that a step needs.

    `Snapshot.commit` makes the two one; new state is in both lists. The columns are lists because an object for each of
    ten thousand parameters triggers the garbage collector, which took half of their first step.
    """

    numbers: list[int]  # among all parameters
    groups: list[int]
    params: list[Tensor]
    owned: list[dict[str, Any]]
    staged: list[dict[str, Any]]

    def at(self, places: list[int]) -> Entries:
        columns: Any = ([column[place] for place in places] for column in self)
        return Entries(*columns)


class BucketKey(NamedTuple):
    """Holds the properties that all tensors of a bucket share."""

    backend: Backend
    device: torch.device
    amsgrad: bool
    unused: frozenset[str]  # the columns of the state that a step leaves alone
    sharding: Sharding


class Bucket:
    """Holds the tensors of one device, backend and sharding as parallel lists.

    The lists have all parameters that have state. Parameters without a gradient take no part in a step: their place in
    `grads` is None. Complex tensors are views of real pairs, DTensors their local parts. For parameters whose indices
    are in `coded`, `state` has 8-bit codes of the moments, and their scales.

    `steps` is the state's own memory: each `state["step"]` is a view of one of its elements, so a thousand counters
    advance as one tensor. As a list of tensors they took longer than the update itself. Counters that a CUDA graph
    advances must stay where they are; then `steps` is a copy of them during a step. `sums` is a cache of the second
    moments' sums, never state.
    """

    hyper: Hyper  # set in each step
    plan: Any  # the backend's, see `backend.Plan`
    has_grad: Tensor  # a mask of `present`, on the device
    numel: int  # elements of tensors that have a gradient
    count: Tensor  # `numel` on the device
    written: list[Tensor]  # parameters with a gradient whose writes torch counts

    def __init__(self, key: BucketKey, entries: Entries, options: Options) -> None:
        self.backend, self.device, self.amsgrad, unused, self.sharding = key
        self.options = options
        self.numbers, self.group_indices, self._whole_params, owned, states = entries
        self.params = self._whole_params
        if not are_plain(self.params):
            self.params = [as_real(local_tensor(param)) for param in self._whole_params]
        self.is_fake = is_fake(self.params[0]) and not self.params[0].is_meta  # fake tensors have no addresses
        self.state = columns_of(states, unused)
        self.coded = [index for index, state in enumerate(states) if CODES["exp_avg_sq"] in state]
        self.follows_params = any(master.dtype == torch.float32 for master in self.state.masters)
        self._numels = [param.numel() for param in self.params]
        columns = (self.group_indices, self.numbers, self._numels)
        self.groups, self.tensor_ids, self.numels = from_host(
            torch.tensor(columns, dtype=torch.int64, device="cpu"), self.device
        ).unbind()
        self.element_numbers = [
            element_numbers(param, self.sharding) for param in self._whole_params if options.stochastic_rounding
        ]
        self.block_numbers = {index: block_numbers(self._whole_params[index], self.sharding) for index in self.coded}
        self._set_steps(states)
        self._param_versions = [-1] * len(states)  # not yet looked at
        self.grads: list[Tensor | None] = []
        self.grad_addresses: list[int] = []
        self.present: list[bool] = []  # whether each has a gradient
        self._is_mask_captured = False  # whether a CUDA graph is to fill in `has_grad`
        self.has_all_grads = self.has_some_grads = False
        self.has_stepped = False  # as far as that is known
        self._steps_copy: HostCopy | None = None
        self.sums: Tensor | None = None  # the sum of each tensor in `averaged`; None if it must be rebuilt
        if all(map(is_, owned, states)):  # all state is new, so zero
            self.sums = torch.zeros(len(states), dtype=scalar_dtype(self.device), device=self.device)

    def _set_steps(self, states: list[dict[str, Any]]) -> None:
        steps = [state["step"] for state in states]
        if set(map(DEVICE, steps)) != {self.device} or set(map(DTYPE, steps)) != {torch.float32}:
            steps = [step.to(self.device, torch.float32) for step in steps]
        self.steps = torch.stack(steps)
        self._elements_of_steps = list(self.steps.unbind())
        self.copies_steps = graphs.are_shared(steps)
        self._step_views = steps if self.copies_steps else self._elements_of_steps
        for state, view in zip(states, self._step_views, strict=True):
            state["step"] = view

    def take(self, grads: list[Tensor | None], addresses: list[int], present: list[bool]) -> None:
        """Takes up a step's gradients. `addresses` has `NO_GRAD` for those that are not `present`."""
        self.grads, self.grad_addresses = grads, addresses
        if present == self.present and not self._is_mask_captured:
            return
        # An upload in a capture has no values until the graph is replayed, so the next step uploads its own. The list
        # is copied, so that `Snapshot` does not recognise it and skip this method.
        self._is_mask_captured = graphs.is_capturing(self.device)
        self.present = present.copy() if self._is_mask_captured else present
        self.has_all_grads, self.has_some_grads = all(present), any(present)
        self.written = [param for param in compress(self.params, present) if not param.is_inference()]
        self.has_grad = from_host(torch.tensor(present, device="cpu"), self.device)
        self.numel = sum(compress(self._numels, present))
        self.count = torch.full((), self.numel, dtype=scalar_dtype(self.device), device=self.device)

    def check(self) -> None:
        """Raises unless gradients fit the local parts of parameters."""
        if self.params is not self._whole_params:  # others were checked before
            check_grads((param, grad) for param, grad in zip(self.params, self.grads, strict=True) if grad is not None)

    # --- For backends

    @property
    def averaged(self) -> list[Tensor]:
        """The second moments over which the schedule takes its mean, or their codes."""
        return self.state.max_exp_avg_sqs if self.amsgrad else self.state.exp_avg_sqs

    def known_sums(self) -> Tensor:
        """Returns the sum of each tensor in `averaged`, rebuilt from storage if `sums` is None."""
        if self.sums is None:
            self.sums = self.backend.exp_avg_sq_sums(self)
        return self.sums

    def allow_missing_sums(self) -> None:
        """Fills missing `sums` with zeros instead of rebuilding them, before an update that overwrites all of them."""
        if self.sums is None and self.has_all_grads:
            self.sums = torch.zeros_like(self.numels, dtype=scalar_dtype(self.device))

    @property
    def grads_or_params(self) -> list[Tensor]:
        """The gradients, with the parameter in place of a missing one."""
        return [param if grad is None else grad for param, grad in zip(self.params, self.grads, strict=True)]

    def count_writes(self) -> None:
        """Raises torch's counters of writes to parameters, for backends that write through addresses: by them autograd
        refuses a backward pass through weights that have changed since the forward pass.

        Parameters without a gradient are left out: during a backward pass autograd may still need them.
        """
        torch.autograd.graph.increment_version(self.written)

    # --- From step to step

    def begin(self) -> None:
        """Reads the step counts of CUDA graphs, and follows parameters that others have written to."""
        if self.copies_steps:
            torch._foreach_copy_(self._elements_of_steps, self._step_views)
        if self.follows_params:
            self._follow_params()

    def note_stream(self) -> None:
        """Keeps memory from being reused before this step has read it, on whatever stream the step is taken.

        A tensor's memory returns to the stream that it was made on. The tensors noted here are read by torch's
        operations, or by kernels through addresses only; launchers note the tensors that they are passed.
        """
        stream = torch.cuda.current_stream(self.device)
        read = self.steps, self.groups, self.tensor_ids, self.numels, self.has_grad, self.count, self.hyper.table
        for tensor in (*read, *self.plan.copies, self.sums):
            if tensor is not None:
                tensor.record_stream(stream)

    def write_steps(self) -> None:
        """Writes the step counts back to where a CUDA graph advances them, after a step that was begun."""
        if self.grads:
            torch._foreach_copy_(self._step_views, self._elements_of_steps)

    def for_capture(self) -> Bucket:
        """Returns a copy for a step that is captured in a CUDA graph, which must be kept as long as the graph is."""
        if not self.backend.is_capturable:
            raise RuntimeError(
                f'FusedAdamS got a step on the "{self.backend.description(self.device)}" backend in the capture of a '
                'CUDA graph, wanted backend="triton": other backends replace tensors from step to step, and a graph '
                "would go on with the first ones."
            )
        graphs.share_steps(self._step_views)
        captured = copy.copy(self)
        captured.plan = self.plan.for_capture()
        return captured

    def is_stepped_by_graphs(self) -> bool:
        """Returns whether a CUDA graph may have stepped some of the tensors since this bucket did."""
        return self.copies_steps or graphs.are_shared([self.steps])

    def find_whether_stepped(self) -> bool:
        """Returns whether any element is known to have taken a step. Does not wait for the device."""
        if self.has_stepped or is_fake(self.steps):
            return self.has_stepped
        if self.device.type == "cpu":
            self.has_stepped = bool(self._steps_of_elements().any())
        elif can_be_read_later(self.steps):
            self._steps_copy = self._steps_copy or HostCopy([self._steps_of_elements().amax()])
            values = self._steps_copy.arrived()
            if values is not None:
                self.has_stepped, self._steps_copy = values[0] > 0, None
        return self.has_stepped

    def note_step(self, may_have_been_skipped: bool) -> None:
        """Remembers that a step was taken, and the versions of the parameters that it has left."""
        if self.follows_params:
            self._accept_params()
        if not may_have_been_skipped and self.numel:
            self.has_stepped = True

    def _steps_of_elements(self) -> Tensor:
        """Returns the step counts, and 0 for empty tensors, which add nothing to a mean."""
        return self.steps * (self.numels > 0)

    def _follow_params(self) -> None:
        """Updates float32 masters after parameters were written to from outside, by loading a model for instance: a
        master that no longer rounds to its parameter takes its value. Those without a gradient follow later."""
        now = self._versions_of_params()
        if self._param_versions == now:
            return
        known = zip(self._param_versions, now, self.present, strict=True)
        for (seen, version, is_present), param, master in zip(known, self.params, self.state.masters, strict=True):
            if is_present and seen != version and master.dtype == torch.float32:
                master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
        self._accept_params()

    def _accept_params(self) -> None:
        """Records the versions of parameters that have a gradient: their masters round to them now."""
        known = zip(self._param_versions, self._versions_of_params(), self.present, strict=True)
        self._param_versions = [version if is_present else seen for seen, version, is_present in known]

    def _versions_of_params(self) -> list[int]:
        """Returns torch's counters of writes. A write to a DTensor counts on it or on its local part."""
        pairs = zip(self._whole_params, self.params, strict=True)
        return [0 if param.is_inference() else param._version + view._version for param, view in pairs]

"""Tensors that are stepped together: one bucket, and what is kept of it from step to step."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.distributed.sharding import Sharding, is_dtensor, local_grad, local_tensor
from swd_fused.options import Options
from swd_fused.schedule import Hyper, HyperRow, bias_corrections, scalar_dtype
from swd_fused.state.eight_bit import CODES, SCALES, STORED_DTYPES, block_numbers
from swd_fused.state.load import check_codes, check_state
from swd_fused.tensors import graphs
from swd_fused.tensors.element_numbers import element_numbers
from swd_fused.tensors.group_checks import check_grads
from swd_fused.tensors.transfer import HostCopy, can_be_read_later, from_host, is_fake

if TYPE_CHECKING:
    from swd_fused.backends import Backend

Group = Mapping[str, Any]


class Entry(NamedTuple):
    """A parameter and its state: the optimizer's own, and as a step needs it. `Arrangement.commit` makes them one."""

    number: int  # among all parameters
    group: int
    param: Tensor
    owned: dict[str, Any]
    staged: dict[str, Any]


class Bucket:
    """Tensors of one device, backend and sharding, as parallel lists. `max_exp_avg_sqs` and `masters` may be empty.

    Where a parameter is in `coded`, its places in `exp_avgs` and `exp_avg_sqs` hold 8-bit codes, whose scales are in
    `exp_avg_scales` and `exp_avg_sq_scales`; these hold empty tensors for the others, and are empty if there are none.

    It holds all parameters that have state. Those without a gradient take no part in a step: their place in `grads` is
    None. Complex tensors are here as views of real pairs, DTensors as their local part.

    `steps` is the state's own memory: each `state["step"]` is a view of one of its elements, so a thousand counters
    advance as one tensor. As a list of tensors they took longer than the update itself. Where a CUDA graph advances the
    counters they must stay where they are, and `steps` is a copy of them during a step. `sums` is a cache of the second
    moments' sums, never state.
    """

    def __init__(
        self,
        backend: Backend,
        amsgrad: bool,
        has_masters: bool,
        entries: list[Entry],
        options: Options,
        sharding: Sharding = (),
    ) -> None:
        self.backend = backend
        self.options = options
        self.amsgrad = amsgrad
        self.sharding = sharding
        self.numbers = [entry.number for entry in entries]
        self.group_indices = [entry.group for entry in entries]
        self._whole_params = [entry.param for entry in entries]
        self._dtypes = _dtypes(self._whole_params)
        self._has_views = any(is_dtensor(param) or param.is_complex() for param in self._whole_params)
        self._local_params = [local_tensor(param) for param in self._whole_params]
        self.params = [_as_real(param) for param in self._local_params]
        self._held: dict[str, Held] = {}
        self.coded = [index for index, entry in enumerate(entries) if CODES["exp_avg_sq"] in entry.staged]
        self.exp_avgs, self.exp_avg_sqs = self._moments("exp_avg", entries), self._moments("exp_avg_sq", entries)
        self.exp_avg_scales, self.exp_avg_sq_scales = (
            self._scales("exp_avg", entries),
            self._scales("exp_avg_sq", entries),
        )
        self.max_exp_avg_sqs = self._moments("max_exp_avg_sq", entries) if amsgrad else []
        self.masters = self._moments("master_param", entries) if has_masters else []
        self.device = self.params[0].device
        self.groups = from_host(torch.tensor(self.group_indices, device="cpu"), self.device)
        self.tensor_ids = from_host(torch.tensor(self.numbers, device="cpu"), self.device)
        self.element_numbers = [element_numbers(p, sharding) for p in self._whole_params if options.stochastic_rounding]
        self.block_numbers = {index: block_numbers(self._whole_params[index], sharding) for index in self.coded}
        self._numels = [param.numel() for param in self.params]
        self.numels = from_host(torch.tensor(self._numels, device="cpu"), self.device)
        steps = [entry.staged["step"].to(self.device, torch.float32) for entry in entries]
        self.steps = torch.stack(steps)
        self._elements_of_steps = list(self.steps.unbind())
        self._copies_steps = graphs.are_shared(steps)
        self._step_views = steps if self._copies_steps else self._elements_of_steps
        for entry, view in zip(entries, self._step_views, strict=True):
            entry.staged["step"] = view
        self._held["step"] = Held([entry.owned for entry in entries], self._step_views)
        self._whole_averaged = list(chain.from_iterable(self._held[key].tensors for key in self._keys_of_averaged()))
        self._local_averaged = list(map(local_tensor, self._whole_averaged)) if self._has_views else []
        self._counted_params = [param for param in self.params if not param.is_inference()]
        self._sums: Tensor | None = None
        self.note_versions()
        self._param_versions = [-1] * len(entries)  # not yet looked at
        self.grads: list[Tensor | None] = []
        self.has_all_grads = True
        self.has_grad: Tensor  # by tensor
        self.numel: int  # of tensors that have a gradient
        self.count: Tensor  # the same, on the device
        self._present: list[bool] = []
        self._has_stepped = False
        self._steps_copy: HostCopy | None = None
        self.plan: Any = None  # what else the backend keeps
        self._hyper: Hyper | None = None

    # --- What backends ask for

    @property
    def averaged(self) -> list[Tensor]:
        """The second moments whose mean is the schedule, or their codes."""
        return self.max_exp_avg_sqs if self.amsgrad else self.exp_avg_sqs

    @property
    def state_tensors(self) -> tuple[list[Tensor], ...]:
        """All that the state holds but steps, as lists of which some may be empty."""
        moments = self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs
        return *moments, self.masters, self.exp_avg_scales, self.exp_avg_sq_scales

    @property
    def sums(self) -> Tensor:
        """The sums of `averaged` by tensor, rebuilt from storage where they are not known."""
        if self._sums is None:
            self._sums = self.backend.exp_avg_sq_sums(self)
        return self._sums

    @sums.setter
    def sums(self, sums: Tensor) -> None:
        self._sums = sums

    def allow_missing_sums(self) -> None:
        """Saves the pass that would rebuild `sums`, before an update of all tensors that does not read them."""
        if self._sums is None and self.has_all_grads:
            self._sums = torch.zeros_like(self.numels, dtype=scalar_dtype(self.device))

    @property
    def present_grads(self) -> list[Tensor]:
        if self.has_all_grads:
            return self.grads  # type: ignore[return-value]
        return [grad for grad in self.grads if grad is not None]

    @property
    def grads_or_params(self) -> list[Tensor]:
        """Gradients, and in place of a missing one its parameter, which mostly has its dtype and strides."""
        if self.has_all_grads:
            return self.present_grads
        return [param if grad is None else grad for param, grad in zip(self.params, self.grads, strict=True)]

    @property
    def hyper(self) -> Hyper:
        assert self._hyper is not None, "begin comes first"
        return self._hyper

    def carried_sums(self, after_this_step: bool) -> Tensor:
        """Returns (sum, weight, count) as `Backend.carried` does, from the sums by tensor."""
        steps = self.steps + 1 if after_this_step else self.steps
        counted = self.has_grad if after_this_step else self.steps > 0
        bias_correction2 = bias_corrections(self.hyper, self.groups, steps)[1]
        beta2 = self.hyper.column("beta2")[self.groups] if after_this_step else torch.ones_like(bias_correction2)
        rows = [beta2 * self.sums / bias_correction2, (1 - beta2) * self.numels / bias_correction2, self.numels]
        return torch.where(counted, torch.stack([row.to(bias_correction2.dtype) for row in rows]), 0.0).sum(1)

    # --- From step to step

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
        """Whether a CUDA graph may have stepped some of the tensors since this bucket did."""
        return self._copies_steps or graphs.are_shared([self.steps])

    def is_current(self) -> bool:
        """Whether the state still holds these very tensors and nobody else has written to the second moments. A model
        that was converted, by `model.double()` for instance, has the same parameters but needs other state."""
        try:
            for key, held in self._held.items():
                if not held.is_current(key):
                    return False
            return (
                self._dtypes == _dtypes(self._whole_params)
                and (not self._has_views or self._views_are_current())
                and self._versions == self._moment_versions()
            )
        except KeyError:
            return False

    def second_moments_changed(self) -> bool:
        """Whether someone else has written to, replaced or deleted the moments that a lagged mean was taken of."""
        try:
            is_held = all(self._held[key].is_current(key) for key in self._keys_of_averaged())
            return not is_held or self._versions != self._moment_versions()
        except KeyError:
            return True

    def is_known_to_have_stepped(self) -> bool:
        """Whether any of its elements has taken a step, as far as that is known without waiting for the device."""
        if self._has_stepped or is_fake(self.steps):
            return self._has_stepped
        if self.device.type == "cpu":
            self._has_stepped = bool(self._steps_of_elements().any())
        elif can_be_read_later(self.steps):
            self._steps_copy = self._steps_copy or HostCopy([self._steps_of_elements().amax()])
            values = self._steps_copy.arrived()
            if values is not None:
                self._has_stepped, self._steps_copy = values[0] > 0, None
        return self._has_stepped

    def count_writes(self) -> None:
        """Advances torch's counters of writes to parameters, for backends that write through addresses.

        Not of those without a gradient: in a backward pass autograd may still need them, and would refuse to go on.
        """
        if self.has_all_grads:
            written = self._counted_params
        else:
            pairs = zip(self.params, self.grads, strict=True)
            written = [param for param, grad in pairs if grad is not None and not param.is_inference()]
        torch.autograd.graph.increment_version(written)

    def note_step(self, may_have_been_skipped: bool) -> None:
        """Remembers that a step was taken, and accepts the parameters as it has left them."""
        if self.masters:
            self._accept_params()
        if not may_have_been_skipped and self.numel:
            self._has_stepped = True

    def _steps_of_elements(self) -> Tensor:
        """Returns the step counts, and 0 for empty tensors, which add nothing to a mean."""
        return self.steps * (self.numels > 0)

    def begin(self, all_grads: Sequence[Tensor | None], rows: list[HyperRow], groups: Sequence[Group]) -> None:
        """Takes up this step's gradients and hyper-parameters. Writes to nothing that is the user's."""
        grads = list(all_grads) if len(all_grads) == len(self.numbers) else [all_grads[i] for i in self.numbers]
        if self._has_views:
            pairs = zip(self._whole_params, grads, strict=True)
            grads = [None if grad is None else _as_real(local_grad(param, grad)) for param, grad in pairs]
        self.has_all_grads = all(map(is_not, grads, repeat(None)))
        if self._copies_steps:
            torch._foreach_copy_(self._elements_of_steps, self._step_views)
        self.grads = grads
        if any(map(Tensor.is_neg, self.present_grads)):  # lazily negated: the memory has the other sign
            self.grads = [None if grad is None else grad.resolve_neg() for grad in grads]
        self._set_present([True] * len(grads) if self.has_all_grads else [grad is not None for grad in grads])
        self.set_hyper(rows, groups)

    def check(self) -> None:
        """Raises unless every tensor fits its parameter."""
        present = [(param, grad) for param, grad in zip(self.params, self.grads, strict=True) if grad is not None]
        check_grads([param for param, _ in present], [grad for _, grad in present])
        scales = self.exp_avg_scales, self.exp_avg_sq_scales
        others = [tensors for tensors in (self.max_exp_avg_sqs, self.masters) if tensors]
        for index, param in enumerate(self.params):
            tensors = [column[index] for column in (self.exp_avgs, self.exp_avg_sqs, *others)]
            is_coded = index in self.block_numbers
            check_state(param, tensors, [column[index] for column in scales] if is_coded else ())
            if is_coded:
                columns = self.exp_avgs, self.exp_avg_sqs, *scales
                check_codes(param, {name: column[index] for name, column in zip(STORED_DTYPES, columns, strict=True)})

    def end(self) -> None:
        """Lets go of the gradients: between steps they are the user's to free."""
        has_begun, self.grads = bool(self.grads), []
        if self._copies_steps and has_begun:
            torch._foreach_copy_(self._step_views, self._elements_of_steps)

    def follow_params(self) -> None:
        """Updates masters after someone has written to parameters, loading a model for instance: where a master no
        longer rounds to its parameter it takes the parameter's value. Those without a gradient follow later."""
        if not self.masters or self._param_versions == self._versions_of_params():
            return
        versions = zip(self._param_versions, self._versions_of_params(), self._present, strict=True)
        for (seen, version, is_present), param, master in zip(versions, self.params, self.masters, strict=True):
            if is_present and seen != version:
                master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
        self._accept_params()

    def note_versions(self) -> None:
        """Accepts the second moments as they are. To be called by whoever writes to them in a way that torch counts."""
        self._versions = self._moment_versions()

    def set_hyper(self, rows: list[HyperRow], groups: Sequence[Group]) -> None:
        if self._hyper is None or (self._hyper.numbers is not rows and self._hyper.numbers != rows):
            self._hyper = Hyper(rows, self.device)
        self._hyper.set_tensor_lrs(groups)

    def _set_present(self, present: list[bool]) -> None:
        if present == self._present:
            return
        self._present = present
        self.has_grad = from_host(torch.tensor(present, device="cpu"), self.device)
        self.numel = sum(numel for numel, is_present in zip(self._numels, present, strict=True) if is_present)
        self.count = torch.full((), self.numel, dtype=scalar_dtype(self.device), device=self.device)

    def _moments(self, key: str, entries: list[Entry]) -> list[Tensor]:
        if not self.coded or key not in CODES:
            return [_as_real(local_tensor(moment)) for moment in self._hold(key, entries)]
        coded = set(self.coded)
        moments = iter(self._hold(key, [entry for index, entry in enumerate(entries) if index not in coded]))
        codes = iter(self._hold(CODES[key], [entries[index] for index in self.coded]))
        in_order = [next(codes if index in coded else moments) for index in range(len(entries))]
        return [_as_real(local_tensor(tensor)) for tensor in in_order]

    def _scales(self, key: str, entries: list[Entry]) -> list[Tensor]:
        if not self.coded:
            return []
        scales = [torch.empty(0, device=param.device) for param in self.params]
        for index, tensor in zip(self.coded, self._hold(SCALES[key], [entries[i] for i in self.coded]), strict=True):
            scales[index] = local_tensor(tensor)
        return scales

    def _hold(self, key: str, entries: list[Entry]) -> list[Tensor]:
        """Returns these tensors of the state, and remembers them."""
        tensors = [entry.staged[key] for entry in entries]
        if tensors:
            self._held[key] = Held([entry.owned for entry in entries], tensors)
        return tensors

    def _keys_of_averaged(self) -> list[str]:
        keys = ("max_exp_avg_sq",) if self.amsgrad else ("exp_avg_sq", CODES["exp_avg_sq"], SCALES["exp_avg_sq"])
        return [key for key in keys if key in self._held]

    def _views_are_current(self) -> bool:
        """Whether parameters still are where the views of them point: sharding wrappers move them."""
        return all(map(is_, self._local_params, map(local_tensor, self._whole_params))) and all(
            param.data_ptr() == view.data_ptr() for param, view in zip(self._local_params, self.params, strict=True)
        )

    def _moment_versions(self) -> list[int]:
        return _versions(self._whole_averaged, self._local_averaged)

    def _accept_params(self) -> None:
        """Takes the parameters that have a gradient as they are for what their masters round to."""
        versions = zip(self._param_versions, self._versions_of_params(), self._present, strict=True)
        self._param_versions = [version if is_present else seen for seen, version, is_present in versions]

    def _versions_of_params(self) -> list[int]:
        return _versions(self._whole_params, self._local_params if self._has_views else ())


class Held(NamedTuple):
    """Tensors that the state holds under one key, and the states of their parameters."""

    states: list[dict[str, Any]]
    tensors: list[Tensor]

    def is_current(self, key: str) -> bool:
        return all(map(is_, self.tensors, map(itemgetter(key), self.states)))


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _dtypes(tensors: list[Tensor]) -> list[torch.dtype]:
    return list(map(attrgetter("dtype"), tensors))


def _versions(tensors: Sequence[Tensor], locals_: Sequence[Tensor]) -> list[int]:
    """Returns torch's counters of in-place changes. Those of a DTensor count on it or on its local part, depending on
    how it was written to: so both are added."""
    try:
        versions = [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors made in inference mode have none
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    return [sum(both) for both in zip(versions, _versions(locals_, ()), strict=True)] if locals_ else versions

"""Which tensors are stepped together, and what is kept of that from step to step."""

from __future__ import annotations

from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swd_fused import captures
from swd_fused.active import Active
from swd_fused.arguments import check_grads, check_state
from swd_fused.distributed.sharding import Sharding, is_dtensor, local_grad, local_tensor
from swd_fused.options import Options
from swd_fused.schedule import Hyper, bias_corrections, hyper_rows, scalar_dtype
from swd_fused.upload import upload

if TYPE_CHECKING:
    from swd_fused.backends import Backend


class Bucket:
    """Tensors of one device, backend and sharding, as parallel lists. `max_exp_avg_sqs` and `masters` may be empty.

    Complex tensors are here as views of real pairs, DTensors as what they have on this rank.

    `steps` is the state's own memory, since each `state["step"]` is a view of one of its elements: so a thousand
    counters advance as one tensor. As a list of tensors they took longer than the update itself. `sums` is a cache of
    the second moments' sums, never state.
    """

    def __init__(
        self,
        backend: Backend,
        amsgrad: bool,
        has_masters: bool,
        positions: list[int],
        active: Active,
        options: Options,
        sharding: Sharding = (),
    ) -> None:
        self.backend = backend
        self.options = options
        self.amsgrad = amsgrad
        self.sharding = sharding
        self.positions = positions
        self._whole_params = [active.params[i] for i in positions]
        self._dtypes = _dtypes(self._whole_params)
        self._has_views = any(is_dtensor(param) or param.is_complex() for param in self._whole_params)
        self._picks = self._has_views or len(positions) < len(active.params)
        self._states = [active.states[i] for i in positions]
        self._local_params = [local_tensor(param) for param in self._whole_params]
        self.params = [_as_real(param) for param in self._local_params]
        self._whole_moments: dict[str, list[Tensor]] = {}
        self.exp_avgs, self.exp_avg_sqs = self._moments("exp_avg"), self._moments("exp_avg_sq")
        self.max_exp_avg_sqs = self._moments("max_exp_avg_sq") if amsgrad else []
        self.masters = self._moments("master_param") if has_masters else []
        self.device = self.params[0].device
        self.group_indices = [active.group_indices[i] for i in positions]
        self.groups = upload(torch.tensor(self.group_indices, device="cpu"), self.device)
        self.numbers = [active.numbers[i] for i in positions]
        self.tensor_ids = upload(torch.tensor(self.numbers, device="cpu"), self.device)
        numels = [param.numel() for param in self.params]
        self.numel = sum(numels)
        self.numels = upload(torch.tensor(numels, device="cpu"), self.device)
        self.count = self.numels.sum(dtype=scalar_dtype(self.device))
        self._is_captured = captures.is_capturing(self.device)
        steps = [state["step"].to(self.device, torch.float32) for state in self._states]
        self.steps = torch.stack(steps)
        self._own_step_views = list(self.steps.unbind())
        # Step counts that a graph advances must stay where they are: `steps` is a copy of them for each step then.
        self._copies_steps = self._is_captured or captures.are_shared(steps)
        self._step_views = steps if self._copies_steps else self._own_step_views
        for state, view in zip(self._states, self._step_views, strict=True):
            state["step"] = view
        self._sums: Tensor | None = None
        self.note_versions()
        self._param_versions: list[int] = []  # not yet looked at
        self.grads: list[Tensor] = []
        self.grad_sum: Tensor | None = None  # sum of grad^2, by whichever pass is the first to read them
        self.plan: Any = None  # what else the backend keeps
        self._hyper: Hyper | None = None

    @property
    def moments(self) -> list[Tensor]:
        """All that a step writes to besides parameters and step counts."""
        return [*self.exp_avgs, *self.exp_avg_sqs, *self.max_exp_avg_sqs, *self.masters]

    @property
    def averaged(self) -> list[Tensor]:
        """The second moments whose mean is the schedule."""
        return self.max_exp_avg_sqs if self.amsgrad else self.exp_avg_sqs

    @property
    def sums(self) -> Tensor:
        if self._sums is None:
            self._sums = self.backend.exp_avg_sq_sums(self.averaged)
        return self._sums

    @sums.setter
    def sums(self, sums: Tensor) -> None:
        self._sums = sums

    def need_no_sums(self) -> None:
        """Where they are not there they need not be: saves a pass before an update that writes them anyway."""
        if self._sums is None:
            self._sums = torch.zeros_like(self.numels, dtype=scalar_dtype(self.device))

    def is_current(self) -> bool:
        """Whether the state still holds these very tensors and nobody else has written to the second moments. A model
        that was converted, by `model.double()` for instance, has the same parameters but needs other state."""
        try:
            return (
                self._dtypes == _dtypes(self._whole_params)
                and self._holds(self._step_views, "step")
                and all(self._holds(tensors, key) for key, tensors in self._whole_moments.items())
                and (not self._has_views or self._views_are_current())
                and self._versions == _versions(self.averaged)
            )
        except KeyError:
            return False

    def is_known_to_be_new(self) -> bool:
        """Whether all steps so far were skipped. A GPU would have to be waited for."""
        return self.device.type == "cpu" and not self.steps.any()

    def _holds(self, tensors: list[Tensor], key: str) -> bool:
        return all(map(is_, tensors, map(itemgetter(key), self._states)))

    def _views_are_current(self) -> bool:
        """Whether parameters still are where the views of them point: sharding wrappers move them."""
        return all(map(is_, self._local_params, map(local_tensor, self._whole_params))) and all(
            param.data_ptr() == view.data_ptr() for param, view in zip(self._local_params, self.params, strict=True)
        )

    def begin_step(self, grads: list[Tensor], param_groups: list[dict[str, Any]]) -> None:
        if self._picks:
            grads = [grads[i] for i in self.positions]
        if self._has_views:
            pairs = zip(self._whole_params, grads, strict=True)
            grads = [_as_real(local_grad(param, grad)) for param, grad in pairs]
        if any(map(Tensor.is_neg, grads)):  # lazily negated: what lies there has the other sign
            grads = [grad.resolve_neg() for grad in grads]
        if self.masters and self._param_versions != _versions(self.params):
            self._follow_params()
        self.grads = grads
        self.grad_sum = None
        self.prepare(param_groups)

    def prepare(self, param_groups: list[dict[str, Any]]) -> None:
        """Before `steps` and `hyper` are read, in a step of this bucket or in the next one."""
        self.set_hyper(param_groups)
        if captures.is_capturing(self.device):
            self._note_capture()
        if self._copies_steps:
            torch._foreach_copy_(self._own_step_views, self._step_views)

    def _note_capture(self) -> None:
        if not self.backend.is_capturable:
            raise RuntimeError(
                f'FusedAdamS got a step on the "{self.backend.description(self.device)}" backend in the capture of a '
                'CUDA graph, wanted backend="triton": other backends replace tensors from step to step, and a graph '
                "would go on with the first ones."
            )
        captures.share_steps(self._step_views)
        if not self._is_captured:
            captures.keep(self.groups, self.tensor_ids, self.numels, self.count, self.steps)

    def is_stepped_by_graphs(self) -> bool:
        """Whether a CUDA graph may have stepped some of the tensors since this bucket did."""
        return self._copies_steps or captures.are_shared([self.steps])

    def check(self) -> None:
        """That every tensor fits its parameter, before any is written to."""
        check_grads(self.params, self.grads)
        optional = [tensors for tensors in (self.max_exp_avg_sqs, self.masters) if tensors]
        check_state(self.params, [self.exp_avgs, self.exp_avg_sqs, *optional])

    def end_step(self) -> None:
        """Lets go of the gradients: between steps they are the user's to free."""
        began, self.grads = bool(self.grads), []
        if self._copies_steps and began:
            torch._foreach_copy_(self._step_views, self._own_step_views)
        if self.masters and began:
            self._param_versions = _versions(self.params)

    def _follow_params(self) -> None:
        """Someone has written to parameters, loading a model for instance: where a master no longer rounds to its
        parameter it takes the parameter's value."""
        check_state(self.params, [self.masters])
        for param, master in zip(self.params, self.masters, strict=True):
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))

    def note_versions(self) -> None:
        """To be called by whoever writes to the second moments in a way that torch counts."""
        self._versions = _versions(self.averaged)

    def set_hyper(self, param_groups: list[dict[str, Any]]) -> None:
        rows = hyper_rows(param_groups, self.options.decay, self.options.bias_correction)
        if self._hyper is None or self._hyper.is_captured or self._hyper.numbers != rows:
            self._hyper = Hyper(rows, self.device)
        elif captures.is_capturing(self.device):
            captures.keep(self._hyper)
        self._hyper.set_tensor_lrs(param_groups)

    def carried_sum(self) -> Tensor:
        """What the sum of v^ after this step will have of the steps before."""
        bias_correction2 = bias_corrections(self.hyper, self.groups, self.steps + 1)[1]
        return (self.hyper.column("beta2")[self.groups] * self.sums / bias_correction2).sum()

    @property
    def hyper(self) -> Hyper:
        assert self._hyper is not None, "begin_step comes first"
        return self._hyper

    def _moments(self, key: str) -> list[Tensor]:
        self._whole_moments[key] = [state[key] for state in self._states]
        return [_as_real(local_tensor(moment)) for moment in self._whole_moments[key]]


class Arrangement:
    """The buckets of a step, good for the next one as long as it has the same tensors in the same groups."""

    def __init__(self, active: Active, amsgrads: list[bool], buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._active = active._replace(grads=[])
        self._amsgrads = amsgrads

    def serves(self, active: Active, amsgrads: list[bool]) -> bool:
        return (
            self._amsgrads == amsgrads
            and self._active.group_indices == active.group_indices
            and all(map(is_, self._active.params, active.params))
            and all(map(is_, self._active.states, active.states))
            and all(bucket.is_current() for bucket in self.buckets)
        )


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _dtypes(tensors: list[Tensor]) -> list[torch.dtype]:
    return list(map(attrgetter("dtype"), tensors))


def _versions(tensors: list[Tensor]) -> list[int]:
    """torch's counters of in-place changes."""
    return [tensor._version for tensor in tensors]

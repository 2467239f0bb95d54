"""What one backend steps together, and what it hands to the next step."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from swd_fused.backends import Backend

BucketKey = tuple[str, torch.device, bool, bool]  # backend's name, device, amsgrad, complex


class Bucket:
    """Tensors with a gradient in this step: parallel lists, with the group that each comes from.

    Complex tensors are here as views of real pairs.
    """

    def __init__(self, key: BucketKey, backend: Backend) -> None:
        self.key = key
        _, self.device, self.amsgrad, self.is_complex = key
        self.backend = backend
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.exp_avgs: list[Tensor] = []
        self.exp_avg_sqs: list[Tensor] = []
        self.max_exp_avg_sqs: list[Tensor] = []
        self.group_indices: list[int] = []
        self.states: list[dict[str, Any]] = []

    def add(self, group_index: int, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        if self.is_complex:
            param, grad = torch.view_as_real(param), torch.view_as_real(grad.resolve_conj())
            exp_avg, exp_avg_sq = torch.view_as_real(exp_avg), torch.view_as_real(exp_avg_sq)
        self.group_indices.append(group_index)
        self.params.append(param)
        self.grads.append(grad)
        self.exp_avgs.append(exp_avg)
        self.exp_avg_sqs.append(exp_avg_sq)
        self.states.append(state)
        if self.amsgrad:
            max_exp_avg_sq = state["max_exp_avg_sq"]
            self.max_exp_avg_sqs.append(torch.view_as_real(max_exp_avg_sq) if self.is_complex else max_exp_avg_sq)

    @property
    def averaged(self) -> list[Tensor]:
        """The second moments whose mean is the schedule."""
        return self.max_exp_avg_sqs if self.amsgrad else self.exp_avg_sqs

    def carry(self, last: Carried | None) -> Carried:
        """What the last step left, if it still belongs to these very tensors, else the same from the state."""
        step_views = [state["step"] for state in self.states]
        if last is not None and last.belongs_to(self.averaged, step_views):
            return last
        steps = torch.stack([step.to(self.device, torch.float32) for step in step_views])
        step_views = list(steps.unbind())
        for state, view in zip(self.states, step_views, strict=True):
            state["step"] = view
        numels = [tensor.numel() for tensor in self.averaged]
        sums = self.backend.exp_avg_sq_sums(self.averaged)
        return Carried(steps, step_views, numels, self.averaged, sums, versions(self.averaged))


@dataclass(eq=False)
class Carried:
    """Caches, never state, and checked before they are used.

    But `steps` is the state's own memory, since each `state["step"]` is a view of one of its elements: so a thousand
    counters advance as one tensor. As a list of tensors they took longer than the update itself.
    """

    steps: Tensor
    step_views: list[Tensor]
    numels: list[int]
    averaged: list[Tensor]
    sums: Tensor
    versions: list[int]

    def belongs_to(self, averaged: list[Tensor], step_views: list[Tensor]) -> bool:
        return (
            len(self.averaged) == len(averaged)
            and all(map(is_, self.step_views, step_views))
            and all(map(is_, self.averaged, averaged))
            and self.versions == versions(averaged)
        )

    def advance(self, sums: Tensor) -> None:
        self.steps.add_(1)
        self.sums = sums
        self.versions = versions(self.averaged)


def versions(tensors: list[Tensor]) -> list[int]:
    """torch's counters of in-place changes: they tell when someone else wrote to a tensor."""
    return [tensor._version for tensor in tensors]

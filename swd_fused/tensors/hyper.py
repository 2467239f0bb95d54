"""Hyper-parameters of parameter groups: checked when one has changed, as rows, and as a table on each device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import c_double
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.options import GROUP_OPTIONS, Decay
from swd_fused.tensors import graphs, largest_lr
from swd_fused.tensors.group_checks import check_group, check_tensor_lr
from swd_fused.tensors.largest_lr import SO_FAR, TensorLr
from swd_fused.tensors.transfer import from_host, is_fake

Group = Mapping[str, Any]


# What nobody uses with AdamW, whose values are 0.01 to 0.3. The paper's 5e-4 acts like 1.2 at most when training of its
# models begins (benchmarks/early_decay.py), AdamW's 0.1 out of habit like 161 in a small language model.
FAR_BEYOND_ADAMW = 10.0

PARAMS = itemgetter("params")
NUMBERS = itemgetter("lr", "betas", "eps", "weight_decay", "max_decay")
SCHEDULED = {"lr", "betas"}  # what schedulers change

# Of groups: ours but process_group, and those that torch's schedulers and named parameters add.
USUAL_KEYS = {"params", "param_names", "initial_lr", *GROUP_OPTIONS} - {"process_group"}


def scalar_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class HyperRow(NamedTuple):
    """Holds the hyper-parameters of a parameter group. Of the three kinds of decay two are zero."""

    lr: float  # -1 stands for a tensor, which is not read here
    decay_lr: float  # what takes its place before the decay, see `largest_lr`; mostly lr itself
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # scheduled: the paper's
    max_decay: float
    sign: float  # -1 to maximize
    decoupled_decay: float  # AdamW's, or independent of the learning rate
    l2: float  # Adam's
    corrects_bias: float  # 1 or 0
    cautious: float  # 1 or 0: whether only weights decay that the update brings nearer to zero


BOTH_LRS = 2  # they come first


class GroupKind(NamedTuple):
    """Holds what decides which state and ranks the parameters of a group have."""

    size: int
    amsgrad: bool
    state_dtype: object
    cautious_decay: bool
    process_group: object


def hyper_row(group: Group, decay: Decay, check: bool = False) -> HyperRow:
    """Returns a group's row, after checking the group if it is FusedAdamS's own. Betas that are tensors are read."""
    lr, betas, eps, weight_decay, max_decay = NUMBERS(group)
    calibrated, maximize = group.get("adamw_weight_decay"), group["maximize"]
    bias_correction = group.get("bias_correction", True)
    # What groups mostly have is looked at here, since a scheduler changes some of it in each step.
    if check and not (
        group.keys() <= USUAL_KEYS
        and type(lr) is type(eps) is type(weight_decay) is type(max_decay) is float
        and type(betas) is tuple
        and len(betas) == 2
        and type(betas[0]) is type(betas[1]) is float
        and type(group["amsgrad"]) is type(maximize) is type(bias_correction) is bool
        and group["state_dtype"] is calibrated is None
        and 0 <= lr < math.inf
        and 0 <= eps < math.inf
        and 0 <= weight_decay < math.inf
        and 0 < max_decay <= 1
        and 0 <= betas[0] < 1
        and 0 <= betas[1] < 1
        and group["corrected_decay"] is group["cautious_decay"] is False
        and group["largest_lr"] is None
        and type(group[SO_FAR]) is float
        and 0 <= group[SO_FAR] < math.inf
        and group["calibration_steps"] == 0
        and group["decay"] == decay
    ):
        check_group(group, decay)
    beta1, beta2 = betas
    lr = -1.0 if isinstance(lr, Tensor) else max(0.0, lr)
    decay_lr = lr
    if lr >= 0 and largest_lr.is_followed(group, decay):
        decay_lr = largest_lr.decay_lr(lr, largest_lr.largest_lr(group, lr), decay)
    return HyperRow(
        lr,
        decay_lr,
        float(beta1),
        float(beta2),
        eps,
        weight_decay if decay == "scheduled" and calibrated is None else 0.0,
        max_decay,
        -1.0 if maximize else 1.0,
        # Users switch calibrated decay off as they do the schedule's.
        weight_decay if decay in ("decoupled", "independent") else calibrated or 0.0 if weight_decay > 0 else 0.0,
        weight_decay if decay == "l2" else 0.0,
        float(bias_correction),
        float(group.get("cautious_decay", False)),
    )


class Hyper:
    """Holds hyper-parameters as a table on a device, with a row for each parameter group."""

    def __init__(self, rows: Sequence[HyperRow], device: torch.device) -> None:
        self.rows = list(rows)
        self.table = torch.tensor(rows, dtype=scalar_dtype(device), device="cpu")
        self.is_captured = False
        self._memory: Any = None  # of the table, where the host may write to it
        if device.type != "cpu":
            self.is_captured = graphs.is_capturing(device)
            self.table = from_host(self.table, device)
        elif not is_fake(self.table):
            self._memory = (c_double * self.table.numel()).from_address(self.table.data_ptr())
        self._columns: dict[str, Tensor] = {}

    def follows(self, index: int, row: HyperRow) -> bool:
        """Writes another row to the table, or returns False: one on a GPU may still be read, by a graph for instance.

        A scheduler changes it in each step, and a new tensor took 25 us in a training loop.
        """
        if self._memory is None:
            return False
        self.rows[index] = row
        self._memory[index * len(row) : (index + 1) * len(row)] = row
        return True

    def column(self, name: str) -> Tensor:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = self.table[:, HyperRow._fields.index(name)]
        return column

    def set_lr(self, index: int, lr: Tensor, decay_lr: Tensor | None = None) -> None:
        """Copies a group's learning rate on the device: schedulers change it in place. Mostly decays use the same."""
        if lr.is_cpu and graphs.is_capturing(self.table.device):
            raise ValueError(
                f"step got lr={lr.item():g} as a CPU tensor in the capture of a CUDA graph, which could not follow its "
                'changes. Use lr=torch.tensor(..., device="cuda"), which the graph reads in each replay, or a number, '
                "which stays as it is in the graph."
            )
        both = lr.detach().reshape(()).clamp(min=0)
        if decay_lr is not None:
            both = torch.stack([both.to(decay_lr.dtype), decay_lr])
        is_waited_for = self.table.is_cpu  # else it would be read before it is there
        self.table[index, :BOTH_LRS].copy_(both, non_blocking=not is_waited_for)


class GroupValues:
    """Holds the hyper-parameters of all groups as one step reads them.

    Checked and made anew when any entry of a group has become another object, whatever its key: so an entry that is
    added to groups needs no mention here. Only the numbers that schedulers change are taken up without that.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], decay: Decay, of_step: bool = True) -> None:
        """`of_step` is whether a step is to be taken with them, in which learning rates count as being used."""
        self.rows: list[HyperRow] = []
        self.kinds: list[GroupKind] = []
        self.tensor_lrs: list[tuple[int, Tensor]] = []
        self.is_calibrating = False
        self._decay = decay
        self.follows_lrs = False  # whether `count_lrs` has anything to do
        self._followed: dict[int, TensorLr | None] = {}  # groups whose largest learning rate counts; None for a number
        self._tables: dict[torch.device, Hyper] = {}
        self._harmless_mean: float | None = None
        can_change = False  # without becoming another object
        for index, group in enumerate(groups):
            row = hyper_row(group, decay, check=True)
            self.rows.append(row)
            self.kinds.append(
                GroupKind(
                    len(group["params"]),
                    group["amsgrad"],
                    group["state_dtype"],
                    group["cautious_decay"],
                    group.get("process_group"),
                )
            )
            lr, betas = group["lr"], group["betas"]
            if isinstance(lr, Tensor):
                self.tensor_lrs.append((index, lr))
            if type(betas) is not tuple or isinstance(betas[0], Tensor) or isinstance(betas[1], Tensor):
                can_change = True
            if group.get("adamw_weight_decay") is not None:
                self.is_calibrating = True
        for index, group in enumerate(groups):
            if largest_lr.is_followed(group, decay):
                self._follow_lr(index, group, of_step)
        self._sizes = list(map(len, map(PARAMS, groups)))
        self._seen = [] if can_change else list(map(dict, groups))

    def _follow_lr(self, index: int, group: dict[str, Any], of_step: bool) -> None:
        """Has the largest learning rate of a group followed, from what all steps so far have left in it."""
        self.follows_lrs, followed = True, None
        if isinstance(group["lr"], Tensor):
            followed = TensorLr(group, self._decay, scalar_dtype(group["lr"].device))
        self._followed[index] = followed
        if of_step:
            if followed is None:
                largest_lr.begin_following(group, self.rows[index].lr)
            else:
                group[SO_FAR] = followed.so_far

    def count_lrs(self, groups: Sequence[dict[str, Any]]) -> None:
        """Counts the learning rates of a step that was taken."""
        for index, followed in self._followed.items():
            if followed is not None:
                followed.count()
            elif self.rows[index].lr > groups[index][SO_FAR]:
                groups[index][SO_FAR] = self.rows[index].lr
                if self._seen:
                    self._seen[index][SO_FAR] = groups[index][SO_FAR]

    def hold(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Returns whether these are the groups' values, after taking up what schedulers have changed."""
        if len(groups) != len(self._seen):
            return False
        for index, group in enumerate(groups):
            seen = self._seen[index]
            if len(group) != len(seen) or len(group["params"]) != self._sizes[index]:
                return False
            changed = [key for key, value in group.items() if seen.get(key, self) is not value]
            if changed and not (SCHEDULED.issuperset(changed) and self._follow(index, group)):
                return False
        return True

    def _follow(self, index: int, group: dict[str, Any]) -> bool:
        """Takes up other numbers, and returns whether they are plain and allowed. All else was checked before."""
        lr, betas, seen = group["lr"], group["betas"], self._seen[index]
        if not (
            type(lr) is type(seen["lr"]) is float
            and type(betas) is tuple
            and len(betas) == 2
            and type(betas[0]) is type(betas[1]) is float
            and 0 <= lr < math.inf
            and 0 <= betas[0] < 1
            and 0 <= betas[1] < 1
        ):
            return False
        if lr > seen["lr"]:
            self._harmless_mean = None
        seen["lr"], seen["betas"] = lr, betas
        decay_lr = lr
        if index in self._followed:
            decay_lr = largest_lr.decay_lr(lr, largest_lr.largest_lr(group, lr), self._decay)
        self.rows[index] = row = HyperRow(lr, decay_lr, *betas, *self.rows[index][4:])
        self._tables = {device: hyper for device, hyper in self._tables.items() if hyper.follows(index, row)}
        if index in self._followed:
            largest_lr.warn_of_larger(group, lr)
        return True

    @property
    def harmless_mean(self) -> float:
        """A mean of v^ from which on there is no decay to warn of."""
        if self._harmless_mean is None:
            decays = [row for row in self.rows if row.weight_decay]
            rms = max(
                (row.weight_decay * max(row.lr / row.max_decay, 1 / FAR_BEYOND_ADAMW) for row in decays), default=0.0
            )
            self._harmless_mean = math.inf if self.tensor_lrs else rms * rms
        return self._harmless_mean

    def check_tensor_lrs(self, groups: Sequence[dict[str, Any]]) -> None:
        """Checks learning rates that are tensors, which change in place. Those on a GPU are not waited for."""
        for _, lr in self.tensor_lrs:
            if lr.is_cpu and not is_fake(lr):
                check_tensor_lr(lr)
        for index, followed in self._followed.items():
            if followed is not None:
                followed.warn(groups[index])

    def on(self, device: torch.device) -> Hyper:
        """Returns the table on a device, with learning rates that are tensors as they are now."""
        hyper = self._tables.get(device)
        if hyper is None:
            hyper = Hyper(self.rows, device)
            if not hyper.is_captured:  # which is empty until the graph is replayed
                self._tables[device] = hyper
        for index, lr in self.tensor_lrs:
            followed = self._followed.get(index)
            hyper.set_lr(index, lr, None if followed is None else followed.decay_lr())
        return hyper

"""Parameter groups as numbers: a row for each group in a table on each device, and the check that these still hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_double
from operator import is_, itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from swd_fused.devices import graphs
from swd_fused.devices.transfer import from_host, is_fake, scalar_dtype
from swd_fused.distributed.sharding import ShardedOver
from swd_fused.options import check_group, check_tensor_lr

Group = dict[str, Any]
Groups = Sequence[Group]

PARAMS = itemgetter("params")
SCHEDULED = {"lr", "betas"}  # what schedulers change


class Decay(Protocol):
    """Turns the decay options of groups into numbers."""

    def columns(self, group: Mapping[str, Any], lr: float) -> dict[str, float]:
        """Returns the columns of a group's row that say how it decays. `lr` is -1 if it is a tensor."""

    def is_related(self, group: Group) -> bool:
        """Returns whether the decay of a group depends on the learning rates of earlier steps."""

    def decay_lr_on_device(self, group: Group) -> Tensor:
        """Returns `decay_lr` of such a group if its learning rate is a tensor."""

    def count_lr(self, group: Group) -> None:
        """Counts the learning rate of a step, taken or skipped."""

    def harmless_mean(self, columns: Mapping[str, float], lr: float) -> float:
        """Returns a mean of v^ at and above which the decay needs no warning."""


class HyperRow(NamedTuple):
    """Holds the hyper-parameters of a parameter group: the columns of the table that kernels read."""

    lr: float  # -1 stands for a tensor, which is not read here
    decay_lr: float  # multiplies the decay in place of lr, see `decay.kinds`; mostly equal to lr
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # scheduled: the paper's
    max_decay: float
    sign: float  # -1 to maximize
    decoupled_decay: float  # AdamW's, or independent of the learning rate
    l2: float  # Adam's
    corrects_bias: float  # 1 or 0
    cautious: float  # 1 or 0: whether weights that the update moves away from zero do not decay
    ema_decay: float  # of the averages of weights; 1, which would never change an average, if there are none
    ema_warmup: float  # 1 or 0


BOTH_LRS = 2  # the first two columns: lr and decay_lr


def hyper_row(group: Mapping[str, Any], decay: Decay) -> HyperRow:
    """Returns a group's row. Betas that are tensors are read."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    lr = -1.0 if isinstance(lr, Tensor) else max(0.0, lr)
    return HyperRow(
        lr=lr,
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        sign=-1.0 if group["maximize"] else 1.0,
        corrects_bias=float(group["bias_correction"]),
        ema_decay=1.0 if group["ema_decay"] is None else group["ema_decay"],
        ema_warmup=float(group["ema_warmup"]),
        **decay.columns(group, lr),
    )


class GroupKind(NamedTuple):
    """Holds the options that decide which state a group's parameters have, and over which ranks they are summed."""

    size: int
    amsgrad: bool
    state_dtype: object
    cautious_decay: bool
    process_group: object
    has_averages: bool


class Hyper:
    """Holds hyper-parameters as a table on a device, with a row for each parameter group."""

    def __init__(self, rows: Sequence[HyperRow], device: torch.device) -> None:
        self.rows = list(rows)
        self.table = torch.tensor(rows, dtype=scalar_dtype(device), device="cpu")
        self.is_captured = False
        self._memory: Any = None  # the table's memory, if the host may write to it
        if device.type != "cpu":
            self.is_captured = graphs.is_capturing(device)
            self.table = from_host(self.table, device)
        elif not is_fake(self.table):
            self._memory = (c_double * self.table.numel()).from_address(self.table.data_ptr())
        self._columns: dict[str, Tensor] = {}

    def follows(self, index: int, row: HyperRow) -> bool:
        """Replaces a row in place. Returns False for a table on a GPU, which a graph, for instance, may still read.

        Schedulers change a row in each step, and a new tensor took 25 us in a training loop.
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

    def bias_correction(self, beta: str, groups: Tensor, steps: Tensor) -> Tensor:
        """Returns 1 - beta^steps for each tensor, 1 where bias is not corrected. `groups` has each tensor's group."""
        return 1 - self.column("corrects_bias")[groups] * self.column(beta)[groups] ** steps

    def ema_weights(self, groups: Tensor, steps: Tensor) -> Tensor:
        """Returns for each tensor the weight of the new parameter in its average. `groups` has each tensor's group."""
        ema_decay, warms_up = self.column("ema_decay")[groups], self.column("ema_warmup")[groups] != 0
        steps = steps.to(ema_decay.dtype)
        return 1 - torch.where(warms_up, torch.minimum(ema_decay, (1 + steps) / (10 + steps)), ema_decay)

    def set_lr(self, index: int, lr: Tensor, decay_lr: Tensor | None = None) -> None:
        """Copies a learning rate that is a tensor to the table. `decay_lr` is None if the decay uses the same one."""
        if lr.is_cpu and graphs.is_capturing(self.table.device):
            raise ValueError(
                f"step got lr={lr.item():g} as a CPU tensor in the capture of a CUDA graph, which could not follow its "
                'changes. Use lr=torch.tensor(..., device="cuda"), which the graph reads in each replay, or a number, '
                "which stays as it is in the graph."
            )
        both = lr.detach().reshape(()).clamp(min=0)
        if decay_lr is not None:
            both = torch.stack([both.to(decay_lr.dtype), decay_lr])
        is_waited_for = self.table.is_cpu  # the host could read the table before an asynchronous copy arrives
        self.table[index, :BOTH_LRS].copy_(both, non_blocking=not is_waited_for)


class Seen(NamedTuple):
    """Holds a group as it was last read."""

    entries: Group
    rest: Callable[[Group], tuple[object, ...]]  # returns the entries that schedulers do not change
    size: int

    @staticmethod
    def of(group: Group) -> Seen:
        return Seen(dict(group), itemgetter(*(group.keys() - SCHEDULED)), len(group["params"]))


class GroupValues:
    """Holds the hyper-parameters of all groups as one step reads them.

    They are checked and made anew when any entry of a group has become another object, whatever its key, so new options
    need no mention here. Only the numbers that schedulers change are taken up in place.
    """

    def __init__(self, groups: Groups, kind: Any, decay: Decay) -> None:
        """`kind` is the optimizer's kind of decay, which groups must agree with."""
        self.rows: list[HyperRow] = []
        self.kinds: list[GroupKind] = []
        self.tensor_lrs: list[tuple[int, Tensor]] = []
        self._decay = decay
        self.related: dict[int, Group] = {}  # the groups whose decay depends on earlier learning rates
        self._tables: dict[torch.device, Hyper] = {}
        can_change = False  # whether betas may change without becoming another object
        for index, group in enumerate(groups):
            check_group(group, kind)
            over, averages = ShardedOver.checked(group.get("process_group")), group["ema_decay"] is not None
            asked = group["amsgrad"], group["state_dtype"], group["cautious_decay"]
            self.kinds.append(GroupKind(len(group["params"]), *asked, over, averages))
            lr, betas = group["lr"], group["betas"]
            if decay.is_related(group):
                self.related[index] = group
            if isinstance(lr, Tensor):
                self.tensor_lrs.append((index, lr))
            can_change |= type(betas) is not tuple or any(isinstance(beta, Tensor) for beta in betas)
            self.rows.append(hyper_row(group, self._decay))
        self.harmless_mean = self._harmless_mean()
        self._seen = [] if can_change else list(map(Seen.of, groups))

    def _harmless_mean(self) -> float:
        """Returns a mean of v^ at and above which no group's decay needs a warning."""
        return max((self._decay.harmless_mean(row._asdict(), row.lr) for row in self.rows), default=0.0)

    def hold(self, groups: Groups) -> bool:
        """Takes up new learning rates and betas. Returns False if the values must be made anew."""
        if len(groups) != len(self._seen):
            return False
        for index, group in enumerate(groups):
            seen, rest, size = self._seen[index]
            if len(group) != len(seen) or len(group["params"]) != size:
                return False
            try:
                if not all(map(is_, rest(group), rest(seen))):
                    return False
            except KeyError:  # a key was replaced by another one
                return False
            is_same = group["lr"] is seen["lr"] and group["betas"] is seen["betas"]
            if not (is_same or self._follow(index, group, seen)):
                return False
        return True

    def _follow(self, index: int, group: Group, seen: Group) -> bool:
        """Takes up a new learning rate and betas, or returns False if these are not plain, valid numbers."""
        lr, betas = group["lr"], group["betas"]
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
        row = HyperRow(lr, lr, *betas, *self.rows[index][4:])
        if index in self.related:
            row = hyper_row(group, self._decay)
        self.rows[index] = row
        for device in list(self._tables):
            if not self._tables[device].follows(index, row):
                del self._tables[device]
        if lr > seen["lr"]:
            self.harmless_mean = self._harmless_mean()
        # Last: if Ctrl-C comes before, the next step takes them up again.
        seen["lr"], seen["betas"] = lr, betas
        return True

    def begin(self) -> None:
        """Checks learning rates that are tensors on the CPU, since these change in place."""
        for _, lr in self.tensor_lrs:
            if lr.is_cpu and not is_fake(lr):
                check_tensor_lr(lr)

    def count_lrs(self, groups: Groups) -> None:
        """Counts the learning rates of a step, taken or skipped. Groups keep the largest if their decay needs it."""
        for index in self.related:
            self._decay.count_lr(groups[index])
            if self._seen:
                self._seen[index] = Seen.of(groups[index])

    def on(self, device: torch.device) -> Hyper:
        """Returns the table on a device, with the present values of learning rates that are tensors."""
        hyper = self._tables.get(device)
        if hyper is None:
            hyper = Hyper(self.rows, device)
            if not hyper.is_captured:  # a captured table is empty until the graph is replayed
                self._tables[device] = hyper
        for index, lr in self.tensor_lrs:
            group = self.related.get(index)
            hyper.set_lr(index, lr, None if group is None else self._decay.decay_lr_on_device(group))
        return hyper

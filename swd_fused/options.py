"""Two tables of options: one for options that parameter groups have, one for those of the whole optimizer.

An option is one line in a table: its name, its type with the check of its values, and its default. The options of the
decay are lines in decay/kinds.py. The constructor has each option as a keyword; everything else follows from the line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import torch
from torch import Tensor

from swd_fused.checks import FINITE, FLAG, Check, is_finite, is_number, is_one_float, is_whole, message, one_of
from swd_fused.decay.kinds import Decay, DecayOptions, check_combination
from swd_fused.devices.transfer import can_be_read

if TYPE_CHECKING:
    from swd_fused.optimizer import FusedAdamS

Schedule = Literal["exact", "lagged"]
BackendName = Literal["auto", "cpu", "triton", "torch"]
Outliers = Literal["skip", "clip"] | None

# How moments are stored: "8bit" holds for both of them, a dtype for the first one only.
StateDtype = torch.dtype | Literal["8bit"] | None
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, "8bit")

# The state's key of float32 master weights, the same as TransformerEngine's; and the key of the 16 bits that complete a
# bfloat16 parameter to its master.
MASTER = "master_param"
REMAINDER = "master_remainder"

# Schedulers that end at zero miss it by a rounding error: LinearLR gives -1.9e-20. Such values count as zero.
LR_ROUNDING = 1e-12


# --- Checks of single options


def is_beta(value: object) -> bool:
    """Returns whether a value can be a beta. Reads a tensor's value, as steps do later."""
    if isinstance(value, Tensor):
        return is_one_float(value) and 0 <= float(value.detach()) < 1
    return is_number(value) and 0 <= value < 1


ONE_IF_TENSOR = Check(
    lambda lr: not isinstance(lr, Tensor) or is_one_float(lr), "a number, or a floating-point tensor with one element"
)
FINITE_IF_NUMBER = FINITE._replace(accepts=lambda lr: isinstance(lr, Tensor) or is_finite(lr, -LR_ROUNDING))
BETAS = Check(
    lambda betas: isinstance(betas, (tuple, list)) and len(betas) == 2 and all(map(is_beta, betas)),
    "two numbers in [0, 1), or tensors with one",
    "Adam's usual choice is (0.9, 0.999).",
)
STATE_DTYPE = Check(lambda dtype: dtype is None or dtype in STATE_DTYPES, f"one of {STATE_DTYPES} or None")
SEED = Check(lambda seed: is_whole(seed) and seed < 2**63, "a whole number in [0, 2^63)")
MAX_GRAD_NORM = Check(lambda norm: is_number(norm) and norm > 0, "a number > 0", "Use None to switch clipping off.")
EMA_DECAY = Check(
    lambda decay: is_number(decay) and 0 <= decay <= 1, "a number in [0, 1]", "0.999 and 0.9999 are usual choices."
)
OUTLIER_SIGMA = Check(
    lambda sigma: is_finite(sigma) and sigma > 0,
    "a finite number > 0",
    "Use outliers=None to take all steps as they are.",
)
TOTAL_NUMEL = Check(lambda numel: is_whole(numel, 1), "a whole number > 0, or None to count elements")


# --- The tables


class GroupOptions(NamedTuple):
    """The options that a parameter group may set for itself, besides `DecayOptions`."""

    # No default: a group without it has the optimizer's process group. `ShardedOver` checks it.
    process_group: object
    lr: Annotated[float | Tensor, ONE_IF_TENSOR, FINITE_IF_NUMBER] = 1e-3
    betas: Annotated[tuple[float | Tensor, float | Tensor], BETAS] = (0.9, 0.999)
    eps: Annotated[float, FINITE] = 1e-8
    amsgrad: Annotated[bool, FLAG] = False
    maximize: Annotated[bool, FLAG] = False
    bias_correction: Annotated[bool, FLAG] = True
    state_dtype: Annotated[StateDtype, STATE_DTYPE] = None
    ema_decay: Annotated[float | None, EMA_DECAY.or_none()] = None  # None: weights are not averaged
    ema_warmup: Annotated[bool, FLAG] = False


class Options(NamedTuple):
    """The options that hold for the whole optimizer. A changed value makes a new object, which snapshots notice."""

    decay: Annotated[Decay, one_of(*get_args(Decay))] = "scheduled"
    master_weights: Annotated[bool, FLAG] = False
    stochastic_rounding: Annotated[bool, FLAG] = False  # of bfloat16 parameters; moments in 8 bits always are
    seed: Annotated[int, SEED] = 0
    skip_nonfinite: Annotated[bool, FLAG] = False
    max_grad_norm: Annotated[float | None, MAX_GRAD_NORM.or_none()] = None
    schedule: Annotated[Schedule, one_of(*get_args(Schedule))] = "exact"
    total_numel: Annotated[int | None, TOTAL_NUMEL.or_none()] = None
    backend: Annotated[BackendName, one_of(*get_args(BackendName))] = "auto"
    outliers: Annotated[Outliers, one_of("skip", "clip", None)] = None
    outlier_sigma: Annotated[float, OUTLIER_SIGMA] = 6.0

    def of_tensors(self) -> Options:
        """Returns the options with defaults for those on which the snapshot of a step's tensors does not depend."""
        return self._replace(max_grad_norm=None, schedule="exact", outliers=None, outlier_sigma=6.0)

    def master_key(self, param_dtype: torch.dtype) -> str | None:
        """Returns the key of a parameter's master in its state, None if it needs no master."""
        keys = {torch.bfloat16: REMAINDER, torch.float16: MASTER}
        return keys.get(param_dtype) if self.master_weights else None

    @property
    def needs_one_pass(self) -> bool:
        """Whether a step needs one pass only: its update depends on no sum over all gradients of this step."""
        return self.schedule == "lagged" or not self.uses_sums

    @property
    def uses_sums(self) -> bool:
        """Whether updates depend on sums over all elements: for the schedule's mean, or for the gradients' norm."""
        return self.decay == "scheduled" or self.needs_norm is not None

    @property
    def needs_norm(self) -> str | None:
        """The first option, as "name=value", that needs the norm of all gradients before the update."""
        values = {name: getattr(self, name) for name in ("max_grad_norm", "skip_nonfinite", "outliers")}
        return next((f"{name}={value!r}" for name, value in values.items() if value), None)

    @property
    def shared_sum(self) -> str:
        """The name of the quantity that needs sums over all ranks, for messages."""
        return "the schedule's mean" if self.decay == "scheduled" else "the gradients' norm"


class Compatibility(TypedDict, total=False):
    """Keywords that scripts written for other optimizers pass.

    torch's: `fused`, `foreach` and `capturable` have no effect, since the backend chooses the implementation and steps
    on the GPU can always be captured; `differentiable=True` is refused. apex's: `bias_correction=False` leaves out both
    bias corrections, `adam_w_mode=False` is `decay="l2"`. `offload=True`, of version 0.2, is refused.
    """

    fused: Annotated[bool | None, one_of(True, False, None)]
    foreach: Annotated[bool | None, one_of(True, False, None)]
    capturable: Annotated[bool, FLAG]
    differentiable: Annotated[bool, FLAG]
    bias_correction: Annotated[bool, FLAG]
    adam_w_mode: Annotated[bool, FLAG]
    offload: Annotated[bool, FLAG]


GROUP_OPTIONS = (*GroupOptions._fields, *DecayOptions._fields)
GROUP_DEFAULTS = {**GroupOptions._field_defaults, **DecayOptions._field_defaults}
GLOBAL_OPTIONS = (*Options._fields, "adam_w_mode")
KNOWN_KEYS = {"params", *GROUP_OPTIONS}

# Names that other libraries use for these options, which the comparison of spellings would not find.
MEANT = {"learning_rate": "lr", "wd": "weight_decay", "adamw_wd": "adamw_weight_decay", "ema": "ema_decay"}

# The similarity from which a name counts as a misspelling of another. "weigth_decay" and "maximise" reach it, but not
# "weight_decay_mult", "lr_scale" or "beta1", which scripts and frameworks keep in their groups.
MISSPELLING = 0.85


def checks_in(table: type) -> dict[str, tuple[Check, ...]]:
    hints = get_type_hints(table, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


GROUP_CHECKS = checks_in(GroupOptions) | checks_in(DecayOptions)
GLOBAL_CHECKS, COMPATIBILITY_CHECKS = checks_in(Options), checks_in(Compatibility)


def check_values(all_checks: Mapping[str, tuple[Check, ...]], values: Mapping[str, Any]) -> None:
    """Checks each value by itself."""
    for name, its_checks in all_checks.items():
        for check in its_checks:
            check.require(name, values[name])


# --- Checks of groups


def check_tensor_lr(lr: Tensor) -> None:
    """Raises if a learning rate that is a tensor is negative or not finite. Reads its value."""
    if not -LR_ROUNDING <= float(lr.detach()) < math.inf:
        raise ValueError(message("lr", lr, FINITE.wanted))


def check_group(group: Mapping[str, Any], decay: Decay) -> None:
    """Checks a group before a step, since schedulers and users may have set anything.

    Refuses options that hold for the whole optimizer, and names so close to an option that they must be misspelt.
    Unknown keys pass, as in torch: schedulers and frameworks keep their own in groups.
    """
    refuse_unsupported(group)
    other_decay = {"decay"} if group["decay"] != decay else set()
    for name in (group.keys() - KNOWN_KEYS) | other_decay:
        if name in GLOBAL_OPTIONS:
            raise ValueError(
                f"FusedAdamS got {name}={group[name]!r} in a parameter group, but it holds for all groups. Pass it to "
                f"the constructor: FusedAdamS(..., {name}={group[name]!r})."
            )
        if advice := _did_you_mean(name):
            raise ValueError(f"FusedAdamS got an unknown key {name}={group[name]!r} in a parameter group.{advice}")
    check_values(GROUP_CHECKS, group)
    if isinstance(group["lr"], Tensor) and can_be_read(group["lr"]):
        check_tensor_lr(group["lr"])
    check_combination(group)


@cache  # comparing names takes long, and a group is checked whenever one of its entries has changed
def _did_you_mean(name: str) -> str:
    close = get_close_matches(MEANT.get(name, str(name)), (*GROUP_OPTIONS, *GLOBAL_OPTIONS), n=1, cutoff=MISSPELLING)
    return f" Did you mean {close[0]}?" if close else ""


# --- Checks of arguments, and of options together


def refuse_unsupported(keywords: Mapping[str, Any]) -> None:
    if keywords.get("differentiable"):
        raise ValueError(
            "FusedAdamS got differentiable=True, but its kernels write in place and autograd cannot follow them. Use "
            "torch.optim.AdamW to differentiate through steps."
        )
    if keywords.get("offload"):
        raise ValueError(
            "FusedAdamS got offload=True, which is gone since 0.3. Use FSDP2, on one process too: fully_shard(model, "
            "offload_policy=CPUOffloadPolicy()); or DeepSpeed's offload_optimizer, which leaves parameters on the GPU, "
            "with swd_fused.distributed.deepspeed.follow(engine). See docs/memory.md."
        )


def asked_options(arguments: Mapping[str, Any]) -> Options:
    """Returns the options of the whole optimizer from the constructor's arguments."""
    for name, value in arguments["compatibility"].items():
        if name not in COMPATIBILITY_CHECKS:
            raise TypeError(f"FusedAdamS got an unknown argument {name}={value!r}.{_did_you_mean(name)}")
        for check in COMPATIBILITY_CHECKS[name]:
            check.require(name, value)
    refuse_unsupported(arguments["compatibility"])
    decay: Decay = arguments["decay"] if arguments.get("adam_w_mode", True) else "l2"
    return checked(Options(**{name: arguments[name] for name in Options._fields})._replace(decay=decay))


def checked(options: Options) -> Options:
    """Returns the options after checking each by itself and all in combination."""
    check_values(GLOBAL_CHECKS, options._asdict())
    if options.master_weights and options.stochastic_rounding:
        raise ValueError(
            "FusedAdamS got stochastic_rounding=True with master_weights=True: the masters keep what rounding would "
            "lose, so parameters are their nearest copies. Use one of the two."
        )
    useless_with = options.needs_norm if options.decay == "scheduled" else f"decay={options.decay!r}"
    if options.schedule == "lagged" and useless_with is not None:
        raise ValueError(
            f'FusedAdamS got schedule="lagged" with {useless_with}, with which it saves no pass over gradients. Use '
            'schedule="exact", which costs the same.'
        )
    return options


class Setting:
    """Makes an option of the whole optimizer an attribute. A value set there holds from the next step on."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: FusedAdamS, owner: type) -> Any:
        return self if optimizer is None else getattr(optimizer.options, self._name)

    def __set__(self, optimizer: FusedAdamS, value: Any) -> None:
        optimizer.use(checked(optimizer.options._replace(**{self._name: value})), self._name)


def unwrapped(optimizer: FusedAdamS) -> FusedAdamS:
    """Returns the optimizer within wrappers that pose as one: Lightning Fabric's is an instance of a subclass, but
    lacks the optimizer's attributes."""
    while "_stepper" not in optimizer.__dict__ and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer

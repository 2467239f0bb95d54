"""Options of users, and every check of them. Each message says what was got, what was wanted and what to do."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal, NamedTuple, TypedDict, TypeGuard, get_args

import torch

Schedule = Literal["exact", "lagged"]
Decay = Literal["scheduled", "decoupled", "l2"]
BackendName = Literal["auto", "cpu", "triton", "torch"]

# Of moments. "8bit" is for both of them, a dtype for the first one.
StateDtype = torch.dtype | Literal["8bit"] | None
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, "8bit")

# The key of master weights in the state; TransformerEngine's is the same.
MASTER = "master_param"

# What a parameter group may set for itself, and what holds for the optimizer as a whole. `decay` does, and is in the
# groups all the same: there it is saved beside the values that it gives a meaning.
GROUP_OPTIONS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "max_decay",
    "adamw_weight_decay",
    "calibration_steps",
    "bias_correction",
    "state_dtype",
    "process_group",
    "decay",
)
GLOBAL_OPTIONS = (
    "max_grad_norm",
    "schedule",
    "master_weights",
    "stochastic_rounding",
    "seed",
    "skip_nonfinite",
    "total_numel",
    "backend",
    "adam_w_mode",
    "set_grad_none",
)

# How alike two names are for one to be taken for a misspelling of the other: "weigth_decay" and "maximise" are, but
# not "weight_decay_mult", "lr_scale" or "beta1", which scripts and frameworks keep in their groups.
MISSPELLING = 0.85


class Options(NamedTuple):
    """The options that hold for the whole optimizer. Another value is another object, which descriptions notice."""

    decay: Decay = "scheduled"
    master_weights: bool = False
    stochastic_rounding: bool = False  # of bfloat16 parameters; moments in 8 bits always are
    seed: int = 0
    skip_nonfinite: bool = False
    max_grad_norm: float | None = None
    schedule: Schedule = "exact"
    total_numel: int | None = None
    backend: BackendName = "auto"

    def needs_master(self, param_dtype: torch.dtype) -> bool:
        return self.master_weights and param_dtype in (torch.bfloat16, torch.float16)

    @property
    def needs_one_pass(self) -> bool:
        """Whether nothing of this step's gradients must be known before the update."""
        return self.schedule == "lagged" or not self.uses_sums

    @property
    def uses_sums(self) -> bool:
        """Whether a step depends on anything but its own elements: the mean, or the norm of all gradients."""
        return self.decay == "scheduled" or self.max_grad_norm is not None or self.skip_nonfinite


# --- Keywords of other optimizers


class Compatibility(TypedDict, total=False):
    """Keywords that scripts written for other optimizers pass.

    torch's: `fused`, `foreach` and `capturable` have no effect, since the backend chooses the implementation and steps
    on the GPU can always be captured; `differentiable=True` is refused. apex's: `bias_correction=False` leaves out both
    bias corrections, `adam_w_mode=False` is `decay="l2"`, and `set_grad_none` is the default of `zero_grad`.
    """

    fused: bool | None
    foreach: bool | None
    capturable: bool
    differentiable: bool
    bias_correction: bool
    adam_w_mode: bool
    set_grad_none: bool


def check_compatibility(keywords: Compatibility) -> None:
    for name, value in keywords.items():
        if name not in Compatibility.__optional_keys__:
            known = (*GROUP_OPTIONS, *GLOBAL_OPTIONS, *Compatibility.__optional_keys__)
            advice = did_you_mean(name, known, cutoff=0.6)
            raise TypeError(f"FusedAdamS got an unknown argument {name}={value!r}.{advice}")
        may_be_none = name in ("fused", "foreach")
        if not (isinstance(value, bool) or (value is None and may_be_none)):
            raise ValueError(message(name, value, "True, False or None" if may_be_none else "True or False"))
    refuse_differentiable(keywords)


def refuse_differentiable(keywords: Mapping[str, Any]) -> None:
    if keywords.get("differentiable"):
        raise ValueError(
            "FusedAdamS got differentiable=True, but its kernels write in place and autograd cannot follow them. Use "
            "torch.optim.AdamW to differentiate through steps."
        )


# --- Options of the whole optimizer


def checked(options: Options) -> Options:
    """Returns the options after checking each of them, and all of them together."""
    for name, choices in (("decay", Decay), ("schedule", Schedule), ("backend", BackendName)):
        _check_one_of(name, getattr(options, name), get_args(choices))
    for name in ("master_weights", "stochastic_rounding", "skip_nonfinite"):
        if not isinstance(getattr(options, name), bool):
            raise ValueError(message(name, getattr(options, name), "True or False"))
    if options.master_weights and options.stochastic_rounding:
        raise ValueError(
            "FusedAdamS got stochastic_rounding=True with master_weights=True: the masters keep what rounding would "
            "lose, so parameters are their nearest copies. Use one of the two."
        )
    seed = options.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(message("seed", seed, "a whole number in [0, 2^63)"))
    max_grad_norm = options.max_grad_norm
    if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
        raise ValueError(message("max_grad_norm", max_grad_norm, "a number > 0", "Use None to switch clipping off."))
    total_numel = options.total_numel
    if total_numel is not None and (
        isinstance(total_numel, bool) or not isinstance(total_numel, int) or total_numel <= 0
    ):
        raise ValueError(message("total_numel", total_numel, "a whole number > 0, or None to count elements"))
    if options.schedule == "lagged":
        _check_lagged(options)
    return options


def _check_lagged(options: Options) -> None:
    if options.decay != "scheduled":
        raise ValueError(
            f'FusedAdamS got schedule="lagged" with decay={options.decay!r}, which uses no schedule and needs no '
            "second pass. Leave schedule out."
        )
    for name, value in (("max_grad_norm", options.max_grad_norm), ("skip_nonfinite", options.skip_nonfinite or None)):
        if value is not None:
            raise ValueError(
                f'FusedAdamS got schedule="lagged" with {name}={value!r}, which needs the norm of this step\'s '
                'gradients before the update, so the pass that "lagged" saves must run anyway. Use schedule="exact", '
                "which then costs the same."
            )


def kind_of_decay(decay: Decay, adam_w_mode: bool) -> Decay:
    """Returns the kind of decay that is asked for by our keyword and by apex's."""
    if not adam_w_mode and decay == "decoupled":
        raise ValueError(
            'FusedAdamS got adam_w_mode=False, which asks for L2 regularization, with decay="decoupled", which asks '
            "for AdamW's decay. Use one of the two."
        )
    return decay if adam_w_mode else "l2"


# --- What checks have in common


def _check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(message(name, value, f"one of {choices}"))


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (float, Real)) and not isinstance(value, bool) and not math.isnan(value)


def did_you_mean(name: str, known: Collection[str], cutoff: float = MISSPELLING) -> str:
    close = get_close_matches(str(name), known, n=1, cutoff=cutoff)
    return f" Did you mean {close[0]}?" if close else ""


def message(name: str, got: object, wanted: str, advice: str = "") -> str:
    return f"FusedAdamS got {name}={got!r}, wanted {wanted}. {advice}".rstrip()

"""Options of users, and every check of them. Each message says what was got, what was wanted and what to do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor

Schedule = Literal["exact", "lagged"]
Decay = Literal["scheduled", "decoupled", "l2"]
BackendName = Literal["auto", "cpu", "triton", "torch"]

# Of moments. "8bit" is for both of them, a dtype for the first one.
StateDtype = torch.dtype | Literal["8bit"] | None
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, "8bit")

# The key of master weights in the state; TransformerEngine's is the same.
MASTER = "master_param"

# What a parameter group may set for itself, and what holds for the optimizer as a whole.
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
)
GLOBAL_OPTIONS = (
    "max_grad_norm",
    "schedule",
    "decay",
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

# Schedulers that end at zero miss it by a rounding error: LinearLR gives -1.9e-20. Treated as zero.
LR_ROUNDING = 1e-12


class Options(NamedTuple):
    """The options that hold for the whole optimizer and concern its state and kernels."""

    decay: Decay = "scheduled"
    master_weights: bool = False
    stochastic_rounding: bool = False  # of bfloat16 parameters; moments in 8 bits always are
    seed: int = 0
    skip_nonfinite: bool = False

    def needs_master(self, param_dtype: torch.dtype) -> bool:
        return self.master_weights and param_dtype in (torch.bfloat16, torch.float16)


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
            advice = _did_you_mean(name, known, cutoff=0.6)
            raise TypeError(f"FusedAdamS got an unknown argument {name}={value!r}.{advice}")
        may_be_none = name in ("fused", "foreach")
        if not (isinstance(value, bool) or (value is None and may_be_none)):
            raise ValueError(_message(name, value, "True, False or None" if may_be_none else "True or False"))
    _refuse_differentiable(keywords)


def _refuse_differentiable(keywords: Mapping[str, Any]) -> None:
    if keywords.get("differentiable"):
        raise ValueError(
            "FusedAdamS got differentiable=True, but its kernels write in place and autograd cannot follow them. Use "
            "torch.optim.AdamW to differentiate through steps."
        )


# --- Options of the whole optimizer


def checked_options(
    decay: Decay,
    adam_w_mode: bool,
    master_weights: bool,
    stochastic_rounding: bool,
    seed: int,
    skip_nonfinite: bool,
) -> Options:
    _check_one_of("decay", decay, get_args(Decay))
    if not adam_w_mode and decay == "decoupled":
        raise ValueError(
            'FusedAdamS got adam_w_mode=False, which asks for L2 regularization, with decay="decoupled", which asks '
            "for AdamW's decay. Use one of the two."
        )
    flags = {
        "master_weights": master_weights,
        "stochastic_rounding": stochastic_rounding,
        "skip_nonfinite": skip_nonfinite,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(_message(name, flag, "True or False"))
    if master_weights and stochastic_rounding:
        raise ValueError(
            "FusedAdamS got stochastic_rounding=True with master_weights=True: the masters keep what rounding would "
            "lose, so parameters are their nearest copies. Use one of the two."
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(_message("seed", seed, "a whole number in [0, 2^63)"))
    return Options(decay if adam_w_mode else "l2", master_weights, stochastic_rounding, seed, skip_nonfinite)


def check_use_of_seed(options: Options, groups: Sequence[Mapping[str, Any]]) -> None:
    if options.seed and not options.stochastic_rounding and all(group["state_dtype"] != "8bit" for group in groups):
        raise ValueError(
            f'FusedAdamS got seed={options.seed} without stochastic_rounding=True or state_dtype="8bit", the options '
            "that use it."
        )


def check_schedule(schedule: Schedule, max_grad_norm: float | None, options: Options) -> None:
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm > 0):
        raise ValueError(_message("max_grad_norm", max_grad_norm, "a number > 0", "Use None to switch clipping off."))
    _check_one_of("schedule", schedule, get_args(Schedule))
    if schedule == "exact":
        return
    if options.decay != "scheduled":
        raise ValueError(
            f'FusedAdamS got schedule="lagged" with decay={options.decay!r}, which uses no schedule and needs no '
            "second pass. Leave schedule out."
        )
    for name, value in (("max_grad_norm", max_grad_norm), ("skip_nonfinite", options.skip_nonfinite or None)):
        if value is not None:
            raise ValueError(
                f'FusedAdamS got schedule="lagged" with {name}={value!r}, which needs the norm of this step\'s '
                'gradients before the update, so the pass that "lagged" saves must run anyway. Use schedule="exact", '
                "which then costs the same."
            )


def check_backend_name(backend: BackendName) -> None:
    _check_one_of("backend", backend, get_args(BackendName))


def check_total_numel(total_numel: object) -> None:
    if total_numel is not None and (
        isinstance(total_numel, bool) or not isinstance(total_numel, int) or total_numel <= 0
    ):
        raise ValueError(_message("total_numel", total_numel, "a whole number > 0, or None to count elements"))


def check_total_numel_covers(total_numel: int | None, local_numel: int) -> None:
    """Refuses a total that padding cannot explain: a padded buffer may be longer than the model, but not twice."""
    if total_numel is not None and 2 * total_numel < local_numel:
        raise ValueError(
            f"FusedAdamS got total_numel={total_numel}, but this rank alone has {local_numel} elements. Pass the "
            "number of elements of the whole model, on all ranks and without padding; or None to count them."
        )


def check_use_of_precision(options: Options, dtypes: Collection[torch.dtype]) -> None:
    """Refuses options for 16-bit parameters where there are none."""
    kinds = ", ".join(sorted({str(dtype) for dtype in dtypes}))
    if options.master_weights and not any(options.needs_master(dtype) for dtype in dtypes):
        raise ValueError(
            f"FusedAdamS got master_weights=True for parameters of {kinds}, wanted some of torch.bfloat16 or "
            "torch.float16: wider ones are their own masters. Convert the model first, or leave it out."
        )
    if options.stochastic_rounding and torch.bfloat16 not in dtypes:
        raise ValueError(
            f"FusedAdamS got stochastic_rounding=True for parameters of {kinds}, wanted some of torch.bfloat16, the "
            "only dtype that is rounded so. Convert the model first, or leave it out."
        )


# Below this a bfloat16 weight of 0.02 and more stays where it is: it resolves 1/256 of itself, and a step moves it by
# about lr. At 1e-5 it was 3% of a small language model's weights that moved.
SMALL_LR_FOR_BFLOAT16 = 1e-4


def warn_of_lost_updates(options: Options, groups: Sequence[Mapping[str, Any]]) -> None:
    """Warns, once for an optimizer, that bfloat16 parameters are too coarse for the learning rate."""
    if options.master_weights or options.stochastic_rounding:
        return
    for group in groups:
        lr = group["lr"]
        if isinstance(lr, Tensor) or not 0 < lr < SMALL_LR_FOR_BFLOAT16:
            continue
        if any(param.dtype == torch.bfloat16 for param in group["params"]):
            warnings.warn(
                f"FusedAdamS got bfloat16 parameters with lr={lr:g}: most updates are smaller than what bfloat16 "
                "resolves and will be lost. Use master_weights=True, which keeps float32 copies, or "
                "stochastic_rounding=True, which takes no memory.",
                stacklevel=4,
            )
            return


# --- Parameter groups


def check_new_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Checks a group that a user adds. Reads tensors, which may wait for a device.

    Unknown keys pass, as in torch: schedulers and frameworks keep their own in groups. Refused are options that hold
    for the whole optimizer, and names so close to an option that they must be misspelt.
    """
    for name, value in group.items():
        if name in GLOBAL_OPTIONS:
            raise ValueError(
                f"FusedAdamS got {name}={value!r} in a parameter group, but it holds for all groups. Pass it to the "
                f"constructor: FusedAdamS(..., {name}={value!r})."
            )
        if name not in GROUP_OPTIONS and (advice := _did_you_mean(name, (*GROUP_OPTIONS, *GLOBAL_OPTIONS))):
            raise ValueError(f"FusedAdamS got an unknown key {name}={value!r} in a parameter group.{advice}")
    _refuse_differentiable(group)
    whole = {**defaults, **group}
    check_group(whole)
    lr = whole["lr"]
    if isinstance(lr, Tensor) and not 0 <= float(lr) < math.inf:
        raise ValueError(_message("lr", lr, "a finite number >= 0"))
    betas = whole["betas"]
    if not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(_message("betas", betas, "two numbers in [0, 1)", "Adam's usual choice is (0.9, 0.999)."))
    if not isinstance(whole["bias_correction"], bool):
        raise ValueError(_message("bias_correction", whole["bias_correction"], "True or False"))
    check_state_dtype(whole["state_dtype"])


def check_state_dtype(state_dtype: object) -> None:
    if not any(state_dtype is known or state_dtype == known for known in (*STATE_DTYPES, None)):
        raise ValueError(_message("state_dtype", state_dtype, f"one of {STATE_DTYPES} or None"))


def check_group(group: Mapping[str, Any]) -> None:
    """Checks a group before a step, after which schedulers and users may have set anything.

    Betas of 1 and more pass, as they do in Adam: schedulers that cycle the momentum set what they are told to.
    """
    if _has_usual_numbers(group):
        return
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if name == "lr" and isinstance(value, Tensor):
            if value.numel() != 1 or not value.is_floating_point():
                raise ValueError(_message(name, value, "a number, or a floating-point tensor with one element"))
        elif not (_is_number(value) and (0 if name != "lr" else -LR_ROUNDING) <= value < math.inf):
            raise ValueError(_message(name, value, "a finite number >= 0"))
    betas = group["betas"]
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(map(_is_beta, betas))):
        raise ValueError(
            _message("betas", betas, "two numbers, or tensors with one", "Adam's usual choice is (0.9, 0.999).")
        )
    if not (_is_number(group["max_decay"]) and 0 < group["max_decay"] <= 1):
        raise ValueError(
            _message("max_decay", group["max_decay"], "a number in (0, 1]", "1 lets a step remove the whole weight.")
        )


def _has_usual_numbers(group: Mapping[str, Any]) -> bool:
    """Returns whether all are valid floats, which they mostly are: the only check that most steps make."""
    lr, betas, eps, weight_decay, max_decay = map(
        group.__getitem__, ("lr", "betas", "eps", "weight_decay", "max_decay")
    )
    return (
        type(lr) is type(eps) is type(weight_decay) is type(max_decay) is float
        and type(betas) is tuple
        and len(betas) == 2
        and type(betas[0]) is type(betas[1]) is float
        and 0 <= lr < math.inf
        and 0 <= eps < math.inf
        and 0 <= weight_decay < math.inf
        and 0 < max_decay <= 1
        and 0 <= betas[0] < 1
        and 0 <= betas[1] < 1
    )


def _is_beta(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return _is_number(value) and math.isfinite(value)  # type: ignore[arg-type]


def check_params(params: Sequence[Tensor]) -> None:
    """Checks the parameters of a new group."""
    if len(set(map(id, params))) < len(params):
        twice = next(param for i, param in enumerate(params) if any(param is other for other in params[:i]))
        raise ValueError(
            f"FusedAdamS got a parameter of shape {tuple(twice.shape)} twice in one group, wanted each once: kernels "
            "update all parameters at the same time. Remove duplicates: list(dict.fromkeys(params))."
        )
    for param in params:
        _check_param(param)


def _check_param(param: Tensor) -> None:
    if not (param.is_floating_point() or param.is_complex()):
        raise ValueError(
            f"FusedAdamS got a parameter of dtype {param.dtype} and shape {tuple(param.shape)}, wanted a "
            "floating-point or complex one. Leave it out of the parameter list, or convert it."
        )
    if param.is_conj() or param.is_neg():
        raise ValueError(
            f"FusedAdamS got a parameter of shape {tuple(param.shape)} that is a lazily conjugated or negated view, "
            "wanted one with values of its own. Make the parameter from tensor.resolve_conj().resolve_neg()."
        )
    strides = zip(param.stride(), param.shape, strict=True)
    if param.numel() and any(stride == 0 and size > 1 for stride, size in strides):
        raise ValueError(
            f"FusedAdamS got a parameter of shape {tuple(param.shape)} and strides {param.stride()}, wanted one whose "
            "elements have memory of their own. Make the parameter from tensor.contiguous(), or train what it expands."
        )


# --- Calls


def check_not_in_backward(grad_sumsq: object) -> None:
    """Refuses hooks that step each parameter as soon as its gradient is there: each would get its own schedule."""
    if grad_sumsq is None and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "FusedAdamS.step() was called within a backward pass, as register_post_accumulate_grad_hook does to free "
            "gradients early. The schedule is a mean over the whole model, which is not known before all gradients "
            'are. Call step() after backward(). To free gradients early use schedule="lagged", whose mean is known '
            "before, and call optimizer.release_gradients() once: it steps parameters in the backward pass, and "
            "step() after backward() ends the step."
        )


CALIBRATION_STEPS = 100


def checked_calibration(weight_decay: float | None, steps: int | None, decay: Decay) -> dict[str, Any]:
    """Returns `adamw_weight_decay` and `calibration_steps` as a group has them."""
    if weight_decay is None:
        if steps:
            raise ValueError(
                f"FusedAdamS got calibration_steps={steps!r} without adamw_weight_decay, which needs them."
            )
        return {"adamw_weight_decay": None, "calibration_steps": 0}
    if decay != "scheduled":
        raise ValueError(
            f"FusedAdamS got adamw_weight_decay={weight_decay!r} with decay={decay!r}, which is AdamW's or Adam's own. "
            "Use weight_decay."
        )
    if not (_is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ValueError(_message("adamw_weight_decay", weight_decay, "a finite number >= 0, as AdamW takes it"))
    steps = CALIBRATION_STEPS if steps is None else steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(_message("calibration_steps", steps, "a whole number > 0", "The warm-up is a good choice."))
    return {"adamw_weight_decay": weight_decay, "calibration_steps": steps}


def check_some_group_decays(adamw_weight_decay: float | None, groups: Sequence[Mapping[str, Any]]) -> None:
    if adamw_weight_decay and not any(group["adamw_weight_decay"] for group in groups):
        raise ValueError(
            f"FusedAdamS got adamw_weight_decay={adamw_weight_decay!r}, but all parameter groups have weight_decay=0 "
            "and so do not decay. Leave weight_decay out of the groups that should (in Hugging Face's "
            "TrainingArguments give it the same value as adamw_weight_decay)."
        )


def check_match_adamw(weight_decay: float, decay: Decay, groups: Sequence[Mapping[str, Any]]) -> None:
    if decay != "scheduled":
        raise ValueError(
            f"match_adamw is for the schedule, but this optimizer has decay={decay!r}. Set weight_decay instead."
        )
    if not (_is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ValueError(_message("match_adamw(weight_decay)", weight_decay, "a finite number >= 0, as AdamW takes it"))
    if weight_decay > 0 and not any(group["weight_decay"] > 0 for group in groups):
        raise ValueError(
            f"match_adamw got weight_decay={weight_decay!r}, but all parameter groups have weight_decay=0, and it "
            "changes only groups that decay. Give those that should decay a weight_decay > 0 first, of any size."
        )


GRAD_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_grads(params: list[Tensor], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        if grad.layout is not torch.strided:
            wanted = "a dense one. Use sparse=False in the embedding, or set param.grad = param.grad.to_dense()."
        elif grad.device != param.device:
            wanted = "one on the parameter's device. Move the model before the backward pass."
        elif grad.shape != param.shape:
            wanted = "one of the parameter's shape. Call zero_grad() after replacing a parameter's data."
        elif grad.dtype.to_real() not in GRAD_DTYPES:
            wanted = f"one of {', '.join(map(str, GRAD_DTYPES))} instead of {grad.dtype}. Convert it."
        else:
            continue
        raise RuntimeError(
            f"FusedAdamS got a {grad.layout} gradient of shape {tuple(grad.shape)} on {grad.device} for a parameter "
            f"of shape {tuple(param.shape)} on {param.device}, wanted {wanted}"
        )


def _check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(_message(name, value, f"one of {choices}"))


def _is_number(value: object) -> bool:
    return isinstance(value, (float, Real)) and not isinstance(value, bool) and not math.isnan(value)


def _did_you_mean(name: str, known: Collection[str], cutoff: float = MISSPELLING) -> str:
    close = get_close_matches(str(name), known, n=1, cutoff=cutoff)
    return f" Did you mean {close[0]}?" if close else ""


def _message(name: str, got: object, wanted: str, advice: str = "") -> str:
    return f"FusedAdamS got {name}={got!r}, wanted {wanted}. {advice}".rstrip()

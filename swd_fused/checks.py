"""Checks values, parameters and gradients. Each message says what was got, what was wanted and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor


class Check(NamedTuple):
    """Holds a condition on a value: a predicate, and the words of the message for values that it rejects."""

    accepts: Callable[[Any], bool]
    wanted: str
    advice: str = ""

    def require(self, name: str, value: object) -> None:
        if not self.accepts(value):
            raise ValueError(message(name, value, self.wanted, self.advice))

    def or_none(self) -> Check:
        """Returns a check that accepts None as well, with the same words."""
        return self._replace(accepts=lambda value: value is None or self.accepts(value))


def is_number(value: object) -> TypeGuard[float]:
    try:
        return isinstance(value, (float, Real)) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # an int too large for a float
        return False


def is_finite(value: object, least: float = 0) -> bool:
    return is_number(value) and least <= value < math.inf


def is_whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_one_float(value: Tensor) -> bool:
    return value.numel() == 1 and value.is_floating_point()


def one_of(*choices: object) -> Check:
    return Check(lambda value: value in choices, f"one of {choices}")


FLAG = Check(lambda value: isinstance(value, bool), "True or False")
FINITE = Check(is_finite, "a finite number >= 0")


def message(name: str, got: object, wanted: str, advice: str = "") -> str:
    return f"FusedAdamS got {name}={got!r}, wanted {wanted}. {advice}".rstrip()


# --- Tensors, before a step or when a group is added


def check_params(params: Sequence[Tensor], where: str) -> None:
    """Checks the parameters of a new group, or of all groups after someone has changed them."""
    if len(set(map(id, params))) < len(params):
        twice = next(param for i, param in enumerate(params) if any(param is other for other in params[:i]))
        raise ValueError(
            f"FusedAdamS got a parameter of shape {tuple(twice.shape)} twice in {where}, wanted each once: kernels "
            "update all parameters at the same time. Remove duplicates: list(dict.fromkeys(params))."
        )
    for param in params:
        if not param.is_floating_point() or param.is_neg() or 0 in param.stride():  # else it is an ordinary one
            _check_param(param)


def _check_param(param: Tensor) -> None:
    if not (param.is_floating_point() or param.is_complex()):
        problem = "is neither floating-point nor complex. Leave it out, or convert it"
    elif param.is_conj() or param.is_neg():
        problem = "is a lazily conjugated or negated view. Make it from tensor.resolve_conj().resolve_neg()"
    elif param.numel() and any(not step and size > 1 for step, size in zip(param.stride(), param.shape, strict=True)):
        problem = (
            "has elements that share memory. Make it from tensor.contiguous(), or train the tensor that it expands"
        )
    else:
        return
    raise ValueError(
        f"FusedAdamS got a parameter of {param.dtype}, shape {tuple(param.shape)} and strides {param.stride()}, which "
        f"{problem}."
    )


GRAD_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_grads(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Refuses gradients that do not fit their parameters."""
    for param, grad in pairs:
        fits = grad.layout is torch.strided and grad.device == param.device and grad.shape == param.shape
        if fits and (grad.dtype in GRAD_DTYPES or grad.dtype.to_real() in GRAD_DTYPES):
            continue
        if grad.layout is not torch.strided:
            wanted = "a dense one. Use sparse=False in the embedding, or set param.grad = param.grad.to_dense()."
        elif grad.device != param.device:
            wanted = "one on the parameter's device. Move the model before the backward pass."
        elif grad.shape != param.shape:
            wanted = "one of the parameter's shape. Call zero_grad() after replacing a parameter's data."
        else:
            wanted = f"one of {', '.join(map(str, GRAD_DTYPES))} instead of {grad.dtype}. Convert it."
        raise RuntimeError(
            f"FusedAdamS got a {grad.layout} gradient of shape {tuple(grad.shape)} on {grad.device} for a parameter "
            f"of shape {tuple(param.shape)} on {param.device}, wanted {wanted}"
        )


def check_memory(tensors: Iterable[Tensor]) -> None:
    """Raises if memory that a step needs was freed: kernels would read the address without noticing."""
    for tensor in tensors:
        if not tensor.is_meta and not tensor.data_ptr() and tensor.numel():
            raise RuntimeError(
                f"FusedAdamS got a tensor of shape {tuple(tensor.shape)} whose memory was freed, wanted one that still "
                "has its elements. Free gradients by setting param.grad = None, and parameters only after the step."
            )

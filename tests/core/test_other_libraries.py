"""Checkpoints of bitsandbytes and torchao: their moments become Adam's, decoded as these libraries decode them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swd_fused import FusedAdamW

KEY = "__bnb_optimizer_quant_state__"
SHAPE = (130, 33)  # 16 whole blocks of 256 and a shorter one


def loaded(state: dict[str, Any], shape: tuple[int, ...] = SHAPE, **options: Any) -> dict[str, Any]:
    param = torch.nn.Parameter(torch.ones(shape))
    optimizer = FusedAdamW([param], **options)
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {0: state}})
    param.grad = torch.ones(shape)
    found = {key: value.clone() for key, value in optimizer.state[param].items()}
    optimizer.step()
    return found


def coded(sign: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns codes, their map, the scale of each block, and the numbers that they stand for."""
    codes = torch.randint(0, 256, SHAPE, dtype=torch.uint8)
    code_map, scales = torch.linspace(min(0, sign), 1, 256), torch.rand(17)
    values = [code_map[code] * scales[i // 256] for i, code in enumerate(codes.flatten().tolist())]
    return codes, code_map, scales, torch.stack(values).reshape(SHAPE)


def test_bitsandbytes_in_32_bits() -> None:
    first, second = torch.randn(SHAPE), torch.rand(SHAPE)
    found = loaded({"step": 3, KEY: {"state1": first, "state2": second}})
    assert found.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert found["step"] == 3
    assert torch.equal(found["exp_avg"], first)
    assert torch.equal(found["exp_avg_sq"], second)


def test_bitsandbytes_in_8_bits() -> None:
    (codes1, map1, scales1, first), (codes2, map2, scales2, second) = coded(-1), coded(1)
    quantized = {"state1": codes1, "qmap1": map1, "absmax1": scales1}
    quantized |= {"state2": codes2, "qmap2": map2, "absmax2": scales2}
    found = loaded({"step": 3, KEY: quantized})
    assert torch.equal(found["exp_avg"], first)
    assert torch.equal(found["exp_avg_sq"], second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"absmax1": None}, "parameter 0 .* exp_avg is a .* tensor of torch.uint8"),
        ({"qmap2": torch.ones(16)}, "parameter 0 .* exp_avg_sq is a .* tensor of torch.uint8"),
        ({"state2": None}, "exp_avg_sq is a NoneType, wanted a dense tensor"),
        ({"state1": torch.zeros(5, dtype=torch.uint8)}, r"shape \(5,\), wanted .* shape \(130, 33\)"),
    ],
    ids=str,
)
def test_damaged_or_foreign_state_is_refused(change: dict[str, Any], message: str) -> None:
    codes, code_map, scales, _ = coded(1)
    whole = {f"{name}{i}": x for i in "12" for name, x in (("state", codes), ("qmap", code_map), ("absmax", scales))}
    with pytest.raises(ValueError, match=message):
        loaded({"step": 3, KEY: {**whole, **change}})
    with pytest.raises(ValueError, match="has step, __bnb_optimizer_quant_state__, but no exp_avg, exp_avg_sq"):
        loaded({"step": 3, KEY: {"state1": codes}})  # SGD's, for instance


class Quantized(Tensor):
    """Poses as a tensor of torchao, which has codes and knows only how to dequantize them."""

    __module__ = "torchao.optim.subclass_8bit"

    @staticmethod
    def __new__(cls, values: Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[no-any-return, attr-defined]

    def __init__(self, values: Tensor) -> None:
        self.values_ = values

    def dequantize(self, output_dtype: Any = None) -> Tensor:
        return self.values_

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@pytest.mark.parametrize("state_dtype", [None, "8bit"])
def test_torchao(state_dtype: Any) -> None:
    first, second = torch.randn(64, 128), torch.rand(64, 128)
    state = {"step": torch.tensor(3.0), "exp_avg": Quantized(first), "exp_avg_sq": Quantized(second)}
    found = loaded(state, (64, 128), state_dtype=state_dtype)
    if state_dtype is None:
        assert torch.equal(found["exp_avg"], first)
        assert torch.equal(found["exp_avg_sq"], second)

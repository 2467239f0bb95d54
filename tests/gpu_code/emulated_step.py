"""Steps of the compiled kernels in the emulator: tensors, tables and launches as the backend has them on a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swd_fused import decay
from swd_fused.backends.triton.kernels import kernels, tables
from swd_fused.backends.triton.kernels.coded_segments import ROW_ALIGNMENT
from swd_fused.backends.triton.launch import ALIGNMENT
from swd_fused.backends.triton.plan import segments_of
from swd_fused.core.bucket import NO_GRAD
from swd_fused.core.values import hyper_row
from swd_fused.options import GROUP_DEFAULTS
from swd_fused.state import eight_bit
from swd_fused.state.eight_bit import CODE_DTYPES, rows_and_columns, scales_shape
from swd_fused.state.rounding import rounding_start
from tests.masters_definition import master_of

from .offline_compiler import CONFIGURATIONS, submit
from .ptx_emulator import Kernel, Memory, Statistics
from .ptx_types import Array

DEFAULTS = GROUP_DEFAULTS

Change = Callable[[str], str]


class EmulatedStep:
    """A model whose parameters, gradients and moments are in the emulator's memory.

    `offset` is by how many elements every tensor is away from an aligned address. `change` edits the PTX.
    """

    def __init__(
        self,
        configuration: str,
        params: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        *,
        programs: int = 5,
        arch: int = 90,
        offset: int = 0,
        max_grad_norm: float = math.inf,
        rounding_seed: int = 0,
        skip_nonfinite: bool = False,
        change: Change | None = None,
    ) -> None:
        self.configuration, self.arch, self.programs, self.change = configuration, arch, programs, change
        self.dtypes, self.variant = CONFIGURATIONS[configuration]
        self.numels = [param.numel() for param in params]
        self.shapes = [tuple(param.shape) for param in params]
        self.coded = [i for i, param in enumerate(params) if self.variant.coded and eight_bit.fits(param)]
        moments = 3 if self.variant.amsgrad else 2
        self.memory = Memory(sum(self.numels) * 4 * 8 * (3 + moments) // 4 + len(params) * 8192 + (1 << 20))
        self.columns = {
            tables.TENSOR.param: self._put_all(params, self.dtypes.param, offset),
            tables.TENSOR.grad: self._put_all(params, self.dtypes.grad, offset, writable=False),
            tables.TENSOR.exp_avg: self._put_moments("exp_avg", offset),
            tables.TENSOR.exp_avg_sq: self._put_moments("exp_avg_sq", offset),
        }
        if self.variant.amsgrad:
            self.columns[tables.TENSOR.max_exp_avg_sq] = self._put_zeros(self.dtypes.averaged, offset)
        if self.variant.master:
            starts = [torch.zeros_like(param) for param in params] if self.dtypes.weight == torch.int16 else params
            self.columns[tables.TENSOR.master] = self._put_all(starts, self.dtypes.weight, offset)
        self.scales = {
            key: {i: self._put(np.zeros(scales_shape(self.shapes[i]), np.float32)) for i in self.coded}
            for key in ("exp_avg", "exp_avg_sq")
        }
        columns = {i: rows_and_columns(self.shapes[i])[1] for i in self.coded}
        self.segments, program_segments = segments_of(dict(enumerate(self.numels)), programs, columns)
        codecs = self._codec_table()
        rows = [{**DEFAULTS, **group} for group in groups]
        limits = [sum(self.numels), max_grad_norm, skip_nonfinite, rounding_start(rounding_seed)]
        self.at: dict[str, int] = {
            "results": self._put(np.zeros(3)),
            "sums": self._put(np.zeros((len(self.segments), tables.SUM.columns))),
            "slots": self._put(np.full((programs, tables.SLOT.columns), np.nan)),
            "steps": self._put(np.zeros(len(params), np.float32)),
            "counter": self._put(np.zeros(1, np.int32)),
            "last": self._put(np.zeros(2)),
            "tensors": codecs.nbytes
            + self._put(np.concatenate([codecs.ravel(), self._tensor_table(groups).ravel()]), writable=False),
            "segments": self._put(np.array(self.segments, np.int64), writable=False),
            "program_segments": self._put(np.array(program_segments, np.int32), writable=False),
            "hyper": self._put(np.array([hyper_row(row, decay) for row in rows]), writable=False),
            "limits": self._put(np.array(limits, np.float64), writable=False),
            "grad_scale": self._put(np.ones(1, np.float32)),
            "found_inf": self._put(np.zeros(1, np.float32)),
        }
        self.numbers = {"n_tensors": len(params), "n_segments": len(self.segments)}

    def set_grads(self, grads: Sequence[Tensor], grad_scale: float = 1.0, found_inf: bool = False) -> None:
        for address, grad in zip(self.columns[tables.TENSOR.grad], grads, strict=True):
            self._write(address, raw_bytes((grad.double() * grad_scale).to(self.dtypes.grad)))
        self._write(self.at["grad_scale"], np.array([grad_scale], np.float32).view(np.uint8))
        self._write(self.at["found_inf"], np.array([found_inf], np.float32).view(np.uint8))

    def set_steps(self, step: int) -> None:
        """From now on all tensors have taken so many."""
        self._write(self.at["steps"], np.full(len(self.numels), step, np.float32).view(np.uint8))

    def drop_grad(self, tensor: int) -> None:
        """From now on the tensor has none."""
        row = self.at["tensors"] + 8 * tensor * tables.TENSOR.columns
        self._write(row + 8 * tables.TENSOR.grad, np.array([NO_GRAD]).view(np.uint8))

    def launch(self, kernel: str, seed: int | None = None, find_races: bool = False) -> Statistics:
        binary = submit(kernel, self.arch, self.configuration).result()
        names = [name for name in getattr(kernels, kernel).arg_names if name in self.at or name in self.numbers]
        args = [self.numbers[name] if name in self.numbers else self.at[name] for name in names]
        code = emulated(kernel, self.arch, self.configuration, self.change)
        programs = 1 if kernel == "last_exp_avg_sq_sum_kernel" else self.programs
        return code.run(self.memory, args, programs, binary.threads, binary.shared_bytes, seed, find_races, 10**8)

    def get(self, name: str, dtype: type = np.float64) -> Array:
        """A whole table."""
        address = self.at[name]
        end = address + int(np.argmin(self.memory.access[address : address + (1 << 22)] != 0))
        return self.memory.bytes[address:end].view(dtype).copy()

    def sums(self) -> Array:
        """What the table has for the next step: not what a pass has found there for itself."""
        return self.get("sums").reshape(-1, tables.SUM.columns)[:, : tables.SUM.weight + 1].ravel()

    def forget_sums(self, segments: int | None = None) -> None:
        """Makes the sums of the first `segments`, or of all, out of date."""
        sums = self.get("sums").reshape(-1, tables.SUM.columns)
        sums[:segments, [tables.SUM.total, tables.SUM.step]] = -1.0
        self._write(self.at["sums"], sums.view(np.uint8).ravel())

    def tensors(self, column: int) -> list[Tensor]:
        """By a column of `tables.TENSOR`."""
        kinds = {
            tables.TENSOR.param: self.dtypes.param,
            tables.TENSOR.exp_avg: self.dtypes.exp_avg,
            tables.TENSOR.exp_avg_sq: self.dtypes.exp_avg_sq,
            tables.TENSOR.max_exp_avg_sq: self.dtypes.averaged,
            tables.TENSOR.master: self.dtypes.weight,
        }
        codes = {tables.TENSOR.exp_avg: torch.int8, tables.TENSOR.exp_avg_sq: torch.uint8}
        dtypes = [
            codes.get(column, kinds[column]) if i in self.coded else kinds[column] for i in range(len(self.numels))
        ]
        return [
            torch.tensor(self.memory.bytes[at : at + n * dtype.itemsize]).view(dtype)
            if n
            else torch.empty(0, dtype=dtype)
            for at, n, dtype in zip(self.columns[column], self.numels, dtypes, strict=True)
        ]

    def scales_of(self, key: str, tensor: int) -> Tensor:
        shape, at = scales_shape(self.shapes[tensor]), self.scales[key][tensor]
        return torch.tensor(self.memory.bytes[at : at + 4 * math.prod(shape)]).view(torch.float32).view(shape)

    @property
    def params(self) -> list[Tensor]:
        return self.tensors(tables.TENSOR.param)

    @property
    def weights(self) -> list[Tensor]:
        """What is updated: masters, or the parameters themselves."""
        masters = self.tensors(tables.TENSOR.master) if self.variant.master else self.params
        key = "master_remainder" if self.dtypes.weight == torch.int16 else "master_param"
        return [master_of(param, {key: master}) for param, master in zip(self.params, masters, strict=True)]

    def state(self) -> list[Tensor]:
        """Parameters, moments and masters."""
        columns = [column for column in self.columns if column != tables.TENSOR.grad]
        return [tensor for column in columns for tensor in self.tensors(column)]

    def everything(self) -> bytes:
        """All memory, for comparisons bit by bit."""
        return self.memory.bytes[: self.memory.top].tobytes()

    def _tensor_table(self, groups: Sequence[dict[str, Any]]) -> Array:
        table = np.zeros((len(self.numels), tables.TENSOR.columns), np.int64)
        for column, addresses in self.columns.items():
            table[:, column] = addresses
        table[:, tables.TENSOR.aligned] = (table[:, list(self.columns)] % ALIGNMENT == 0).all(1)
        for i in self.coded:
            rows, columns = rows_and_columns(self.shapes[i])
            table[i, tables.TENSOR.aligned] &= rows == 1 or columns % ROW_ALIGNMENT.value == 0
        for number, group in enumerate(groups):
            table[group["params"], tables.TENSOR.group] = number
        table[:, tables.TENSOR.number] = range(len(self.numels))
        table[:, tables.TENSOR.row_length] = np.maximum(self.numels, 1)
        return table

    def _codec_table(self) -> Array:
        """The first tensor's row is the last one."""
        if not self.variant.coded:
            return np.zeros(0, np.int64)
        table = np.zeros((len(self.numels), tables.CODEC.columns), np.int64)
        for i in self.coded:
            per_row = scales_shape(self.shapes[i])[-1]
            addresses = (self.scales[key][i] for key in ("exp_avg", "exp_avg_sq"))
            table[-1 - i] = [*addresses, rows_and_columns(self.shapes[i])[1], per_row, 0, per_row]
        return table

    def _put_moments(self, key: str, offset: int) -> list[int]:
        dtypes = [CODE_DTYPES[key] if i in self.coded else getattr(self.dtypes, key) for i in range(len(self.numels))]
        return [
            self._put(raw_bytes(torch.zeros(n, dtype=dtype)), offset * dtype.itemsize)
            for n, dtype in zip(self.numels, dtypes, strict=True)
        ]

    def _put_all(self, tensors: Sequence[Tensor], dtype: torch.dtype, offset: int, writable: bool = True) -> list[int]:
        return [
            self._put(raw_bytes(tensor.detach().to(dtype)), offset * dtype.itemsize, writable) for tensor in tensors
        ]

    def _put_zeros(self, dtype: torch.dtype, offset: int) -> list[int]:
        return self._put_all([torch.zeros(n) for n in self.numels], dtype, offset)

    def _put(self, array: Array, offset: int = 0, writable: bool = True) -> int:
        return self.memory.put(array, offset=offset, writable=writable)

    def _write(self, address: int, raw: Array) -> None:
        self.memory.bytes[address : address + raw.size] = raw


def raw_bytes(tensor: Tensor) -> Array:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@functools.cache
def emulated(kernel: str, arch: int, configuration: str, change: Change | None) -> Kernel:
    ptx = submit(kernel, arch, configuration).result().ptx
    return Kernel(ptx if change is None else change(ptx))

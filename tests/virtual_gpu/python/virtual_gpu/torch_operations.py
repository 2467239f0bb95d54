"""Runs torch's own operations on CUDA tensors as CPU operations on the same memory, in the order of their stream.

Allocations, views, and copies between dense tensors of one type stay torch's: they need no kernel. Shapes of results
come from torch's meta device, so that the host waits only where it would wait for a GPU: for a value, or for a shape
that depends on values. Random numbers are drawn at the call, on the CPU: from its own generator, or from one that a
given generator's seed and offset decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import driver
from .memory import on_cpu

aten = torch.ops.aten

NEEDS_NO_KERNEL = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.resize_.default,
    aten.set_.default,
    aten.set_.source_Tensor,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten.record_stream.default,
    aten.is_pinned.default,
    aten.pin_memory.default,
    aten._pin_memory.default,
    aten._local_scalar_dense.default,  # a copy for which the host waits
}

# In 16 bits the CPU keeps mean and deviation in 16 bits as well, and refuses those of a GPU, which are in float32.
COMPUTED_IN_FLOAT32 = {
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
}

TO_SPARSE = {aten._to_sparse.default, aten._to_sparse.sparse_dim}

DRAWN_TOGETHER = 1 << 20  # offsets that a draw takes up: a seed has room for 2^44 draws


def catch() -> None:
    """Catches the operations of this thread and of autograd's threads, until the process ends."""
    _OnSameMemory().__enter__()
    to_string = torch._tensor_str._tensor_str

    def to_string_on_cpu(tensor: Tensor, *args: Any) -> str:
        """torch prints tensors with all modes off."""
        if tensor.is_cuda:
            torch.cuda.synchronize()
            tensor = on_cpu(tensor)
        return to_string(tensor, *args)

    torch._tensor_str._tensor_str = to_string_on_cpu
    torch.cuda._sleep = lambda cycles: None  # its kernel only takes time, which there is none of here


class _OnSameMemory(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._dispatch(func, args, kwargs)
        if func._schema.name.startswith("aten::_foreach_"):  # torch does not count their writes with a mode on
            torch.autograd.graph.increment_version(
                [tensor for tensor in _tensors(_written(func, args, kwargs)) if not tensor.is_inference()]
            )
        return result

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        on_gpu = any(_is_cuda(x) or (isinstance(x, torch.device) and x.type == "cuda") for x in leaves)
        if not on_gpu or func in NEEDS_NO_KERNEL or _is_view(func) or _communicates(func):
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return _copy(*args, **kwargs)
        if func is aten._to_copy.default:
            return _to_copy(*args, **kwargs)
        if func is aten.equal.default:
            _device(func, args, kwargs)
            torch.cuda.synchronize()
            return func(*_for_cpu(args))
        if _takes_only_the_shape(func) and kwargs.get("device") is not None:
            like = _for_meta(args[0])
            return (
                func(like, *args[1:], **kwargs) if _is_cpu(kwargs["device"]) else _new(func, (like, *args[1:]), kwargs)
            )
        if func in TO_SPARSE:
            return _to_sparse(func, args, kwargs)
        return _in_place(func, args, kwargs) if _written(func, args, kwargs) else _new(func, args, kwargs)


def _is_cuda(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def _is_view(func: Any) -> bool:
    return any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)


def _communicates(func: Any) -> bool:
    """Whether ranks exchange something. Gloo copies to the host itself, and whoever waits for it waits for a GPU too.
    Queued as an operation it would run where nobody waits for it."""
    return bool(func.namespace == "c10d")


def _takes_only_the_shape(func: Any) -> bool:
    """Whether an operation asks its tensor for nothing but what a new one should look like, on whatever device."""
    name = func._schema.name
    return bool(name.endswith("_like") or name.startswith("aten::new_"))


def _is_cpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cpu"


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments that an operation writes to."""
    declared = func._schema.arguments
    given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
    return [value for a, value in given if a.alias_info and a.alias_info.is_write]


# --- Copies


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies: dtypes and layouts change on one side; only dense tensors of one dtype cross between host and device."""
    if to.numel() == 0:
        return to
    source = source.expand(to.shape)
    if non_blocking and source.is_cuda and to.is_cpu and not to.is_pinned():
        return _copy_late(to, source)
    fits = source.dtype == to.dtype and _is_dense(source)
    if fits and _is_dense(to):
        return aten.copy_.default(to, source, non_blocking)
    if to.device == source.device:
        return _in_place(aten.copy_.default, (to, source), {}) if to.is_cuda else to.copy_(source)
    if not fits:
        dense = torch.empty(to.shape, dtype=to.dtype, device=source.device)
        source = _copy(dense, source)
    if _is_dense(to):
        return aten.copy_.default(to, source, non_blocking)
    arrived = torch.empty(to.shape, dtype=to.dtype, device=to.device)
    aten.copy_.default(arrived, source, non_blocking and to.is_cuda)
    return _copy(to, arrived)


def _copy_late(to: Tensor, source: Tensor) -> Tensor:
    """Copies to pageable memory when the stream gets there. Drivers mostly wait, and nobody may rely on that: whoever
    reads too early finds zeros. The queue keeps the memory alive, which no driver does."""
    on_host = on_cpu(source)
    to.zero_()
    _queue(source.device, lambda: to.copy_(on_host))
    return to


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    to = _with_index(torch.device(device)) if device else source.device
    with torch.cuda.device(to) if to.type == "cuda" else nullcontext():
        result = torch.empty_like(
            source,
            dtype=dtype or source.dtype,
            device=to,
            pin_memory=bool(pin_memory),
            memory_format=memory_format or torch.preserve_format,
        )
    return _copy(result, source, non_blocking)


def _with_index(device: torch.device) -> torch.device:
    is_whole = device.type != "cuda" or device.index is not None
    return device if is_whole else torch.device("cuda", torch.cuda.current_device())


# --- Everything else


def _to_sparse(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Makes a tensor of indices and values that are dense. The host waits, since their number depends on values."""
    device = _device(func, args, kwargs)
    torch.cuda.synchronize()
    result = func(*_for_cpu(args), **_for_cpu(kwargs))
    indices, values = (tensor.contiguous().to(device) for tensor in (result._indices(), result._values()))
    return aten._sparse_coo_tensor_unsafe.default(indices, values, result.shape, is_coalesced=True)


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    device = _device(func, args, kwargs)
    cpu_args, cpu_kwargs = _for_cpu(args), _for_cpu(kwargs)
    if _is_random(func):
        drawn = torch.empty(args[0].shape, dtype=args[0].dtype)
        func(drawn, *cpu_args[1:], **cpu_kwargs)
        _queue(device, lambda: cpu_args[0].copy_(drawn))
    else:
        _queue(device, lambda: func(*cpu_args, **cpu_kwargs))
    written = _written(func, args, kwargs)
    if not func._schema.returns:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    device = _device(func, args, kwargs)
    cpu_args, cpu_kwargs = _for_cpu(args), _for_cpu(kwargs)
    drawn = func(*cpu_args, **cpu_kwargs) if _is_random(func) else None
    try:
        shapes = drawn if drawn is not None else func(*_for_meta(args), **_for_meta(kwargs))
    except Exception:  # it depends on values, or is wrong: the CPU will say the same
        torch.cuda.synchronize()
        shapes = func(*cpu_args, **cpu_kwargs)

    def allocate(like: object) -> object:
        if not isinstance(like, Tensor):
            return like
        with torch.cuda.device(device):
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

    results = tree_map(allocate, shapes)
    cpu_results = [on_cpu(result) for result in _tensors(results)]

    def compute() -> None:
        widened = _in_float32(cpu_args) if func in COMPUTED_IN_FLOAT32 else cpu_args
        values = drawn if drawn is not None else func(*widened, **cpu_kwargs)
        for result, value in zip(cpu_results, _tensors(values), strict=True):
            result.copy_(value)

    _queue(device, compute)
    return results


def _queue(device: torch.device, closure: Callable[[], object]) -> None:
    def run() -> None:
        with torch.inference_mode():  # in which tensors may be written to that were made there, and all others too
            closure()

    with torch.cuda.device(device):
        driver.push(torch.cuda.current_stream(device).cuda_stream, run)


def _in_float32(tree: Any) -> Any:
    narrow = (torch.bfloat16, torch.float16)
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in narrow else x, tree)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _device(func: Any, args: Any, kwargs: Any) -> torch.device:
    """Returns the one device that all tensors are on, as torch demands; scalars may be anywhere, and tensors on "meta"
    only say of what shape a new one is."""
    tensors = [tensor for tensor in _tensors((args, kwargs)) if not tensor.is_meta]
    devices = {tensor.device for tensor in tensors if tensor.dim() > 0}
    devices = devices or {tensor.device for tensor in tensors if tensor.is_cuda}
    devices = devices or {_with_index(torch.device(kwargs["device"]))}
    if len(devices) > 1 or torch.device("cpu") in devices:
        raise RuntimeError(f"{func}: one CUDA device is wanted, got tensors on {sorted(map(str, devices))}")
    return devices.pop()


def _for_cpu(tree: Any) -> Any:
    """Replaces CUDA tensors by CPU tensors on the same memory. CPU scalars are read now, as by a launch."""

    def convert(x: object) -> object:
        if isinstance(x, Tensor):
            return on_cpu(x) if x.is_cuda else x.clone()
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return _generator(x) if isinstance(x, torch.Generator) else x

    return _without_pinning(tree_map(convert, tree))


def _generator(given: torch.Generator) -> torch.Generator:
    """Returns a CPU generator in place of a GPU's, for one draw. The same seed gives the same numbers once more."""
    if given.device.type != "cuda":
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{given.device.type}'")
    seed, offset = given.initial_seed(), given.get_offset()
    given.set_offset(offset + DRAWN_TOGETHER)
    return torch.Generator("cpu").manual_seed((seed + offset) % 2**63)


def _for_meta(tree: Any) -> Any:
    def convert(x: object) -> object:
        if isinstance(x, Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, torch.device):
            return torch.device("meta")
        return None if isinstance(x, torch.Generator) else x

    return _without_pinning(tree_map(convert, tree))


def _without_pinning(tree: Any) -> Any:
    return {key: value for key, value in tree.items() if key != "pin_memory"} if isinstance(tree, dict) else tree

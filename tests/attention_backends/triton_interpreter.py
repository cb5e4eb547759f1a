# SPDX-License-Identifier: Apache-2.0
"""Mends Triton's interpreter, in which the tests run the Triton kernels on CPU tensors.

It rounds as the device does, reads and writes nothing but the tensors of a launch, hands garbage to
loads that forgot what to take for masked elements, can run programs in another order, and takes a
small part of the time.

`tests/conftest.py` turns the interpreter on before anything imports triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.attention_backends.triton_recordings import recorded

assert triton.knobs.runtime.interpret, "triton was imported without TRITON_INTERPRET=1"

BUILDER = interpreter.interpreter_builder
# numpy has neither of these
TORCH_DTYPES = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}


@contextmanager
def programs_in_order(rng: np.random.Generator) -> Iterator[None]:
    """Inside, the programs of every launch run in a random order."""
    permutation: list[tuple[int, ...]] = []

    def set_grid_dim(*sizes: int) -> None:
        every = list(np.ndindex(*sizes))
        permutation[:] = [every[index] for index in rng.permutation(len(every))]
        type(BUILDER).set_grid_dim(BUILDER, *sizes)

    def set_grid_idx(*index: int) -> None:
        place = np.ravel_multi_index(index, BUILDER.grid_dim)
        type(BUILDER).set_grid_idx(BUILDER, *permutation[place])

    BUILDER.set_grid_dim, BUILDER.set_grid_idx = set_grid_dim, set_grid_idx
    try:
        yield
    finally:
        del BUILDER.set_grid_dim, BUILDER.set_grid_idx


def _to_torch(handle: Any) -> torch.Tensor:
    dtype = handle.dtype.scalar
    data = torch.from_numpy(np.ascontiguousarray(handle.data))
    return data.view(TORCH_DTYPES[dtype]) if dtype in TORCH_DTYPES else data


def _cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
    """The interpreter truncates where the device rounds to the nearest."""
    source, target = src.dtype.scalar, dst_type.scalar
    if source not in TORCH_DTYPES and target not in TORCH_DTYPES:
        return cast_impl(self, src, dst_type)
    data = _to_torch(src)
    if target in TORCH_DTYPES:
        bits = torch.int16 if target == tl.bfloat16 else torch.int8
        data = data.to(TORCH_DTYPES[target]).view(bits)
    else:
        data = data.to(torch.float32)
    array = data.numpy()
    numpy_dtype = interpreter._get_np_dtype(target)
    array = array.view(numpy_dtype) if target in TORCH_DTYPES else array.astype(numpy_dtype)
    return interpreter.TensorHandle(array, target)


def _create_dot(
    self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """The interpreter keeps bfloat16 as uint16 and would multiply these integers. einsum, because
    a matmul of a BLAS may round a row differently at another place among others."""
    first, second = (_to_torch(operand).double().numpy() for operand in (a, b))
    with np.errstate(all="ignore"):
        product = np.einsum("mk,kn->mn", first, second)
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _create_exp2(self: Any, arg: Any) -> Any:
    """Infinity is no reason for a warning."""
    with np.errstate(over="ignore"):
        return interpreter.TensorHandle(np.exp2(arg.data), arg.dtype.scalar)


def _create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    """The interpreter makes integers of the result of a comparison."""
    return interpreter.TensorHandle(np.full(ret_ty.shape, arg.data), arg.dtype.scalar)


def _create_expand_dims(self: Any, arg: Any, axis: int) -> Any:
    """As numpy.expand_dims, in less time."""
    index = (slice(None),) * axis + (None,)
    return interpreter.TensorHandle(arg.data[index], arg.dtype.scalar)


def _create_broadcast(self: Any, arg: Any, shape: Any) -> Any:
    """As numpy.broadcast_to, whose view takes longer to make than a copy."""
    data = np.empty(tuple(shape), arg.data.dtype)
    data[...] = arg.data
    return interpreter.TensorHandle(data, arg.dtype.scalar)


class _Memory:
    """The bytes of the tensors that were passed to the kernel."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        extents = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + _num_bytes(tensor))
            for tensor in tensors
            if tensor.numel()
        )
        self._begins = np.array([begin for begin, _ in extents], np.uint64)
        ends = np.array([end for _, end in extents], np.uint64)
        self._ends = np.maximum.accumulate(ends)

    def check(self, pointers: Any, mask: Any) -> None:
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        is_accessed = mask.data
        if is_accessed.shape != pointers.data.shape:
            is_accessed = np.broadcast_to(is_accessed, pointers.data.shape)
        addresses = pointers.data[is_accessed]
        if not addresses.size:
            return
        tensor = np.searchsorted(self._begins, addresses, side="right") - 1
        outside = (tensor < 0) | (addresses + np.uint64(itemsize) > self._ends[tensor])
        if outside.any():
            raise IndexError(f"{outside.sum()} of {addresses.size} addresses are in no tensor")


def _num_bytes(tensor: torch.Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return (last + 1) * tensor.element_size()


def _init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> Any:
    global memory
    tensors = [arg for arg in (*args_dev, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    memory = _Memory(tensors)
    return init_args_hst(self, args_dev, kwargs)


def _create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
    memory.check(ptrs, mask)
    if other is None and not mask.data.all():
        dtype = ptrs.get_element_ty()
        garbage = np.empty(ptrs.data.shape, interpreter._get_np_dtype(dtype))
        garbage.view(np.uint8).fill(0xFF)  # NaN, or -1
        other = interpreter.TensorHandle(garbage, dtype)
    return create_masked_load(self, ptrs, mask, other, *rest)


def _create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
    memory.check(ptrs, mask)
    return create_masked_store(self, ptrs, value, mask, *rest)


def _create_atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
    memory.check(ptr, mask)
    return create_atomic_rmw(self, operation, ptr, val, mask, *rest)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = (size.value if isinstance(size, tl.constexpr) else size for size in shape)
    key = (element_ty.name, *sizes)
    if key not in block_types:
        init_block_type(self, element_ty, shape)
        block_types[key] = dict(self.__dict__)
    else:
        self.__dict__.update(block_types[key])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type = handle, type
    if type.name not in shapes:
        init_tensor(self, handle, type)
        shapes[type.name] = self.dtype, self.shape, self.numel
    else:
        self.dtype, self.shape, self.numel = shapes[type.name]


def _get_np_dtype(dtype: Any) -> Any:
    if dtype.name not in np_dtypes:
        np_dtypes[dtype.name] = get_np_dtype(dtype)
    return np_dtypes[dtype.name]


memory = _Memory([])
block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
shapes: dict[str, tuple[Any, Any, Any]] = {}
np_dtypes: dict[str, Any] = {}

cast_impl = interpreter.InterpreterBuilder.cast_impl
create_masked_load = interpreter.InterpreterBuilder.create_masked_load
create_masked_store = interpreter.InterpreterBuilder.create_masked_store
create_atomic_rmw = interpreter.InterpreterBuilder.create_atomic_rmw
init_args_hst = interpreter.GridExecutor._init_args_hst
get_np_dtype = interpreter._get_np_dtype
init_block_type, init_tensor = tl.block_type.__init__, tl.tensor.__init__

interpreter.InterpreterBuilder.cast_impl = _cast_impl
interpreter.InterpreterBuilder.create_fp_to_fp = lambda self, src, dst_type, rounding_mode: (
    _cast_impl(self, src, dst_type)
)
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.create_exp2 = _create_exp2
interpreter.InterpreterBuilder.create_splat = _create_splat
interpreter.InterpreterBuilder.create_expand_dims = _create_expand_dims
interpreter.InterpreterBuilder.create_broadcast = _create_broadcast
interpreter.InterpreterBuilder.create_masked_load = _create_masked_load
interpreter.InterpreterBuilder.create_masked_store = _create_masked_store
interpreter.InterpreterBuilder.create_atomic_rmw = _create_atomic_rmw
interpreter.GridExecutor._init_args_hst = _init_args_hst
# what it would copy back is the same memory
interpreter.GridExecutor._restore_args_dev = lambda *arguments: None
tl.block_type.__init__, tl.tensor.__init__ = _init_block_type, _init_tensor

# checks that are computed and then not looked at
BUILDER.options = replace(BUILDER.options, sanitize_overflow=False)
interpreter._get_np_dtype = _get_np_dtype
interpreter._patch_attr = lambda obj, name, member, builder, scope: scope.set_attr(
    obj, name, recorded(member)
)
# once, and not once more for each call of a function
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

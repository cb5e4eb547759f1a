# SPDX-License-Identifier: Apache-2.0
"""Mends Triton's interpreter, in which the tests run the Triton kernels on CPU tensors.

`tests/conftest.py` turns the interpreter on before anything imports triton.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

assert triton.knobs.runtime.interpret, "triton was imported without TRITON_INTERPRET=1"


def _to_float32(bfloat16: np.ndarray) -> np.ndarray:
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(float32: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even, as the device does."""
    bits = np.ascontiguousarray(float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(float32), 0x7FC0, rounded).astype(np.uint16)


def _cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
    """The interpreter truncates where the device rounds."""
    source, target = src.dtype.scalar, dst_type.scalar
    if source == tl.bfloat16 and target == tl.float32:
        return interpreter.TensorHandle(_to_float32(src.data), target)
    if source == tl.float32 and target == tl.bfloat16:
        return interpreter.TensorHandle(_to_bfloat16(src.data), target)
    return cast_impl(self, src, dst_type)


def _create_dot(
    self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """The interpreter keeps bfloat16 as uint16 and would multiply these integers. einsum, because
    a matmul of a BLAS may round a row differently at another place among others."""

    def to_float64(tensor: Any) -> np.ndarray:
        if tensor.dtype == tl.bfloat16:
            return _to_float32(tensor.data).astype(np.float64)
        return tensor.data.astype(np.float64)

    with np.errstate(all="ignore"):
        product = np.einsum("mk,kn->mn", to_float64(a), to_float64(b))
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    """The interpreter makes integers of the result of a comparison."""
    return interpreter.TensorHandle(np.full(ret_ty.shape, arg.data), arg.dtype.scalar)


cast_impl = interpreter.InterpreterBuilder.cast_impl
interpreter.InterpreterBuilder.cast_impl = _cast_impl
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.create_splat = _create_splat

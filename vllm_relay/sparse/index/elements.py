# SPDX-License-Identifier: Apache-2.0
"""Keys and values as numpy arrays: numpy has no bfloat16, so those are kept as uint16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

DTYPES = ("float32", "float16", "bfloat16")
STORAGE = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.uint16}


@dataclass(frozen=True)
class Elements:
    """An array and what its bits mean.

    Attributes:
        data: C-contiguous; float32, or uint16 with the bits of float16 or bfloat16.
        dtype: "float32", "float16" or "bfloat16".
    """

    data: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def to_float32(self) -> np.ndarray:
        if self.dtype == "float32":
            return self.data
        if self.dtype == "float16":
            return self.data.view(np.float16).astype(np.float32)
        return (self.data.astype(np.uint32) << 16).view(np.float32)

    def rows(self, begin: int, end: int) -> Elements:
        return Elements(self.data[begin:end], self.dtype)


def as_elements(name: str, array: Any, dtype: str | None = None) -> Elements:
    """Takes numpy arrays (float16, float32, float64), torch tensors on the CPU and `Elements`.

    Args:
        dtype: how to keep them; None keeps float32, float16 and bfloat16 as they are and float64
            as float32.

    Raises:
        ValueError: an unusable dtype or a value that is not finite; names the array.
    """
    elements = _wrap(name, array)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    if dtype is not None and dtype != elements.dtype:
        elements = from_float32(elements.to_float32(), dtype)
    check_finite(name, elements)
    return elements


def from_float32(values: np.ndarray, dtype: str) -> Elements:
    """Rounds to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "float32":
        return Elements(values, dtype)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return Elements(values.astype(np.float16).view(np.uint16), dtype)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return Elements(rounded.astype(np.uint16), dtype)


def check_finite(name: str, elements: Elements) -> None:
    """Raises ValueError with the place of the first NaN or infinity."""
    if elements.dtype == "float32":
        finite = np.isfinite(elements.data)
    else:
        exponent = 0x7C00 if elements.dtype == "float16" else 0x7F80
        finite = (elements.data & exponent) != exponent
    if not finite.all():
        place = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(f"{name}: NaN or infinity at {list(place)}; expected finite numbers only")


def _wrap(name: str, array: Any) -> Elements:
    if isinstance(array, Elements):
        return array
    if not isinstance(array, np.ndarray):
        if type(array).__module__.startswith("torch"):
            return _from_torch(name, array)
        array = _as_array(name, array)
    elif array.dtype == np.float32 and array.flags.c_contiguous:
        return Elements(array, "float32")
    if array.dtype == np.float16:
        return Elements(np.ascontiguousarray(array).view(np.uint16), "float16")
    if array.dtype not in (np.float32, np.float64):
        raise ValueError(
            f"{name}: dtype {array.dtype}, expected float32, float16, bfloat16 or float64"
        )
    return Elements(np.ascontiguousarray(array, np.float32), "float32")


def _as_array(name: str, array: Any) -> np.ndarray:
    try:
        return np.asarray(array)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}: {error}") from error


def _from_torch(name: str, tensor: Any) -> Elements:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: on {tensor.device}, expected a tensor on the CPU")
    dtype = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().contiguous()
    if dtype in ("bfloat16", "float16"):
        import torch

        return Elements(tensor.view(torch.int16).numpy().view(np.uint16), dtype)
    return _wrap(name, tensor.numpy())

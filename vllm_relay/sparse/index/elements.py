# SPDX-License-Identifier: Apache-2.0
"""Keys and values as numpy arrays and as torch tensors: numpy has no bfloat16, so those are kept as
uint16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

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


def as_elements(name: str, array: Any) -> Elements:
    """Takes numpy arrays (float16, float32, float64), torch tensors on the CPU and `Elements`, and
    keeps their dtype; float64 becomes float32.

    Raises:
        ValueError: an unusable dtype or a value that is not finite; names the array.
    """
    elements = _wrap(name, array)
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


def _from_torch(name: str, tensor: torch.Tensor) -> Elements:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: on {tensor.device}, expected a tensor on the CPU")
    tensor = tensor.detach().contiguous()
    if _name_of(tensor.dtype) in DTYPES:
        return elements_of(tensor)
    return _wrap(name, tensor.numpy())


def elements_of(tensor: torch.Tensor) -> Elements:
    """A tensor on the CPU, of one of `DTYPES` and contiguous, where it lies."""
    import torch

    dtype = _name_of(tensor.dtype)
    if dtype == "float32":
        return Elements(tensor.numpy(), dtype)
    return Elements(tensor.view(torch.int16).numpy().view(np.uint16), dtype)


def copied_elements(name: str, tensor: torch.Tensor, dtype: str | None = None) -> Elements:
    """A copy of a tensor, on the CPU and contiguous.

    Args:
        dtype: of `DTYPES`, to which other floating dtypes are converted; None: the tensor has one
            of them.

    Raises:
        ValueError: the tensor has another dtype; names the tensor.
    """
    import torch

    if dtype is not None and not tensor.is_floating_point():
        raise ValueError(f"{name}: {tensor.dtype}, expected floating numbers")
    dtype = _name_of(tensor.dtype) if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"{name}: {tensor.dtype}, expected {', '.join(DTYPES)}")
    copy = tensor.detach().to("cpu", getattr(torch, dtype), copy=True)
    return elements_of(copy.contiguous())


def to_tensor(elements: Elements) -> torch.Tensor:
    """The same memory as a tensor on the CPU; it may be a read-only map: do not write to it."""
    import torch

    data = elements.data
    if not data.flags.writeable:
        # torch warns about read-only arrays at each call
        data = np.asarray(_Writable(data))
    if elements.dtype == "float32":
        return torch.from_numpy(data)
    return torch.from_numpy(data.view(np.int16)).view(getattr(torch, elements.dtype))


class _Writable:
    """An array's memory without its read-only flag; numpy keeps it, and with it the array."""

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self._array, self.__array_interface__ = array, interface


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

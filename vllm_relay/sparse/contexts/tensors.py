# SPDX-License-Identifier: Apache-2.0
"""`Elements` as torch tensors and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_relay.sparse.index.elements import DTYPES, Elements


def to_tensor(elements: Elements) -> torch.Tensor:
    """The same memory as a tensor on the CPU; it may be a read-only map: do not write to it."""
    data = elements.data
    if not data.flags.writeable:
        # torch warns about read-only arrays at each call
        data = np.asarray(_Writable(data))
    if elements.dtype == "float32":
        return torch.from_numpy(data)
    return torch.from_numpy(data.view(np.int16)).view(getattr(torch, elements.dtype))


def to_elements(name: str, tensor: torch.Tensor, dtype: str | None = None) -> Elements:
    """A copy of a tensor, on the CPU and contiguous.

    Args:
        dtype: of `DTYPES`, to which other floating dtypes are converted; None: the tensor has one
            of them.

    Raises:
        ValueError: the tensor has another dtype; names the tensor.
    """
    if dtype is not None and not tensor.is_floating_point():
        raise ValueError(f"{name}: {tensor.dtype}, expected floating numbers")
    dtype = str(tensor.dtype).removeprefix("torch.") if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"{name}: {tensor.dtype}, expected {', '.join(DTYPES)}")
    copy = tensor.detach().to("cpu", getattr(torch, dtype), copy=True).contiguous()
    if dtype == "float32":
        return Elements(copy.numpy(), dtype)
    return Elements(copy.view(torch.int16).numpy().view(np.uint16), dtype)


class _Writable:
    """An array's memory without its read-only flag; numpy keeps it, and with it the array."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface = dict(self._array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        return interface

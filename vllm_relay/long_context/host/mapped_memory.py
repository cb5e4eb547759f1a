# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory goes back to the system when they are freed."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable

import torch


def mapped_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty: pages are taken when they are first written.

    An allocator keeps what is freed below its threshold, which grows up to 32 MiB in glibc, and
    hands out pages that are in memory already: what requests take would grow beyond what is
    reserved for them.
    """
    num_elements = math.prod(shape)
    if num_elements == 0:
        return torch.empty(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements).view(shape)


def return_free_memory() -> None:
    """Gives back to the system what glibc's allocator keeps of freed memory: it grows up to 64 MiB
    for each thread that computes, beside what is reserved. Elsewhere nothing happens."""
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another C library
        return lambda padding_bytes: None

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap
from typing import Any

import numpy as np

_CACHE_LINE_BYTES = 64
_HUGE_PAGE_BYTES = 2 << 20
_MAPPED_BYTES = 128 << 10
"""From here on, memory goes back to the system when it is freed, and not to an allocator."""


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """As numpy.empty, at the beginning of a cache line; large arrays in huge pages where the
    system has them, because indexes are read at random places."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    large = num_bytes >= 2 * _HUGE_PAGE_BYTES
    multiple = _HUGE_PAGE_BYTES if large else _CACHE_LINE_BYTES
    if num_bytes >= _MAPPED_BYTES:
        pages = mmap.mmap(-1, num_bytes + multiple, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if large and hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(pages, np.uint8)
    else:
        raw = np.empty(num_bytes + multiple, np.uint8)
    begin = -raw.ctypes.data % multiple
    return raw[begin : begin + num_bytes].view(dtype).reshape(shape)

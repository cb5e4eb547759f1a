# SPDX-License-Identifier: Apache-2.0
"""CRC-32C of bytes and of the pages of a section."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_relay import _C


def kernels() -> list[str]:
    """The checksum kernels that run here, best first; "portable" is the last one."""
    return _C.crc32c_kernels()


def crc32c(data: Any, crc: int = 0, *, kernel: str = "auto") -> int:
    """CRC-32C (Castagnoli, as in RFC 3720) of what gave `crc`, followed by `data`: bytes, any other
    C-contiguous buffer or array. Raises ValueError: `kernel` is not one of `kernels()`, of which
    "auto" takes the best one."""
    return _C.crc32c(bytes_of(data), crc, kernel)


def checksum_pages(data: Any, page_bytes: int) -> np.ndarray:
    """uint32 [pages]; the last page may be short."""
    flat = bytes_of(data)
    checksums = np.empty(-(-len(flat) // page_bytes), np.uint32)
    _C.checksum_pages(flat, page_bytes, checksums)
    return checksums


def bytes_of(data: Any) -> np.ndarray:
    """uint8 [bytes]; the same memory."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)

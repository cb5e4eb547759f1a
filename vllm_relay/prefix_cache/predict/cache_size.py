# SPDX-License-Identifier: Apache-2.0
"""Sizes of a KV cache, in GiB or in blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GIB_BYTES = 1 << 30

_MAX_GIB = 16384
_MAX_BLOCKS = 10_000_000  # they take half a minute and some GB to make


@dataclass(frozen=True)
class CacheSize:
    """The size of a KV cache. Where both are given, vLLM is told the blocks."""

    gib: float | None = None
    blocks: int | None = None

    def __str__(self) -> str:
        return f"{self.blocks} blocks" if self.gib is None else f"{self.gib:g} GiB"


def cache_sizes(
    gib: Sequence[float],
    blocks: Sequence[int],
    block_size: int | None,
    kv_bytes_per_token: int | None,
) -> list[CacheSize]:
    """The sizes that are asked for, the smallest first, those in GiB before those in blocks.

    Args:
        block_size: tokens of a block, or None; GiB become blocks where this is known, and
            `kv_bytes_per_token`, the bytes of a token in all layers.

    Raises:
        ValueError: a size is none, or too much.
    """
    sizes = []
    for size in gib:
        if not 0 < size <= _MAX_GIB:
            raise ValueError(f"a KV cache of {size} GiB: expected more than 0, at most {_MAX_GIB}")
        count = None
        if kv_bytes_per_token is not None and block_size is not None:
            count = math.floor(size * GIB_BYTES / (kv_bytes_per_token * block_size))
        sizes.append(CacheSize(size, count))
    sizes += [CacheSize(blocks=count) for count in sorted(set(blocks))]
    if any(count < 1 for count in blocks):
        raise ValueError(f"a KV cache of {min(blocks)} blocks: expected more than 0")
    for each in sizes:
        if each.blocks is not None and each.blocks > _MAX_BLOCKS:
            raise ValueError(
                f"a KV cache of {each.blocks} blocks: expected at most {_MAX_BLOCKS}; where all "
                "requests fit, more changes nothing"
            )
    return sizes

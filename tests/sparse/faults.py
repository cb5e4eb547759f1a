# SPDX-License-Identifier: Apache-2.0
"""Damage as disks, file systems and people do it."""

from __future__ import annotations

import numpy as np

BLOCK_BYTES = 4096

KINDS = (
    "flipped bits",
    "truncated",
    "zeroed block",
    "stale block",
    "swapped blocks",
    "swapped ranges",
    "random bytes",
    "appended",
    "shifted",
)


def damaged(
    content: bytes,
    stale: bytes,
    ranges: list[tuple[int, int]],
    kind: str,
    rng: np.random.Generator,
) -> bytes:
    """The content with one fault of that kind; perhaps without any effect.

    Args:
        stale: an older version of the same file, for blocks that were never written.
        ranges: (begin, end) of areas of equal size, of which two may change places.
    """
    data = bytearray(content)
    num_blocks = len(data) // BLOCK_BYTES
    place = int(rng.integers(len(data)))
    block = int(rng.integers(num_blocks)) * BLOCK_BYTES
    if kind == "flipped bits":
        for _ in range(int(rng.integers(1, 9))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif kind == "truncated":
        del data[place:]
    elif kind == "zeroed block":
        data[block : block + BLOCK_BYTES] = bytes(BLOCK_BYTES)
    elif kind == "stale block":
        data[block : block + BLOCK_BYTES] = stale[block : block + BLOCK_BYTES]
    elif kind == "swapped blocks":
        other = int(rng.integers(num_blocks)) * BLOCK_BYTES
        data[block : block + BLOCK_BYTES] = content[other : other + BLOCK_BYTES]
        data[other : other + BLOCK_BYTES] = content[block : block + BLOCK_BYTES]
    elif kind == "swapped ranges":
        (a, a_end), (b, b_end) = rng.permutation(ranges)[:2].tolist()
        data[a:a_end], data[b:b_end] = content[b:b_end], content[a:a_end]
    elif kind == "random bytes":
        length = min(int(rng.integers(1, 10_000)), len(data) - place)
        data[place : place + length] = rng.bytes(length)
    elif kind == "appended":
        data += rng.bytes(int(rng.integers(1, 5000)))
    elif kind == "shifted":
        data[place:place] = rng.bytes(1)
        del data[len(content) :]
    return bytes(data)

# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from an engine core to a front end.

Hashes are cut to 64 bits, which tell the blocks of a KV cache apart well enough for a picture; what
changes anything is checked by the engine core.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple

_LAYOUT = Struct("<IIQQd")
NO_KEY = 0


class ToldBlock(NamedTuple):
    """What a front end is told of a KV block."""

    block_id: int
    hits: int
    key: int
    """Of its content; NO_KEY: it can be found no more."""
    parent: int
    """Of the block before it; NO_KEY: there is none."""
    used_s: float
    """In seconds since 1970."""


def key_of(block_hash: bytes | None) -> int:
    """Of a hash of the prefix cache."""
    return NO_KEY if block_hash is None else int.from_bytes(block_hash[:8], "little") or 1


pack = _LAYOUT.pack
"""The bytes of the fields of a `ToldBlock`."""


def unpack(packed: bytes) -> Iterator[ToldBlock]:
    """Of packed blocks, one behind the other."""
    return map(ToldBlock._make, _LAYOUT.iter_unpack(packed))


def parents_first(blocks: Iterable[ToldBlock]) -> Iterator[ToldBlock]:
    """Blocks that can be found, each behind those of them that it continues."""
    left: dict[int, list[ToldBlock]] = {}  # by their content
    for block in blocks:
        left.setdefault(block.key, []).append(block)
    for key in list(left):
        chain = []
        while (found := left.pop(key, None)) is not None:
            chain.append(found)
            key = found[0].parent
        for found in reversed(chain):
            yield from found

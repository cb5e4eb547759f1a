# SPDX-License-Identifier: Apache-2.0
"""The exact index: a scan of all keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_relay import _C
from vllm_relay.sparse import face
from vllm_relay.sparse.elements import Elements
from vllm_relay.sparse.index import IndexDamagedError, KeyIndex, SearchResult
from vllm_relay.sparse.key_codes import (
    BLOCK_KEYS,
    KeyCodes,
    encode,
    lay_out_blocks,
    row_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from vllm_relay.sparse.query_types import QueryType


class FlatIndex(KeyIndex):
    """Reads the eight-bit code of every key, and the keys themselves that could be an answer.

    What a code can be off by is bounded (docs/sparse.md, section 2), so the answer is the one that
    reading all keys would give, for half the bytes of bfloat16 keys.
    """

    kind = "flat"
    _keys: Elements
    _codes: KeyCodes
    _blocks: np.ndarray

    @property
    def keys(self) -> Elements:
        return self._keys

    def build(
        self,
        keys: Any,
        train_queries: Any = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> Self:
        elements = face.check_keys(keys)
        codes, rows = encode(elements, face.check_threads(threads))
        n = len(rows)
        order = np.full(-(-n // BLOCK_KEYS) * BLOCK_KEYS, -1, np.int32)
        order[:n] = np.arange(n)
        self._set(elements, codes, lay_out_blocks(rows, order))
        return self

    def _set(self, keys: Elements, codes: KeyCodes, blocks: np.ndarray) -> None:
        self._keys, self._codes, self._blocks = keys, codes, blocks
        self._set_view = codes.key_set(keys, blocks)

    def search(
        self,
        queries: Any,
        query: QueryType,
        *,
        prefix_len: int | None = None,
        entry: Sequence[int] | np.ndarray | None = None,
        window_max: Any = None,
    ) -> SearchResult:
        queries = face.check_queries("queries", queries, self.head_size)
        face.check_entries(entry, self.num_keys)
        request = face.make_request(
            queries,
            query,
            num_keys=self.num_keys,
            width=1,
            prefix_len=prefix_len,
            window_max=window_max,
            always=self._codes.outside,
        )
        ranges = self._ranges(face.check_prefix(prefix_len, self.num_keys))
        outcome = _C.index.scan("auto", self._set_view, self._blocks, ranges, request)
        return face.to_result(
            outcome,
            row_bytes=row_bytes(self.head_size),
            hop_bytes=0,
            key_bytes=face.key_bytes(self._keys),
        )

    def _ranges(self, prefix_len: int) -> np.ndarray:
        """int64 [ranges, 3] for the scan; a block with keys that have no code is one of its own."""
        outside = self._codes.outside[self._codes.outside < prefix_len]
        ranges, begin = [], 0
        for block in np.unique(outside // BLOCK_KEYS):
            if block > begin:
                ranges.append((begin, (block - begin) * BLOCK_KEYS, 0))
            lanes = outside[outside // BLOCK_KEYS == block] % BLOCK_KEYS
            keys = min(BLOCK_KEYS, prefix_len - int(block) * BLOCK_KEYS)
            ranges.append((int(block), keys, int((1 << lanes.astype(np.int64)).sum())))
            begin = int(block) + 1
        if prefix_len > begin * BLOCK_KEYS:
            ranges.append((begin, prefix_len - begin * BLOCK_KEYS, 0))
        return np.array(ranges, np.int64).reshape(-1, 3)

    def append(self, keys: Any) -> None:
        new = face.check_keys(keys, head_size=self.head_size, dtype=self._keys.dtype)
        self.build(Elements(np.concatenate([self._keys.data, new.data]), new.dtype))

    def check(self) -> None:
        fresh = FlatIndex().build(self._keys)
        for name, array in self.to_arrays()[1].items():
            if not np.array_equal(array, fresh.to_arrays()[1][name]):
                raise IndexDamagedError(f"flat index: its {name} do not belong to its keys")

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        settings, arrays = self._codes.to_arrays()
        arrays |= {"keys": self._keys.data, "blocks": self._blocks}
        return {"dtype": self._keys.dtype, **settings}, arrays

    @classmethod
    def from_arrays(cls, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> Self:
        keys, codes = face.restore_codes(settings, arrays)
        n, d = keys.shape
        blocks = arrays["blocks"]
        expected = (-(-n // BLOCK_KEYS), BLOCK_KEYS * row_bytes(d))
        face.require(
            blocks.shape == expected and blocks.dtype == np.uint8,
            f"flat index: blocks are {blocks.dtype} {blocks.shape}, expected uint8 {expected}",
        )
        index = cls()
        index._set(keys, codes, blocks)
        return index

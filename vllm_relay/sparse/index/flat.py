# SPDX-License-Identifier: Apache-2.0
"""The exact index: a scan of all keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_relay import _C
from vllm_relay.sparse.index import compiled_index
from vllm_relay.sparse.index.compiled_index import CodedKeys, CompiledIndex
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.key_codes import (
    BLOCK_KEYS,
    KeyCodes,
    SplitCodes,
    row_bytes,
    split_codes,
)
from vllm_relay.sparse.index.key_index import IndexDamagedError


class FlatIndex(CompiledIndex):
    """Reads the eight-bit code of every key, and the keys themselves that could be an answer.

    What a code can be off by is bounded (docs/key-index.md, section 2), so the answer is the one
    that reading all keys would give, for half the bytes of bfloat16 keys. Where what is not found
    is estimated, upper halves of codes are enough, for a quarter.
    """

    kind = "flat"
    read_by_row = frozenset({"keys", "upper", "lower"})
    _halves: SplitCodes

    def _build(self, coded: CodedKeys, train_queries: Any, seed: int, threads: int) -> None:
        self._set(coded.keys, coded.codes, split_codes(coded.rows))

    def _set(self, keys: Elements, codes: KeyCodes, halves: SplitCodes) -> None:
        self._keys, self._codes, self._halves = keys, codes, halves
        self.searcher = _C.index.FlatSearcher(
            "auto", self._key_set("upper", halves.upper), codes.outside, halves.lower,
            self._guards.get("lower"),
        )  # fmt: skip
        self._exact = self.searcher  # it is exact itself

    def check(self) -> None:
        self._verify()
        rows = compiled_index.check_codes(self._keys, self._codes)
        if not all(map(np.array_equal, split_codes(rows), self._halves)):
            raise IndexDamagedError("flat index: its codes do not belong to its keys")

    def _own_parts(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {}, self._halves._asdict()

    def _restore(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        n, d = self._keys.shape
        halves = SplitCodes(arrays["upper"], arrays["lower"])
        expected = (-(-n // BLOCK_KEYS), BLOCK_KEYS * row_bytes(d) // 2)
        for name, half in halves._asdict().items():
            compiled_index.require(
                half.shape == expected and half.dtype == np.uint8,
                f"flat index: {name} is {half.dtype} {half.shape}, expected uint8 {expected}",
            )
        self._set(self._keys, self._codes, halves)

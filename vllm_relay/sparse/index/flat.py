# SPDX-License-Identifier: Apache-2.0
"""The exact index: a scan of all keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_relay import _C
from vllm_relay.sparse.index.compiled_index import CodedKeys, CompiledIndex
from vllm_relay.sparse.index.key_codes import BLOCK_KEYS, row_bytes, split_codes


class FlatIndex(CompiledIndex):
    """Reads the eight-bit code of every key, and the keys themselves that could be an answer.

    What a code can be off by is bounded (docs/key-index.md, section 2), so the answer is the one
    that reading all keys would give, for half the bytes of bfloat16 keys. Where what is not found
    is estimated, upper halves of codes are enough, for a quarter.
    """

    kind = "flat"
    own_settings = ()
    own_arrays = ("upper", "lower")
    read_by_row = frozenset({"keys", *own_arrays})

    def _build(self, coded: CodedKeys, train_queries: Any, seed: int, threads: int) -> None:
        self._set(coded.keys, coded.codes, split_codes(coded.rows)._asdict())

    def _new_searcher(self) -> Any:
        searcher = _C.index.FlatSearcher(
            "auto", self._key_set("upper"), self._codes.outside, self._arrays["lower"],
            self._guards.get("lower"),
        )  # fmt: skip
        self._exact = searcher  # it is exact itself
        return searcher

    def _has_codes(self, rows: np.ndarray) -> bool:
        return all(map(np.array_equal, split_codes(rows), self._arrays.values()))

    def _fits(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> bool:
        shape = -(-self.num_keys // BLOCK_KEYS), BLOCK_KEYS * row_bytes(self.head_size) // 2
        return all(half.shape == shape and half.dtype == np.uint8 for half in arrays.values())

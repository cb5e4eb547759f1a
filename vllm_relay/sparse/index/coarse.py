# SPDX-License-Identifier: Apache-2.0
"""An inverted file: keys in lists around centres, of which a query reads those it likes best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_relay import _C
from vllm_relay.sparse.files.damage import require
from vllm_relay.sparse.index.compiled_index import CodedKeys, CompiledIndex
from vllm_relay.sparse.index.default_width import learned_width
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.key_codes import (
    BLOCK_KEYS,
    KeyCodes,
    blocks_in_order,
    encode_rows,
    lay_out_blocks,
    row_bytes,
)

_ITERATIONS = 8
_KEYS_PER_CENTRE = 40
"""Keys that k-means looks at, for each centre."""


def default_num_lists(num_keys: int) -> int:
    return max(1, min(num_keys, round(3.2 * math.sqrt(num_keys))))


class CoarseIndex(CompiledIndex):
    """Eight-bit codes in `num_lists` lists; `width` of a query is how many of them it reads.

    Args:
        num_lists: None: about 3.2 sqrt(n), as is usual for inverted files.
    """

    kind = "coarse"
    own_arrays = ("centres", "blocks", "starts", "counts", "ids")
    read_by_row = frozenset({"keys", "blocks"})

    def __init__(self, num_lists: int | None = None) -> None:
        if num_lists is not None and num_lists < 1:
            raise ValueError(f"num_lists is {num_lists}, expected at least 1")
        self._wanted_lists = num_lists

    @property
    def num_lists(self) -> int:
        return len(self._arrays["counts"])

    def _build(self, coded: CodedKeys, train_queries: Any, seed: int, threads: int) -> None:
        elements, codes, rows = coded
        n = elements.shape[0]
        wanted = self._wanted_lists or default_num_lists(n)
        inside = np.setdiff1d(np.arange(n, dtype=np.int32), codes.outside)
        centres = _k_means(elements, codes, inside, max(1, min(wanted, len(inside))), seed)
        lists = _assign(elements, codes, inside, centres)
        self._fill(elements, codes, rows, centres, inside, lists)
        self.default_width = max(1, self.num_lists // 6)
        if train_queries is not None:
            self.default_width = learned_width(self, train_queries, seed, self.num_lists)

    def _fill(
        self,
        keys: Elements,
        codes: KeyCodes,
        rows: np.ndarray,
        centres: np.ndarray,
        inside: np.ndarray,
        lists: np.ndarray,
    ) -> None:
        counts = np.bincount(lists, minlength=len(centres))
        used = np.flatnonzero(counts)  # a centre that lost its keys would only be in the way
        centres, counts = centres[used], counts[used]
        list_blocks = -(-counts // BLOCK_KEYS)
        starts = np.concatenate([[0], np.cumsum(list_blocks)[:-1]]).astype(np.int64)
        by_list = inside[np.argsort(lists, kind="stable")]
        gaps = starts * BLOCK_KEYS - (np.cumsum(counts) - counts)
        ids = np.full(int(list_blocks.sum()) * BLOCK_KEYS, -1, np.int32)
        ids[np.arange(len(by_list)) + np.repeat(gaps, counts)] = by_list
        parts = (
            _centre_blocks(centres, codes), lay_out_blocks(rows, ids), starts,
            counts.astype(np.int32), ids,
        )  # fmt: skip
        self._set(keys, codes, dict(zip(self.own_arrays, parts, strict=True)))

    def _new_searcher(self) -> Any:
        centres, _, *lists = (self._arrays[name] for name in self.own_arrays)
        key_set = self._key_set("blocks")
        return _C.index.ListSearcher("auto", key_set, self._codes.outside, centres, *lists)

    def _has_codes(self, rows: np.ndarray) -> bool:
        self._check_lists(self._arrays)
        return np.array_equal(lay_out_blocks(rows, self._arrays["ids"]), self._arrays["blocks"])

    def _fits(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> bool:
        centres, blocks, starts, counts, ids = parts = list(arrays.values())
        width = settings["default_width"]
        block_bytes = BLOCK_KEYS * row_bytes(self.head_size)
        require(
            [array.dtype for array in parts] == [np.uint8, np.uint8, np.int64, np.int32, np.int32]
            and [array.ndim for array in parts] == [2, 2, 1, 1, 1],
            "coarse index: its arrays have the wrong types",
        )
        num_lists = len(counts)
        list_blocks = -(-counts.astype(np.int64) // BLOCK_KEYS)
        require(
            type(width) is int
            and 1 <= width <= num_lists
            and bool(np.all(counts >= 1))
            and np.array_equal(starts, np.cumsum(list_blocks) - list_blocks)
            and centres.shape == (-(-num_lists // BLOCK_KEYS), block_bytes)
            and blocks.shape == (int(list_blocks.sum()), block_bytes)
            and len(ids) == len(blocks) * BLOCK_KEYS
            and int(ids.max()) < self.num_keys,
            "coarse index: its lists do not fit together",
        )
        self._check_lists(arrays)
        return True

    def _check_lists(self, arrays: Mapping[str, np.ndarray]) -> None:
        """A search relies on all of this; the lists are known to lie within the ids."""
        ids, begins = arrays["ids"], arrays["starts"] * BLOCK_KEYS
        is_first = np.zeros(len(ids), bool)
        is_first[begins] = True
        used = np.zeros(len(ids) + 1, np.int8)
        used[begins] = 1
        used[begins + arrays["counts"]] -= 1
        is_used = np.cumsum(used[:-1], dtype=np.int8).astype(bool)
        members, is_first = ids[is_used], is_first[is_used]
        all_once = "coarse index: its lists do not hold every key once"
        require(int(members.min()) >= 0, all_once)
        require(
            bool(((members[1:] > members[:-1]) | is_first[1:]).all()),
            "coarse index: a list is not in the order of its keys",
        )
        times = np.bincount(members, minlength=self.num_keys)
        times[self._codes.outside] += 1
        require(bool((times == 1).all()), all_once)


def _k_means(
    keys: Elements, codes: KeyCodes, inside: np.ndarray, num_lists: int, seed: int
) -> np.ndarray:
    """float32 [num_lists, d] of centred keys, by Euclidean distance on a sample."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(inside, min(len(inside), num_lists * _KEYS_PER_CENTRE), replace=False)
    sample = Elements(keys.data[np.sort(chosen)], keys.dtype).to_float32() - codes.mean
    centres = sample[rng.choice(len(sample), num_lists, replace=False)].copy()
    for _ in range(_ITERATIONS):
        nearest = _nearest_centre(sample, centres)
        counts = np.bincount(nearest, minlength=num_lists)
        order = np.argsort(nearest, kind="stable")
        begins = np.cumsum(counts) - counts
        filled = np.flatnonzero(counts)
        sums = np.add.reduceat(sample[order], begins[filled], axis=0)
        centres[filled] = sums / counts[filled, None]
        empty = np.flatnonzero(counts == 0)
        centres[empty] = sample[rng.integers(0, len(sample), len(empty))]
    return centres


def _assign(keys: Elements, codes: KeyCodes, inside: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The list of each key in `inside`."""
    lists = np.empty(len(inside), np.int64)
    for begin in range(0, len(inside), 1 << 14):
        part = inside[begin : begin + (1 << 14)]
        values = Elements(keys.data[part], keys.dtype).to_float32() - codes.mean
        lists[begin : begin + len(part)] = _nearest_centre(values, centres)
    return lists


def _nearest_centre(values: np.ndarray, centres: np.ndarray) -> np.ndarray:
    half_norms = (centres * centres).sum(axis=1) / 2
    nearest = np.empty(len(values), np.int64)
    for begin in range(0, len(values), 1 << 12):
        part = values[begin : begin + (1 << 12)]
        nearest[begin : begin + len(part)] = (part @ centres.T - half_norms).argmax(axis=1)
    return nearest


def _centre_blocks(centres: np.ndarray, codes: KeyCodes) -> np.ndarray:
    values = Elements(np.ascontiguousarray(centres + codes.mean, np.float32), "float32")
    return blocks_in_order(encode_rows(values, codes.mean, codes.step, 1)[0])

# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen keys, computed where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_relay import _C
from vllm_relay._C import PageGuard
from vllm_relay.sparse.index import compiled_index
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import DTYPES, Elements, as_elements
from vllm_relay.sparse.index.key_index import KeyIndex
from vllm_relay.sparse.index.query_types import Dipr, QueryType

MEAN_TOKENS = _C.index.MEAN_KEYS
"""Adjacent tokens whose values have one mean, which stands for what is not read one by one."""


class AttentionState(NamedTuple):
    """Attention over some of the keys; parts merge by log-sum-exp (`merge_states`).

    Attributes:
        output: float32 [..., value_size]; 0 where there are no keys.
        lse: float32 [...]; natural logarithm of the softmax denominator, -inf where no keys are.
    """

    output: np.ndarray
    lse: np.ndarray


def attend(
    queries: Any,
    keys: Elements,
    values: Elements,
    ids: Sequence[np.ndarray],
    scale: float | None = None,
) -> AttentionState:
    """Attention of query i over the keys `ids[i]`.

    Args:
        queries: [g, d].
        keys, values: [n, d] and [n, value_size].
        ids: g arrays of positions in `keys`.
        scale: of the scores; 1 / sqrt(d) if None.

    Returns:
        output [g, value_size] and lse [g].

    Raises:
        ValueError: shapes do not fit or an id is none of the keys.

    Source: AlayaDB (2504.10326), section 7.2, data-centric attention.
    """
    queries = compiled_index.check_queries("queries", queries, keys.shape[1])
    if len(ids) != len(queries):
        raise ValueError(f"ids: {len(ids)} arrays, expected {len(queries)}, one for each query")
    if values.shape[0] != keys.shape[0]:
        raise ValueError(f"values: {values.shape[0]} rows, expected {keys.shape[0]} as keys")
    starts = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(each) for each in ids], out=starts[1:])
    flat = np.concatenate([compiled_index.NO_IDS, *ids])
    if flat.dtype.kind not in "iu" or (
        flat.size and not (flat.min() >= 0 and flat.max() < keys.shape[0])
    ):
        raise ValueError(f"ids: {flat}, expected whole numbers of 0 to {keys.shape[0] - 1}")
    flat = np.ascontiguousarray(flat, np.int32)
    output = np.empty((len(queries), values.shape[1]), np.float32)
    lse = np.empty(len(queries), np.float32)
    _C.index.attend_ids(
        "auto", queries, keys.data, DTYPES.index(keys.dtype), values.data,
        DTYPES.index(values.dtype), flat, starts, _scale(scale, keys.shape[1]), output, lse,
    )  # fmt: skip
    return AttentionState(output, lse)


class LayerStats(NamedTuple):
    """What the searches of a layer cost, all kv heads together.

    Attributes:
        distances, hops: as in `SearchStats`.
        bytes: of keys, codes, adjacency and values that were read.
        dropped_mass: float32 [kv_heads, group] where a query has `max_dropped_mass`, NaN for heads
            whose query has none.
        retrieved_tokens: tokens that at least one query of a kv head attends, summed over these.
    """

    distances: int
    hops: int
    bytes: int
    dropped_mass: np.ndarray | None
    retrieved_tokens: int


class SparseLayer:
    """The kv heads of one layer of a stored context: an index and values for each.

    Args:
        indexes: one for each kv head, all over the same tokens.
        values: [n, value_size] for each; `Elements` are not looked at.
        value_means: of `values` (`value_means`), for queries that estimate what they do not read;
            None: they do not.
        value_guards: of values in a file; each verifies a row at its first touch.

    Raises:
        ValueError: they do not fit together.
    """

    def __init__(
        self,
        indexes: Sequence[CompiledIndex],
        values: Sequence[Any],
        value_guards: Sequence[PageGuard | None] | None = None,
        value_means: Sequence[Elements] | None = None,
    ) -> None:
        if not indexes or len(indexes) != len(values):
            raise ValueError(
                f"{len(indexes)} indexes and {len(values)} arrays of values, expected one of each "
                "for every kv head"
            )
        self.indexes = list(indexes)
        self.values = [
            each if isinstance(each, Elements) else as_elements("values", each) for each in values
        ]
        self._value_guards = list(value_guards or [None] * len(values))
        self._value_means = value_means
        self.num_keys = indexes[0].num_keys
        self.head_size = indexes[0].head_size
        sizes = {(index.num_keys, index.head_size) for index in indexes}
        shapes = {each.shape for each in self.values}
        if len(sizes) > 1 or len(shapes) > 1 or self.values[0].shape[0] != self.num_keys:
            raise ValueError(
                f"indexes of (keys, head_size) {sorted(sizes)} and values of {sorted(shapes)}, "
                "expected the same for all kv heads"
            )

    def attend(
        self,
        queries: Any,
        query: QueryType | Sequence[QueryType | None],
        *,
        scale: float | None = None,
        begin: int = 0,
        prefix_len: int | None = None,
        window_max: Any = None,
        threads: int | None = None,
    ) -> tuple[AttentionState, LayerStats]:
        """Searches every head's index and attends what each query found.

        Args:
            queries: [kv_heads, group, d].
            query: of all kv heads, or one for each; None attends all keys that count.
            scale: of the scores in the softmax, also where the query says another one.
            window_max: [kv_heads, group]; as for `KeyIndex.search`.

        Returns:
            output [kv_heads, group, value_size] and lse [kv_heads, group], and what all searches
            cost.

        Raises:
            ValueError: an argument is unusable; names it.
            IndexDamagedError: what lies in a file is damaged.
        """
        array = compiled_index.check_queries("queries", queries, self.head_size, dims=3)
        if len(array) != len(self.indexes):
            raise ValueError(
                f"queries: of {len(array)} kv heads, expected {len(self.indexes)}, one for each"
            )
        asked = list(query) if isinstance(query, Sequence) else [query] * len(array)
        if len(asked) != len(array):
            raise ValueError(f"query: {len(asked)} of them, expected one or {len(array)}")
        if window_max is not None:
            window_max = compiled_index.check_window_max(window_max, array.shape[:2])
        parts = [self._part(head, each) for head, each in enumerate(asked)]
        heads, group, _ = array.shape
        output = np.empty((heads, group, self.values[0].shape[1]), np.float32)
        lse = np.empty((heads, group), np.float32)
        dropped_mass = np.empty((heads, group), np.float32)
        counts = np.empty((heads, 6), np.int64)
        prefix_len = compiled_index.check_prefix(prefix_len, self.num_keys)
        _C.index.attend_heads(
            parts, array, window_max, compiled_index.check_begin(begin, prefix_len), prefix_len,
            _scale(scale, self.head_size), output, lse, dropped_mass, counts,
            compiled_index.check_threads(threads),
        )  # fmt: skip
        distances, hops, _, num_values, num_tokens, _ = counts.sum(axis=0).tolist()
        num_bytes = num_values * compiled_index.key_bytes(self.values[0]) + sum(
            index.stats(each[0], each[1], each[2], each[5]).bytes
            for index, each in zip(self.indexes, counts.tolist(), strict=True)
        )
        is_bounded = any(each is not None and each.max_dropped_mass is not None for each in asked)
        stats = LayerStats(
            distances, hops, num_bytes, dropped_mass if is_bounded else None, num_tokens
        )
        return AttentionState(output, lse), stats

    def native_search(
        self, queries: Sequence[QueryType | None], begin: int, prefix_len: int
    ) -> Any:
        """What the C++ side is told of a search that many tokens ask for: one query for each kv
        head, and which keys count."""
        prefix_len = compiled_index.check_prefix(prefix_len, self.num_keys)
        parts = [self._part(head, each) for head, each in enumerate(queries)]
        return _C.host.LayerSearch(parts, compiled_index.check_begin(begin, prefix_len), prefix_len)

    def _part(self, head: int, query: QueryType | None) -> Any:
        """What the C++ side is told of a kv head."""
        index, values = self.indexes[head], self.values[head]
        means = None
        if self._value_means is not None and isinstance(query, Dipr) and query.estimate:
            means = self._value_means[head].data
        place = (
            values.data, DTYPES.index(values.dtype), self._value_guards[head], means, index.entries
        )  # fmt: skip
        if query is None:
            return _C.index.HeadPart(index.searcher, *place, True, 0, 0.0, 0, math.nan)
        k, reach = compiled_index.query_numbers(query, self.num_keys, self.head_size)
        return _C.index.HeadPart(
            index.searcher if query.max_dropped_mass is None else index.exact_searcher, *place,
            False, k, reach, index.width_of(query), compiled_index.mass_limit(query),
        )  # fmt: skip


def sparse_layer(
    indexes: Sequence[KeyIndex],
    values: Sequence[Elements],
    means: Sequence[Elements] | None = None,
    guards: Sequence[PageGuard | None] | None = None,
) -> SparseLayer | None:
    """With means of its values. None: an index of the user's own.

    Args:
        means: `value_means` of the values, if they are known.
    """
    compiled = [index for index in indexes if isinstance(index, CompiledIndex)]
    if len(compiled) < len(indexes):
        return None
    if means is None:
        means = [value_means(each, threads=1) for each in values]
    return SparseLayer(compiled, values, guards, means)


def value_means(values: Elements, threads: int) -> Elements:
    """Of [n, value_size]: [ceil(n / MEAN_TOKENS), value_size] of the same dtype; the last one may
    be of fewer tokens."""
    n, size = values.shape
    means = np.empty((-(-n // MEAN_TOKENS), size), values.data.dtype)
    _C.index.mean_rows("auto", values.data, DTYPES.index(values.dtype), means, threads)
    return Elements(means, values.dtype)


def merge_states(states: Sequence[AttentionState]) -> AttentionState:
    """One attention of parts over disjoint sets of keys, in float64 inside.

    Source: FlashAttention's merging of blocks; RelayAttention (Zhu et al., 2024), equation 4.
    """
    lses = np.stack([np.asarray(state.lse, np.float64) for state in states])
    top = lses.max(axis=0)
    weights = np.exp(lses - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=0)
    outputs = np.stack([np.asarray(state.output, np.float64) for state in states])
    merged = (weights[..., None] * outputs).sum(axis=0)
    total_by_row = np.where(total > 0, total, 1.0)[..., None]
    merged = merged / total_by_row
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isfinite(top), top, 0.0)
    return AttentionState(merged.astype(np.float32), lse.astype(np.float32))


def _scale(scale: float | None, head_size: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_size)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale is {scale}, expected a positive number")
    return scale

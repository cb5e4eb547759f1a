# SPDX-License-Identifier: Apache-2.0
"""What the faces of the C++ indexes share: checks of arguments, requests, answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_relay import _C
from vllm_relay.sparse.elements import STORAGE, Elements, as_elements
from vllm_relay.sparse.index import IndexDamagedError, SearchResult, SearchStats
from vllm_relay.sparse.key_codes import MAX_HEAD_SIZE, KeyCodes
from vllm_relay.sparse.query_types import Dipr, QueryType, TopK

NO_IDS = np.zeros(0, np.int32)


def check_keys(keys: Any, *, head_size: int | None = None, dtype: str | None = None) -> Elements:
    """[n, d] with n >= 1, finite, every d as in `head_size` where that is given."""
    elements = as_elements("keys", keys, dtype)
    if len(elements.shape) != 2:
        raise ValueError(f"keys: shape {list(elements.shape)}, expected [keys, head_size]")
    n, d = elements.shape
    if n < 1:
        raise ValueError("keys: there are none, expected at least one")
    if n >= 2**31:
        raise ValueError(f"keys: {n} of them, expected fewer than {2**31}")
    if head_size is not None and d != head_size:
        raise ValueError(f"keys: head_size {d}, expected {head_size} as in the index")
    if not 1 <= d <= MAX_HEAD_SIZE:
        raise ValueError(f"keys: head_size {d}, expected 1 to {MAX_HEAD_SIZE}")
    return elements


def check_queries(name: str, queries: Any, head_size: int) -> np.ndarray:
    """float32 [g, head_size], finite."""
    array = as_elements(name, queries).to_float32()
    if array.ndim != 2 or array.shape[1] != head_size:
        raise ValueError(f"{name}: shape {list(array.shape)}, expected [queries, {head_size}]")
    return np.ascontiguousarray(array)


def check_threads(threads: int | None) -> int:
    if threads is None:
        return len(os.sched_getaffinity(0))
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads is {threads!r}, expected a whole number >= 1 or None")
    return threads


def make_request(
    queries: np.ndarray,
    query: QueryType,
    *,
    num_keys: int,
    width: int,
    prefix_len: int | None,
    window_max: Any = None,
    entries: np.ndarray = NO_IDS,
    always: np.ndarray = NO_IDS,
) -> Any:
    """The C++ request; `width` is taken where the query says none."""
    if not isinstance(query, TopK | Dipr):
        raise ValueError(f"query is {query!r}, expected TopK or Dipr")
    if query.width is not None:
        width = query.width
    k, reach = (query.k, -1.0) if isinstance(query, TopK) else (0, query.range(queries.shape[1]))
    if window_max is not None:
        window_max = np.ascontiguousarray(window_max, np.float32)
        if window_max.shape != (len(queries),):
            raise ValueError(
                f"window_max: shape {list(window_max.shape)}, expected [{len(queries)}]"
            )
        if np.isnan(window_max).any() or np.isposinf(window_max).any():
            raise ValueError("window_max: NaN or infinity, expected finite numbers or -infinity")
    return _C.index.Request(
        queries, min(k, num_keys), reach, width, window_max,
        check_prefix(prefix_len, num_keys), entries, always,
    )  # fmt: skip


def check_prefix(prefix_len: int | None, num_keys: int) -> int:
    if prefix_len is None:
        return num_keys
    if isinstance(prefix_len, bool) or not isinstance(prefix_len, int | np.integer):
        raise ValueError(f"prefix_len is {prefix_len!r}, expected a whole number or None")
    if not 0 <= prefix_len <= num_keys:
        raise ValueError(f"prefix_len is {prefix_len}, expected 0 to {num_keys}")
    return int(prefix_len)


def check_entries(entry: Sequence[int] | np.ndarray | None, num_keys: int) -> np.ndarray:
    if entry is None:
        return NO_IDS
    ids = np.asarray(entry)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"entry: {entry!r}, expected a list of key ids")
    if ids.size and not (ids.min() >= 0 and ids.max() < num_keys):
        raise ValueError(f"entry: ids {ids.min()} to {ids.max()}, expected 0 to {num_keys - 1}")
    return np.ascontiguousarray(ids, np.int32)


def no_answers(num_queries: int) -> SearchResult:
    empty = [np.zeros(0, np.int32) for _ in range(num_queries)]
    scores = [np.zeros(0, np.float32) for _ in range(num_queries)]
    return SearchResult(empty, scores, SearchStats(0, 0, 0))


def to_result(outcome: Any, *, row_bytes: int, hop_bytes: int, key_bytes: int) -> SearchResult:
    ids, scores, distances, hops, rescored = outcome
    read = distances * row_bytes + hops * hop_bytes + rescored * key_bytes
    return SearchResult(ids, scores, SearchStats(distances, hops, read))


def require(condition: bool, message: str) -> None:
    if not condition:
        raise IndexDamagedError(message)


def key_bytes(keys: Elements) -> int:
    return keys.shape[1] * keys.data.itemsize


def restore_codes(
    settings: dict[str, Any], arrays: dict[str, np.ndarray]
) -> tuple[Elements, KeyCodes]:
    """Keys and their encoding from what `to_arrays` gave.

    Raises:
        IndexDamagedError: something is missing or does not fit.
    """
    try:
        keys = Elements(arrays["keys"], settings["dtype"])
        codes = KeyCodes.from_arrays(settings, arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise IndexDamagedError(f"index: {error!r} is missing or unusable") from error
    require(
        keys.dtype in STORAGE and keys.data.dtype == STORAGE[keys.dtype] and keys.data.ndim == 2,
        f"index: keys are {keys.data.dtype} {keys.data.shape} for dtype {keys.dtype!r}",
    )
    n, d = keys.shape
    require(n >= 1 and 1 <= d <= MAX_HEAD_SIZE, f"index: keys have shape {[n, d]}")
    for name, array in (("mean", codes.mean), ("step", codes.step)):
        require(
            array.shape == (d,) and array.dtype == np.float32,
            f"index: {name} is {array.dtype} {array.shape}, expected float32 {(d,)}",
        )
    outside = codes.outside
    require(
        outside.ndim == 1
        and outside.dtype == np.int32
        and (not outside.size or (outside.min() >= 0 and outside.max() < n)),
        "index: the keys without codes are none of its keys",
    )
    return keys, codes

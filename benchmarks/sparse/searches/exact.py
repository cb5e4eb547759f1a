# SPDX-License-Identifier: Apache-2.0
"""The right answers, by scoring every key in float32, and how much of them was found."""

from collections.abc import Iterator, Sequence

import numpy as np

BLOCK_SCORES = 2**25
RELATIVE_TIE = 1e-6
"""Of the lengths of query and key: scores this close to the k-th are as good, since float32 inner
products depend on the order of summation."""


def score_blocks(queries: np.ndarray, keys: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Blocks of (queries, their scores [block, n])."""
    size = max(1, BLOCK_SCORES // len(keys))
    for begin in range(0, len(queries), size):
        block = slice(begin, min(begin + size, len(queries)))
        yield block, queries[block] @ keys.T


def top_k(queries: np.ndarray, keys: np.ndarray, k: int) -> np.ndarray:
    """int32 [q, min(k, n)], best first."""
    k = min(k, len(keys))
    ids = np.empty((len(queries), k), np.int32)
    for block, scores in score_blocks(queries, keys):
        some = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, some, axis=1), axis=1, kind="stable")
        ids[block] = np.take_along_axis(some, order, axis=1)
    return ids


def ranges(queries: np.ndarray, keys: np.ndarray, beta: float) -> list[np.ndarray]:
    """The ids, ascending, of all keys whose score is at most `beta` below the query's best."""
    found = []
    for _, scores in score_blocks(queries, keys):
        found += [np.flatnonzero(row >= row.max() - beta) for row in scores]
    return found


def recall(
    found: Sequence[np.ndarray] | np.ndarray,
    queries: np.ndarray,
    keys: np.ndarray,
    truth: np.ndarray,
) -> np.ndarray:
    """[q]; the part of the k best keys that was found. Keys that tie with the k-th count as well.

    Args:
        found: ids of each query; negative ones stand for nothing.
        truth: [q, k], as `top_k` gives them.
    """
    k = truth.shape[1]
    parts = np.empty(len(queries))
    for i, (ids, query) in enumerate(zip(found, queries, strict=True)):
        ids = np.unique(ids[ids >= 0])
        last = keys[truth[i, -1]]
        worst = last @ query - RELATIVE_TIE * np.linalg.norm(last) * np.linalg.norm(query)
        parts[i] = min(k, int((keys[ids] @ query >= worst).sum())) / k
    return parts


def range_mass(
    found: Sequence[np.ndarray],
    truth: Sequence[np.ndarray],
    queries: np.ndarray,
    keys: np.ndarray,
    scale: float,
) -> np.ndarray:
    """[q]; of the attention mass that lies on the true range set, the part that was found."""
    parts = np.empty(len(queries))
    for i, (ids, true_ids, query) in enumerate(zip(found, truth, queries, strict=True)):
        logits = (keys[true_ids] @ query) * scale
        weights = np.exp(logits - logits.max())
        parts[i] = weights[np.isin(true_ids, ids)].sum() / weights.sum()
    return parts


def attention(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float
) -> np.ndarray:
    """float32 [q, value size]; attention over all keys."""
    output = np.empty((len(queries), values.shape[1]), np.float32)
    for block, logits in score_blocks(queries, keys):
        logits *= scale
        logits -= logits.max(axis=1, keepdims=True)
        np.exp(logits, out=logits)
        output[block] = (logits @ values) / logits.sum(axis=1, keepdims=True)
    return output

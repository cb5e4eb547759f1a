# SPDX-License-Identifier: Apache-2.0
"""What tells heads apart: how concentrated their attention is, and how queries differ from keys."""

import numpy as np

from benchmarks.sparse.heads.corpus import Head

BLOCK_QUERIES = 64


def softmax_weights(queries: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """float32 [q, n]"""
    logits = (queries @ keys.T) * scale
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits


def sorted_weights(head: Head, queries: int = 256, query_head: int = 0) -> np.ndarray:
    """float32 [queries, prefix_len], largest first, of the first test queries."""
    rows = head.queries[:queries, query_head]
    keys = head.keys[: head.prefix_len]
    blocks = [
        -np.sort(-softmax_weights(rows[i : i + BLOCK_QUERIES], keys, head.scale), axis=1)
        for i in range(0, len(rows), BLOCK_QUERIES)
    ]
    return np.concatenate(blocks)


def tokens_for_mass(weights: np.ndarray, mass: float = 0.9) -> np.ndarray:
    """int64 [q]; how many of the largest weights it takes to sum to `mass`."""
    return (weights.cumsum(axis=1, dtype=np.float64) < mass).sum(axis=1) + 1


def distinct_best_keys(head: Head, queries: int = 4096) -> float:
    """Different best keys of the first training queries, as a fraction of the queries."""
    rows = head.train_queries[:queries]
    best = [
        (rows[i : i + BLOCK_QUERIES] @ head.keys.T).argmax(axis=1)
        for i in range(0, len(rows), BLOCK_QUERIES)
    ]
    return len(np.unique(np.concatenate(best))) / len(rows)


def mahalanobis(head: Head) -> tuple[float, float]:
    """Mean Mahalanobis distances to the distribution of the keys: of test queries and of keys."""
    mean = head.keys.mean(axis=0, dtype=np.float64)
    covariance = np.cov(head.keys, rowvar=False, dtype=np.float64)
    inverse = np.linalg.pinv(np.atleast_2d(covariance))

    def distance(vectors: np.ndarray) -> float:
        centred = vectors - mean
        return float(
            np.sqrt(np.einsum("ij,jk,ik->i", centred, inverse, centred, optimize=True)).mean()
        )

    return distance(head.queries[:, 0]), distance(head.keys)


def top_k_overlap(head: Head, k: int = 100, queries: int = 256) -> float:
    """The part of a query's k best keys that the first and another head of its group share."""
    shared = []
    for group in head.queries[:queries]:
        scores = group @ head.keys[: head.prefix_len].T
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        shared += [len(np.intersect1d(best[0], other)) / k for other in best[1:]]
    return float(np.mean(shared))

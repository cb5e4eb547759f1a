# SPDX-License-Identifier: Apache-2.0
"""How many keys the exact answers to ranges and top-k have, and how far off attention is with these
keys alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.sparse.answer_errors import AnswerErrors
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK

ALPHAS = tuple(float(f"{10 ** (-power / 8):.2g}") for power in range(8, 49))
"""One step errs about 1.2 times less, and takes up to a tenth longer."""
TOP_KS = (50, 100, 200, 400, 800, 1600, 3200)
_BLOCK_QUERIES = 32


@dataclass(frozen=True)
class ExactAnswer:
    """Of one query type, over the queries of a sample.

    Attributes:
        mean_tokens: of one query's answer.
        error_p99: of the relative L2 errors of the attention output.
    """

    query: QueryType
    mean_tokens: float
    error_p99: float


def exact_answers(
    keys: Elements, values: Elements, queries: np.ndarray, scale: float | None = None
) -> list[ExactAnswer]:
    """Scores every key with every query.

    Args:
        keys, values: [n, d] and [n, value_size].
        queries: [tokens, group, d].
        scale: of the scores in the softmax; 1 / sqrt(d) if None.
    """
    key_rows, value_rows = keys.to_float32(), values.to_float32()
    rows = queries.reshape(-1, queries.shape[2])
    factor = np.float32(1 / math.sqrt(key_rows.shape[1]) if scale is None else scale)
    of_answers, counts, errors = AnswerErrors(value_rows), [], []
    for begin in range(0, len(rows), _BLOCK_QUERIES):
        weights = (rows[begin : begin + _BLOCK_QUERIES] * factor) @ key_rows.T
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        for each, whole in zip(weights, weights @ value_rows, strict=True):
            order = np.argsort(-each)
            falling = each[order]
            in_range = np.searchsorted(-falling, -np.array(ALPHAS, np.float32), side="right")
            ends = np.concatenate([in_range, np.minimum(TOP_KS, len(order))])
            sums = np.cumsum(falling, dtype=np.float64)
            masses = np.minimum(sums[ends - 1] / sums[-1], 1.0)
            counts.append(ends)
            errors.append(of_answers.of_query(order, falling, ends, masses, whole))
    tokens, error_p99s = np.mean(counts, axis=0), np.quantile(errors, 0.99, axis=0)
    asked: list[QueryType] = [*(Dipr(alpha=alpha) for alpha in ALPHAS), *(TopK(k) for k in TOP_KS)]
    return [
        ExactAnswer(query, float(count), float(error))
        for query, count, error in zip(asked, tokens, error_p99s, strict=True)
    ]

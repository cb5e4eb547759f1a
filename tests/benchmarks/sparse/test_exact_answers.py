# SPDX-License-Identifier: Apache-2.0
"""Exact answers against each on its own, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.sparse.answer_errors import SMALL_ERROR
from benchmarks.sparse.exact_answers import exact_answers
from vllm_relay.sparse.index.elements import from_float32
from vllm_relay.sparse.index.query_types import QueryType, TopK

KEYS, GROUP, SIZE = 700, 3, 32


def _plain(scores: np.ndarray, values: np.ndarray, asked: QueryType) -> tuple[int, float]:
    """(tokens, error) of one query with these scores, in nats."""
    if isinstance(asked, TopK):
        chosen = np.argsort(-scores)[: asked.k]
    else:
        chosen = np.flatnonzero(scores >= scores.max() + math.log(asked.alpha or 0))
    weights = np.exp(scores - scores.max())
    whole = weights @ values / weights.sum()
    part = weights[chosen] @ values[chosen] / weights[chosen].sum()
    return len(chosen), float(np.linalg.norm(part - whole) / np.linalg.norm(whole))


@pytest.mark.parametrize("deviation", [5.0, 1.5, 0.02], ids=["few", "some", "most tokens"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_answers_are_those_of_plain_float64(deviation: float, scale: float | None) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, KEYS, SIZE), np.float32)
    queries = np.float32(deviation) * rng.standard_normal((10, GROUP, SIZE), np.float32)
    stored = from_float32(keys, "float32"), from_float32(values, "float32")
    scores = (scale or SIZE**-0.5) * (queries.reshape(-1, SIZE).astype(np.float64) @ keys.T)
    for answer in exact_answers(*stored, queries, scale):
        plain = np.array([_plain(each, values, answer.query) for each in scores])
        assert answer.mean_tokens == pytest.approx(plain[:, 0].mean(), rel=0.01)
        exact = np.quantile(plain[:, 1], 0.99)
        # an answer that holds one that errs little is said to err as much
        assert answer.error_p99 == pytest.approx(exact, rel=3e-3) or (
            exact <= answer.error_p99 <= 4 * SMALL_ERROR
        )

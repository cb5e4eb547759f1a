# SPDX-License-Identifier: Apache-2.0
"""What searches of a sample find, against plain float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vllm_relay.sparse import CoarseIndex, Dipr, FlatIndex, GraphIndex, QueryType, TopK
from vllm_relay.sparse.index.elements import from_float32
from vllm_relay.sparse.plan.head_sample import HeadSample, error_p99_upper, exact_attention

KEYS, GROUP, SIZE = 700, 3, 32


def _states(seed: int = 0, deviation: float = 1.5) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((KEYS, SIZE), np.float32)
    values = rng.standard_normal((KEYS, SIZE), np.float32)
    queries = np.float32(deviation) * rng.standard_normal((10, GROUP, SIZE), np.float32)
    return keys, values, queries


def _sample(num_keys: int, scale: float | None, *states: np.ndarray) -> HeadSample:
    keys, values, queries = states
    stored = from_float32(keys, "float32"), from_float32(values, "float32")
    return HeadSample(*stored, queries, num_keys, scale)


def _plain(
    keys: np.ndarray, values: np.ndarray, query: np.ndarray, asked: QueryType, scale: float
) -> tuple[int, float, float]:
    """(tokens, mass, error) of one query."""
    keys, values, query = (each.astype(np.float64) for each in (keys, values, query))
    scores = keys @ query
    if isinstance(asked, TopK):
        chosen = np.argsort(-scores)[: asked.k]
    else:
        reach = -math.log(asked.alpha) / scale if asked.alpha else asked.beta
        chosen = np.flatnonzero(scores >= scores.max() - reach)
    weights = np.exp(scale * (scores - scores.max()))
    whole = weights @ values / weights.sum()
    part = weights[chosen] @ values[chosen] / weights[chosen].sum()
    error = np.linalg.norm(part - whole) / np.linalg.norm(whole)
    return len(chosen), weights[chosen].sum() / weights.sum(), float(error)


@pytest.mark.parametrize("deviation", [5.0, 1.5, 0.02], ids=["few", "some", "most tokens"])
@pytest.mark.parametrize("num_keys", [KEYS, 400])
@pytest.mark.parametrize(
    "asked", [Dipr(alpha=0.1), Dipr(alpha=0.01), Dipr(beta=9.0), TopK(40), TopK(300)]
)
def test_a_scan_finds_what_plain_float64_does(
    deviation: float, num_keys: int, asked: QueryType
) -> None:
    states = keys, values, queries = _states(deviation=deviation)
    sample = _sample(num_keys, None, *states)
    found = sample.search(FlatIndex().build(keys), asked)
    plain = np.array(
        [
            _plain(keys[:num_keys], values[:num_keys], query, asked, SIZE**-0.5)
            for query in queries.reshape(-1, SIZE)
        ]
    )
    assert found.work.found == pytest.approx(GROUP * plain[:, 0].mean(), rel=0.01)
    assert found.tokens_p99 == pytest.approx(np.quantile(plain[:, 0], 0.99), abs=1)
    assert found.mass_p1 == pytest.approx(np.quantile(plain[:, 1], 0.01), abs=1e-4)
    assert found.error_upper == pytest.approx(error_p99_upper(plain[:, 2]), rel=1e-2, abs=1e-4)
    assert (found.work.kind, found.work.num_keys, found.work.group) == ("flat", num_keys, GROUP)
    assert found.work.distances == pytest.approx(num_keys, abs=16)


def test_best_keys_and_hubs() -> None:
    keys, values, queries = _states()
    best = (queries @ keys.T).argmax(axis=2)
    sample = _sample(KEYS, None, keys, values, queries)
    assert np.array_equal(sample.exact.best, best)
    assert sample.hub_statistic == len(np.unique(best)) / best.size
    keys[0] = 100
    assert _sample(KEYS, None, keys, values, np.abs(queries)).hub_statistic == pytest.approx(1 / 30)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_exact_attention_is_that_of_float64(scale: float | None) -> None:
    keys, values, queries = _states()
    exact = exact_attention(keys, values, queries, scale)
    logits = (scale or SIZE**-0.5) * (queries.astype(np.float64) @ keys.T)
    lse = np.log(np.exp(logits).sum(axis=2))
    np.testing.assert_allclose(exact.lse, lse, rtol=1e-5)
    outputs = np.exp(logits - lse[..., None]) @ values
    np.testing.assert_allclose(exact.outputs, outputs, rtol=1e-4, atol=1e-5)


def test_hops_to_keys_behind_a_prefix_are_told() -> None:
    keys, values, queries = _states()
    graph, coarse = GraphIndex().build(keys), CoarseIndex(num_lists=20).build(keys)
    work = _sample(KEYS // 4, None, keys, values, queries).search(graph, TopK(20)).work
    assert work.hops > 0 and work.filtered_hops == pytest.approx(0.75 * work.hops)
    assert work.num_keys == KEYS
    work = _sample(KEYS, None, keys, values, queries).search(graph, TopK(20)).work
    assert work.filtered_hops == 0
    work = _sample(KEYS, None, keys, values, queries).search(coarse, TopK(20, width=5)).work
    assert (work.kind, work.centres, work.num_keys) == ("coarse", coarse.num_lists, KEYS)

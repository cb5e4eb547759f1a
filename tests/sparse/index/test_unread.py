# SPDX-License-Identifier: Apache-2.0
"""What attention does not read counts by the means of its values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_relay.sparse.index.elements import Elements, as_elements
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.index.sparse_layer import MEAN_TOKENS, SparseLayer, value_means

DEVIATIONS = 5
"""That many standard deviations no sum of rounding errors is off."""


def layer_of(keys: np.ndarray, values: np.ndarray) -> SparseLayer:
    """float32 [kv_heads, n, size]."""
    elements = [as_elements("values", head) for head in values]
    return SparseLayer(
        [FlatIndex().build(head, threads=1) for head in keys],
        elements,
        value_means=[value_means(each, 1) for each in elements],
    )


def code_nats(layer: SparseLayer, query: np.ndarray, scale: float) -> float:
    """Standard deviation of the scores that the upper halves of codes tell, in the softmax: a step
    of theirs is sixteen steps of a code."""
    step = layer.indexes[0].to_arrays()[1]["step"]
    return float(scale * np.linalg.norm(query * step) * 16 / math.sqrt(12))


def expected(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    reach: float,
    scale: float,
    begin: int,
    end: int,
    top: float,
    nats: float = 0.0,
) -> tuple[np.ndarray, float, float, float]:
    """Output and log-sum-exp in float64: keys in range count with their values, others of whole
    runs of tokens with the mean. And by how much these are others, at most, where scores of keys
    out of range are off by `nats`, as standard deviation: these weigh another share, and near the
    end of the range they are taken for keys on its other side."""
    scores = keys.astype(np.float64) @ query.astype(np.float64)
    counts = (np.arange(len(keys)) >= begin) & (np.arange(len(keys)) < end)
    best = max(top, scores[counts].max(initial=-math.inf))
    is_read = counts & (scores >= best - reach)
    weights = np.exp(scale * (scores - best))
    total, output = weights[is_read].sum(), weights[is_read] @ values[is_read].astype(np.float64)
    is_estimated = np.zeros(len(keys), bool)
    for first in range(0, len(keys), MEAN_TOKENS):
        last = min(first + MEAN_TOKENS, len(keys))
        if first < begin or last > end:
            continue
        is_estimated[first:last] = ~is_read[first:last]
        unread = weights[first:last][~is_read[first:last]].sum()
        total += unread
        output += unread * values[first:last].astype(np.float64).mean(axis=0)
    near_nats = DEVIATIONS * nats + 0.02
    is_near = counts & (np.abs(scale * (scores - best + reach)) < near_nats)
    estimated = weights[is_estimated]
    # mean and deviation of a sum of weights times e^error
    factor = math.exp(nats**2 / 2)
    wrong = (factor - 1) * estimated.sum()
    wrong += DEVIATIONS * factor * math.sqrt(math.expm1(nats**2) * (estimated**2).sum())
    wrong = wrong / total + 0.005
    near = weights[is_near].sum() / total
    spread = 2 * np.linalg.norm(values, axis=1).max()
    return output / total, math.log(total) + scale * best, (wrong + near) * spread, wrong + near


def relative(given: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(given - wanted) / max(np.linalg.norm(wanted), 1e-9))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
def test_means_of_values(n: int, dtype: str) -> None:
    rows = np.random.default_rng(n).normal(size=(n, 24)).astype(np.float32)
    if dtype == "bfloat16":
        bits = (rows.view(np.uint32) >> 16).astype(np.uint16)
        values = Elements(bits, dtype)
    else:
        values = as_elements("values", rows.astype(dtype))
    exact = values.to_float32().astype(np.float64)
    means = value_means(values, 2)
    assert means.dtype == dtype
    wanted = [exact[i : i + MEAN_TOKENS].mean(axis=0) for i in range(0, n, MEAN_TOKENS)]
    tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(means.to_float32(), wanted, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 700),
    size=st.sampled_from([8, 24, 64, 80, 128]),
    value_size=st.sampled_from([16, 64, 80]),
    group=st.integers(1, 5),
    alpha=st.sampled_from([0.7, 0.3, 0.01, 1e-4]),
    begin=st.integers(0, 3).map(lambda each: each * MEAN_TOKENS),
    shift=st.sampled_from([-math.inf, -300.0, 0.0, 40.0]),
    spread=st.sampled_from([0.3, 1.0, 4.0]),
    seed=st.integers(0, 99),
)
def test_as_in_float64(
    n: int,
    size: int,
    value_size: int,
    group: int,
    alpha: float,
    begin: int,
    shift: float,
    spread: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    keys = (spread * rng.normal(size=(1, n, size)) + rng.normal(size=size)).astype(np.float32)
    values = rng.normal(size=(1, n, value_size)).astype(np.float32)
    queries = rng.normal(size=(1, group, size)).astype(np.float32)
    begin, scale = min(begin, n), 1 / math.sqrt(size)
    tops = np.full((1, group), -math.inf, np.float32)
    if shift > -math.inf and begin < n:
        tops = (np.einsum("hgd,hnd->hgn", queries, keys)[..., begin:].max(-1) + shift).astype(
            np.float32
        )
    query = Dipr(alpha=alpha, estimate=True)
    layer = layer_of(keys, values)
    state, _ = layer.attend(queries, query, begin=begin, window_max=tops)
    assert np.isfinite(state.output).all()
    for g in range(group):
        if begin == n:
            assert state.lse[0, g] == -math.inf
            continue
        output, lse, slack, wrong = expected(
            queries[0, g], keys[0], values[0], query.range(size), scale, begin, n,
            float(tops[0, g]), code_nats(layer, queries[0, g], scale),
        )  # fmt: skip
        assert abs(math.expm1(state.lse[0, g] - lse)) < wrong + 0.01
        assert np.linalg.norm(state.output[0, g] - output) < slack


def test_what_is_read_counts_once() -> None:
    """With everything in range the answer is that of reading everything."""
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 2, 500, 64)).astype(np.float32)
    queries = rng.normal(size=(2, 3, 64)).astype(np.float32)
    layer = layer_of(keys, values)
    all_read, _ = layer.attend(queries, None)
    in_range, _ = layer.attend(queries, Dipr(beta=1e6, estimate=True))
    np.testing.assert_allclose(in_range.output, all_read.output, atol=2e-5)
    np.testing.assert_allclose(in_range.lse, all_read.lse, atol=2e-5)


def test_runs_cut_by_the_end_are_left_out() -> None:
    """Their means have values of tokens that do not count."""
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 1, 300, 64)).astype(np.float32)
    queries = rng.normal(size=(1, 1, 64)).astype(np.float32)
    changed = values.copy()
    changed[:, 200:] = 1e6
    asked = Dipr(alpha=0.5, estimate=True)
    found = [layer_of(keys, v).attend(queries, asked, prefix_len=200)[0] for v in (values, changed)]
    np.testing.assert_array_equal(found[0].output, found[1].output)


def test_closer_than_leaving_it_out() -> None:
    """Many keys of little weight have much together."""
    rng = np.random.default_rng(3)
    n, size = 4096, 64
    keys = (0.4 * rng.normal(size=(1, n, size))).astype(np.float32)
    values = (rng.normal(size=(1, n, size)) + np.sin(np.arange(n) / 300)[:, None]).astype(
        np.float32
    )
    queries = (3 * rng.normal(size=(1, 4, size))).astype(np.float32)
    layer = layer_of(keys, values)
    everything = layer.attend(queries, None)[0].output
    left_out = layer.attend(queries, Dipr(alpha=0.1))[0].output
    estimated = layer.attend(queries, Dipr(alpha=0.1, estimate=True))[0].output
    assert relative(estimated, everything) < 0.5 * relative(left_out, everything)


def test_scores_far_above_what_was_expected() -> None:
    """The first weights are counted anew when better keys come."""
    rng = np.random.default_rng(5)
    n, size = 640, 64
    direction = np.ones(size, np.float32)
    keys = np.outer(np.linspace(-30, 30, n), direction).astype(np.float32)[None]
    values = rng.normal(size=(1, n, 16)).astype(np.float32)
    queries = 2 * direction[None, None]
    for tops in (-math.inf, -1e30, -2000.0):
        state, _ = layer_of(keys, values).attend(
            queries,
            Dipr(alpha=0.9, estimate=True),
            window_max=np.full((1, 1), tops, np.float32),
        )
        output, lse, _, _ = expected(
            queries[0, 0], keys[0], values[0], -math.log(0.9) * 8, 1 / 8, 0, n, tops
        )
        assert relative(state.output[0, 0], output) < 0.1
        assert abs(state.lse[0, 0] - lse) < 0.2


def test_codes_that_tell_what_no_float_holds_tell_nothing() -> None:
    """A file may say anything of them, with the right checksums."""
    rng = np.random.default_rng(14)
    keys, values = rng.normal(size=(2, 300, 64)).astype(np.float32)
    settings, arrays = FlatIndex().build(keys, threads=1).to_arrays()
    arrays["mean"] = np.full(64, -1e38, np.float32)
    forged = FlatIndex.from_arrays(settings, arrays)
    elements = as_elements("values", values)
    layer = SparseLayer([forged], [elements], value_means=[value_means(elements, 1)])
    queries = 100 * rng.normal(size=(1, 4, 64)).astype(np.float32)
    state, _ = layer.attend(queries, Dipr(alpha=2e-4, estimate=True))
    assert np.isfinite(state.output).all()


def test_estimates_and_bounds_are_one_or_the_other() -> None:
    with pytest.raises(ValueError, match="expected one of them"):
        Dipr(alpha=0.1, max_dropped_mass=0.01, estimate=True)

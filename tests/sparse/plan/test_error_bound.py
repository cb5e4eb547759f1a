# SPDX-License-Identifier: Apache-2.0
"""Bounds of the 99% quantile against distributions whose quantile is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vllm_relay.sparse.plan.head_sample import error_p99_upper

DEVIATION = 0.5
P99 = math.exp(2.3263 * DEVIATION)
TOKENS, GROUP, SAMPLES = 64, 4, 400


def _lognormal_samples(tokens: int, likeness: float) -> np.ndarray:
    """[SAMPLES, tokens, GROUP], 99% of which are below P99; `likeness` is the correlation of the
    queries of a token. The tail is as long as those of the heads `rope` and `hubs`."""
    rng = np.random.default_rng(0)
    of_token = rng.standard_normal((SAMPLES, tokens, 1))
    own = rng.standard_normal((SAMPLES, tokens, GROUP))
    return np.exp(DEVIATION * (math.sqrt(likeness) * of_token + math.sqrt(1 - likeness) * own))


@pytest.mark.parametrize("tokens", [8, 16, 32, TOKENS, 200])
@pytest.mark.parametrize("likeness", [0.0, 0.5])
def test_most_samples_bound_the_quantile(tokens: int, likeness: float) -> None:
    samples = _lognormal_samples(tokens, likeness)
    bounds = np.array([error_p99_upper(sample) for sample in samples])
    plain = np.array([np.quantile(sample, 0.99) for sample in samples])
    assert np.mean(bounds >= P99) >= 0.93
    assert np.mean(plain >= P99) < 0.6


def test_the_margin_shrinks_with_the_sample_and_with_the_tail() -> None:
    few, many = _lognormal_samples(200, 0.0), _lognormal_samples(1000, 0.0)
    margins = [
        np.median([error_p99_upper(s) / np.quantile(s, 0.99) for s in each]) for each in (few, many)
    ]
    assert margins[0] > margins[1] > 1
    short_tailed = np.median([error_p99_upper(s**0.1) / np.quantile(s**0.1, 0.99) for s in few])
    assert 1 < short_tailed < 1 + 0.2 * (margins[0] - 1)


def test_the_bound_of_a_large_sample_is_one_of_its_errors() -> None:
    errors = np.arange(1, 1001, dtype=np.float64)
    # one deviation of a binomial count is sqrt(0.99 * 0.01 * 1000); three queries count as one
    assert error_p99_upper(errors) == pytest.approx(990.01 + 1.6 * math.sqrt(3 * 9.9), abs=0.1)
    assert error_p99_upper(np.full(1000, 0.3)) == pytest.approx(0.3)


def test_small_samples_are_not_believed() -> None:
    bounds = [error_p99_upper(np.full(size, 0.01)) for size in (1, 10, 100, 800)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > 0.05 and bounds[-1] == pytest.approx(0.01)

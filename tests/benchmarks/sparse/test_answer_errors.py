# SPDX-License-Identifier: Apache-2.0
"""Errors of nested answers against each answer on its own, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.sparse.answer_errors import SMALL_ERROR, AnswerErrors

KEYS, SIZE = 3000, 24


@pytest.mark.parametrize("deviation", [0.3, 2.0, 5.0])
def test_each_answer_errs_as_it_does_alone(deviation: float) -> None:
    rng = np.random.default_rng(0)
    scores = np.sort(deviation * rng.standard_normal(KEYS))[::-1]
    order = rng.permutation(KEYS)
    weights = np.exp(scores - scores[0]).astype(np.float32)
    values = rng.standard_normal((KEYS, SIZE), np.float32)
    ends = np.array([50, 1, 7, 2999, 700, KEYS, 50, 1500])
    chosen, exact = values[order].astype(np.float64), weights.astype(np.float64)
    whole = exact @ chosen
    masses = np.cumsum(exact)[ends - 1] / exact.sum()
    found = AnswerErrors(values).of_query(order, weights, ends, masses, whole.astype(np.float32))
    truth = whole / exact.sum()
    for end, error in zip(ends, found, strict=True):
        part = exact[:end] @ chosen[:end] / exact[:end].sum()
        expected = np.linalg.norm(part - truth) / np.linalg.norm(truth)
        if end == KEYS and error == 0:
            continue
        # larger answers than one that errs little are said to err as much
        assert (
            error == pytest.approx(expected, rel=1e-3, abs=1e-6) or expected <= error < SMALL_ERROR
        )
    assert found[0] == found[6]
    is_part = ends <= 1500
    of_part = AnswerErrors(values).of_query(
        order[:1500], weights[:1500], ends[is_part], masses[is_part], whole.astype(np.float32)
    )
    np.testing.assert_allclose(of_part, found[is_part], rtol=1e-4)
    assert of_part[-1] > 0


def test_an_answer_of_all_keys_is_exact() -> None:
    values = np.ones((5, 3), np.float32) * np.arange(1, 6, dtype=np.float32)[:, None]
    weights = np.ones(5, np.float32)
    errors = AnswerErrors(values).of_query(
        np.arange(5), weights, np.array([5, 1]), np.array([1.0, 0.2]), weights @ values
    )
    assert errors.tolist() == [0, pytest.approx(2 / 3)]

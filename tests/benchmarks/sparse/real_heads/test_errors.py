# SPDX-License-Identifier: Apache-2.0
"""Errors against dense attention, and curves of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.sparse.real_heads.errors import Errors, Summary, at_bytes
from benchmarks.sparse.real_heads.model import Read


def test_errors_are_those_of_the_likeliest_tokens() -> None:
    dense = torch.log_softmax(torch.arange(20.0).flip(0)[None].expand(2, -1), -1)
    found = dense.clone()
    found[0, 0] += 0.5
    found[0, 9] -= 0.25
    found[1, 10] += 20  # not among dense's ten likeliest
    errors = Errors.between(dense, found, Read(0.1, 0.2, 0.3))
    expected = np.zeros(20)
    expected[[0, 9]] = 0.5, 0.25
    np.testing.assert_allclose(np.sort(errors.differences), np.sort(expected), atol=1e-5)
    p = dense[0].exp()
    assert errors.divergences[0] == pytest.approx((0.25 * p[9] - 0.5 * p[0]).item(), rel=1e-4)
    assert errors.same_best.tolist() == [True, False]


def test_summaries_are_over_all_tokens() -> None:
    def errors(differences: list[float], same: list[bool], read: Read) -> Errors:
        return Errors(np.array(differences), np.array([0.1] * len(same)), np.array(same), read)

    parts = [
        errors([0.0, 2.0], [True], Read(0.1, 0.2, 0.4)),
        errors([1.0, 1.0, 1.0, 1.0], [True, False], Read(0.3, 0.4, 0.6)),
    ]
    summary = Summary.of(parts)
    assert summary.mean == 1
    assert summary.p99 == pytest.approx(1.95)
    assert summary.same_best == pytest.approx(2 / 3)
    assert summary.read == Read(*(pytest.approx(x) for x in (0.2, 0.3, 0.5)))


def test_errors_at_bytes_between_measured_ones() -> None:
    assert at_bytes(0.2, [0.1, 0.4], [1.0, 0.25]) == pytest.approx(0.5)
    assert at_bytes(0.2, [0.4, 0.1], [0.25, 1.0]) == pytest.approx(0.5)
    assert at_bytes(0.4, [0.1, 0.4], [1.0, 0.25]) == pytest.approx(0.25)
    assert at_bytes(0.05, [0.1, 0.4], [1.0, 0.25]) is None
    assert at_bytes(0.5, [0.1, 0.4], [1.0, 0.25]) is None
    assert at_bytes(0.2, [0.0, 0.1, 0.4], [9.0, 1.0, 0.25]) == pytest.approx(0.5)
    assert at_bytes(0.0, [0.0, 0.1], [9.0, 1.0]) == pytest.approx(9)

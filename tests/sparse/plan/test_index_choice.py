# SPDX-License-Identifier: Apache-2.0
"""Which queries the plan of a head goes by."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_relay.sparse.plan.index_choice import sample_rows


def test_queries_of_a_sample_are_neighbours_of_the_last_quarter() -> None:
    rows = sample_rows(6000, 3)
    assert rows.shape == (192, 3)
    assert (np.diff(rows, axis=1) == 1).all()
    assert rows.min() >= 4500 and rows.max() == 5999
    assert len(np.unique(rows)) == rows.size


@pytest.mark.parametrize(("num_queries", "tokens"), [(0, 0), (23, 0), (24, 1), (100, 4)])
def test_few_queries_give_a_small_sample_or_none(num_queries: int, tokens: int) -> None:
    rows = sample_rows(num_queries, 3)
    assert rows.shape == (tokens, 3)
    assert len(np.unique(rows)) == rows.size
    assert not rows.size or (rows.min() >= 0 and rows.max() < num_queries)

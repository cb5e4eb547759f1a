# SPDX-License-Identifier: Apache-2.0
"""What default widths find for queries of the tokens behind a context, which no index has seen."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.sparse.heads.corpus import make_head
from vllm_relay.sparse import CoarseIndex, FlatIndex, GraphIndex, TopK

KEYS, TESTS, K = 4096, 200, 100


@pytest.mark.parametrize("index_class", [GraphIndex, CoarseIndex])
@pytest.mark.parametrize("kind", ["rope", "hubs"])
@pytest.mark.parametrize("seed", [300, 301, 302])
def test_later_queries_find_nearly_all_of_their_best_keys(
    index_class: type[GraphIndex] | type[CoarseIndex], kind: str, seed: int
) -> None:
    head = make_head(kind, keys=KEYS, train=round(0.4 * KEYS), tests=TESTS, seed=seed)
    flat = FlatIndex().build(head.keys)
    index = index_class().build(head.keys, head.train_queries)
    recalls = []
    for query in head.queries:
        wanted, found = (each.search(query, TopK(K)).ids[0] for each in (flat, index))
        recalls.append(len(np.intersect1d(wanted, found)) / K)
    assert np.mean(recalls) >= 0.95

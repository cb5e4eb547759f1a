# SPDX-License-Identifier: Apache-2.0
"""Whether the bound on the attention mass that a search left out ever lies below the truth."""

from __future__ import annotations

import numpy as np

from benchmarks.sparse.heads.corpus import Head
from benchmarks.sparse.searches.contenders import OwnIndex
from benchmarks.support.formatting import Row
from tests.support import reference
from vllm_relay.sparse import Dipr, QueryType, TopK

QUERIES_AT_ONCE = 16
TOLERANCE = 1e-6
"""The bound is a float32 number."""
QUERIES: tuple[QueryType, ...] = (
    TopK(10, max_dropped_mass=1.0),
    TopK(100, max_dropped_mass=0.1),
    Dipr(alpha=0.1, max_dropped_mass=1.0),
    Dipr(alpha=1e-3, max_dropped_mass=0.01),
)


def bound_row(contender: OwnIndex, head: Head) -> Row:
    """All test queries of a head, of whatever query head, with each of `QUERIES` in turn."""
    queries = head.queries.reshape(-1, head.head_size)
    keys = head.keys[: head.prefix_len].astype(np.float64)
    slack, violated, most_wrong = [], 0, 0.0
    for number, begin in enumerate(range(0, len(queries), QUERIES_AT_ONCE)):
        part = queries[begin : begin + QUERIES_AT_ONCE]
        query = QUERIES[number % len(QUERIES)]
        found = contender.index.search(part, query, prefix_len=head.prefix_len)
        assert found.stats.dropped_mass is not None
        dropped = reference.dropped_mass(part, keys, found.ids, scale=head.scale)
        over = dropped - found.stats.dropped_mass
        violated += int((over > TOLERANCE).sum())
        most_wrong = max(most_wrong, float(over.max()))
        slack += list(-over)
    return {
        "contender": contender.name,
        "queries": len(queries),
        "bound violated": violated,
        "most by which": most_wrong,
        "bound minus truth, median": float(np.median(slack)),
        "bound minus truth, p99": float(np.quantile(slack, 0.99)),
    }

# SPDX-License-Identifier: Apache-2.0
"""Costs made up for tests of plans."""

from __future__ import annotations

from vllm_relay.sparse.plan.search_cost import KINDS, KindCost, SearchCost

COSTS = SearchCost(
    (4096, 131072),
    {
        "full": (KindCost(found_ns=25), KindCost(found_ns=30)),
        "flat": (
            KindCost(12, 2, 2, 0.5, rescored_ns=30, found_ns=60),
            KindCost(12, 2, 4, 0.7, rescored_ns=60, found_ns=80),
        ),
        "coarse": (
            KindCost(15, 2, 1, 1, 70, 0, 4, rescored_ns=30, found_ns=60),
            KindCost(15, 2, 2, 1, 150, 0, 4, rescored_ns=60, found_ns=80),
        ),
        "graph": (
            KindCost(15, 2, 2, 1.5, 60, 15, rescored_ns=30, found_ns=60),
            KindCost(15, 2, 6, 1.5, 100, 30, rescored_ns=60, found_ns=80),
        ),
    },
)


def costs_with_cheap(cheap: str) -> SearchCost:
    """Of which one kind is a thousand times as fast as others."""
    return SearchCost((1000,), {kind: (KindCost(1 if kind == cheap else 1000),) for kind in KINDS})

# SPDX-License-Identifier: Apache-2.0
"""Profiles and costs made up for tests of plans."""

from __future__ import annotations

from typing import Any

from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.plan.head_profile import ExactAnswer, HeadProfile, MeasuredSearch, Spread
from vllm_relay.sparse.plan.search_cost import KINDS, KindCost, SearchCost

COSTS = SearchCost(
    (4096, 131072),
    {
        "full": (KindCost(found_ns=25), KindCost(found_ns=30)),
        "flat": (
            KindCost(12, 2, 2, 0.5, rescored_ns=30, found_ns=60, build_us=1),
            KindCost(12, 2, 4, 0.7, rescored_ns=60, found_ns=80, build_us=1),
        ),
        "coarse": (
            KindCost(15, 2, 1, 1, 70, 0, 4, rescored_ns=30, found_ns=60, build_us=20),
            KindCost(15, 2, 2, 1, 150, 0, 4, rescored_ns=60, found_ns=80, build_us=25),
        ),
        "graph": (
            KindCost(15, 2, 2, 1.5, 60, 15, rescored_ns=30, found_ns=60, build_us=100),
            KindCost(15, 2, 6, 1.5, 100, 30, rescored_ns=60, found_ns=80, build_us=200),
        ),
    },
)


def costs_with_cheap(cheap: str) -> SearchCost:
    """Of which one kind is a thousand times as fast as others."""
    return SearchCost((1000,), {kind: (KindCost(1 if kind == cheap else 1000),) for kind in KINDS})


def answer(alpha: float, tokens: float, error: float | None, mass: float = 0.995) -> ExactAnswer:
    counts = Spread(tokens, 2 * tokens, 3 * tokens)
    return ExactAnswer(Dipr(alpha=alpha), counts, tokens, mass, mass, error, error)


def search(
    kind: str,
    width: int | None,
    *,
    error: float | None = 0.005,
    distances: float = 5000,
    hops: float = 200,
    found: float = 100,
    mass: float = 0.995,
    alpha: float = 0.01,
    time_us: float | None = None,
) -> MeasuredSearch:
    query = None if kind == "full" else Dipr(alpha=alpha, width=width)
    return MeasuredSearch(
        kind, query, distances, hops, found, found, mass, mass, error, error, time_us
    )


def head(num_keys: int, *answers: ExactAnswer, **changes: Any) -> HeadProfile:
    """Of a head that has answers good enough among `answers`."""
    given = answers or (answer(0.1, 10, 0.2, 0.8), answer(0.01, 50, 0.005), answer(1e-3, 200, 1e-3))
    tokens = Spread(20, 50, 90)
    fields: dict[str, Any] = {
        "prefix_len": num_keys, "head_size": 128, "key_bytes": 256, "value_bytes": 256,
        "group_size": 4, "num_queries": 128, "tokens_for_mass": (tokens, tokens, tokens),
        "hub_statistic": 0.8, "answers": given,
    }  # fmt: skip
    return HeadProfile(**{**fields, **changes})

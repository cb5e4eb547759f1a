# SPDX-License-Identifier: Apache-2.0
"""Costs of searches that make an index pay at once, or when a test wants it to."""

from __future__ import annotations

from vllm_relay.sparse.search_cost import KindCost, SearchCost


def made_costs(*, flat_ns: float = 1e5, build_us: float = 0.0, graph_us: float = 1e9) -> SearchCost:
    """
    Args:
        flat_ns: of a scan, for each key.
        build_us: of a coarse index, for each key. Its searches cost next to nothing.
        graph_us: of a search of a graph.
    """
    return SearchCost(
        (1,),
        {
            "full": (KindCost(found_ns=1e6),),
            "flat": (KindCost(distance_ns=flat_ns),),
            "coarse": (KindCost(hop_ns=1e-3, build_us=build_us),),
            "graph": (KindCost(call_us=graph_us),),
        },
    )

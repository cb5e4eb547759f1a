# SPDX-License-Identifier: Apache-2.0
"""The fixed rules of the AlayaDB paper, beside plans by cost."""

from __future__ import annotations

from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK

RULES_TOP_K = 100
RULES_RANGE = Dipr(alpha=0.01)
SHORT_CONTEXT_TOKENS = 2048


def way_by_rules(
    prefix_len: int, *, layer: int | None = None, has_memory: bool = False
) -> tuple[str, QueryType | None]:
    """Kind of index and query: short contexts are read as a whole; with memory set aside for it,
    the 100 best keys of a coarse index; otherwise a range query, of a flat index in the first layer
    and of a graph in the others. The prefix filters whatever is asked.

    Args:
        prefix_len: tokens that count.
        layer: of the model; None for any but the first.

    Source: AlayaDB (2504.10326), section 6.2, figure 8.
    """
    if prefix_len < SHORT_CONTEXT_TOKENS:
        return "full", None
    if has_memory:
        return "coarse", TopK(RULES_TOP_K)
    return ("flat" if layer == 0 else "graph"), RULES_RANGE

# SPDX-License-Identifier: Apache-2.0
"""The fixed rules of the AlayaDB paper, beside plans by cost."""

from __future__ import annotations

from dataclasses import replace

from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK
from vllm_relay.sparse.plan.head_profile import HeadProfile
from vllm_relay.sparse.plan.planner import Plan, alternative_of
from vllm_relay.sparse.plan.search_candidates import candidates
from vllm_relay.sparse.plan.search_cost import SearchCost, index_bytes

RULES_TOP_K = 100
RULES_RANGE = Dipr(alpha=0.01)
SHORT_CONTEXT_TOKENS = 2048


def plan_by_rules(
    context_len: int,
    prefix_len: int | None,
    head_profile: HeadProfile,
    costs: SearchCost,
    memory_budget: int | None = None,
    *,
    layer: int | None = None,
) -> Plan:
    """Short contexts are read as a whole; with memory set aside for it, the 100 best keys of a
    coarse index; otherwise a range query, of a flat index in the first layer and of a graph in the
    others. The prefix filters whatever is asked.

    Args:
        context_len, prefix_len, head_profile, costs: as for `planner.plan`. The profile says what
            to expect of the choice, not what to choose.
        memory_budget: None: none was set aside.
        layer: of the model; None for any but the first.

    Source: AlayaDB (2504.10326), section 6.2, figure 8.
    """
    prefix_len = context_len if prefix_len is None else prefix_len
    coarse_bytes = index_bytes("coarse", context_len, head_profile.head_size)
    kind: str
    query: QueryType | None
    if prefix_len < SHORT_CONTEXT_TOKENS:
        kind, query = "full", None
        reason = f"rule: contexts below {SHORT_CONTEXT_TOKENS} tokens are read as a whole"
    elif memory_budget is not None and coarse_bytes <= memory_budget:
        kind, query = "coarse", TopK(RULES_TOP_K)
        reason = f"rule: {coarse_bytes} bytes of coarse index fit"
    elif layer == 0:
        kind, query = "flat", RULES_RANGE
        reason = "rule: first layers need many tokens"
    else:
        kind, query = "graph", RULES_RANGE
        reason = "rule: no memory for a coarse index, and not the first layer"
    near = min(
        candidates(head_profile, context_len, prefix_len, (kind,)),
        key=lambda each: _distance(each.query, query),
    )
    # the index's own default width
    chosen = replace(alternative_of(near, head_profile, context_len, costs), query=query)
    return Plan(chosen, (chosen,), reason)


def _distance(found: QueryType | None, wanted: QueryType | None) -> float:
    """How far a query is from the wanted one; other types are farthest."""
    if isinstance(found, TopK) and isinstance(wanted, TopK):
        return abs(found.k - wanted.k)
    if isinstance(found, Dipr) and isinstance(wanted, Dipr):
        return abs(found.range(128) - wanted.range(128))
    return 0.0 if found is wanted else float("inf")

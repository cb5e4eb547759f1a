# SPDX-License-Identifier: Apache-2.0
"""The groups of a step whose sharing pays, on any device, and what they save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_relay.attention_backends.cost import KernelCost
from vllm_relay.attention_backends.forest import (
    BEGIN_TOKENS,
    END_TOKENS,
    FIRST,
    LAST,
    NULL_BLOCK,
    REQUEST,
    Forest,
    build_forest,
)
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens
from vllm_relay.attention_backends.ragged import starts


@dataclass(frozen=True)
class PlanStats:
    """What one step shares, or several summed up."""

    steps: int = 1
    requests: int = 0
    requests_shared: int = 0
    kv_tokens_logical: int = 0
    """KV tokens attended to, summed over requests."""
    kv_tokens_read: int = 0
    """The same with a range that several requests share counted once."""
    forest_depth: int = 0
    groups: int = 0
    planning_time_s: float = 0.0


def find_groups(
    block_table: np.ndarray,
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    *,
    block_size: int,
    group_size: int,
    cost: KernelCost,
    min_shared_tokens: int = 0,
    hidden: HiddenTokens | None = None,
) -> Forest:
    """Every group of requests for which reading a range together costs less than apart.

    Args:
        block_table: int32 [requests, blocks]; physical block ids, 0 is the null block.
        query_lens: int [requests]; requests without query tokens are in no group.
        seq_lens: int [requests]; KV tokens of each request, its query tokens included.
        block_size: tokens per block.
        group_size: query heads per kv head.
        cost: of the kernels that will read the ranges.
        min_shared_tokens: ranges that end before this are left alone.
        hidden: tokens that the query tokens of a request do not see.
    """
    ids = block_table if hidden is None else hidden.visible_block_ids(block_table, block_size)
    # the first query token of a request sees this many tokens, and the others see more
    tokens = np.where(query_lens > 0, seq_lens - query_lens + 1, 0)
    found = build_forest(ids, tokens, block_size)
    return that_pay(found, query_lens * group_size, cost, min_shared_tokens)


def forest_for(
    forest: Forest | str | None,
    block_table: np.ndarray,
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    *,
    block_size: int,
    **keywords: Any,
) -> Forest:
    """What public functions mean by `forest`: "auto" is what `find_groups` finds, with its
    arguments; None shares nothing; a Forest is used as it is.

    Raises:
        ValueError: for a Forest which does not describe these requests.
    """
    if forest is None:
        return Forest.none(len(seq_lens))
    if isinstance(forest, Forest):
        check_forest(forest, block_table, query_lens, seq_lens, block_size)
        return forest
    return find_groups(block_table, query_lens, seq_lens, block_size=block_size, **keywords)


def check_forest(
    forest: Forest,
    block_table: np.ndarray,
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    block_size: int,
) -> None:
    """Check that a forest describes requests with these block tables and lengths.

    Raises:
        ValueError: what the first inconsistency is.
    """
    if len(forest.order) != len(seq_lens):
        raise ValueError(
            f"forest: it orders {len(forest.order)} requests, the batch has {len(seq_lens)}"
        )
    forest.validate()
    for index, (first, last, begin, end, request) in enumerate(forest.nodes.tolist()):
        if end % block_size:
            raise ValueError(
                f"forest: node {index} ends at token {end}, expected a multiple of the block size "
                f"{block_size}"
            )
        members = forest.order[first:last]
        visible = int((seq_lens - query_lens + 1)[members].min())
        if (query_lens[members] > 0).any() and end > visible:
            raise ValueError(
                f"forest: node {index} ends at token {end}, but a member's first query token sees "
                f"only {visible} tokens"
            )
        blocks = slice(begin // block_size, end // block_size)
        theirs, shared = block_table[members, blocks], block_table[request, blocks]
        # a sliding window leaves null blocks where nobody looks
        differing = ((theirs != shared) & (theirs != NULL_BLOCK)).any(axis=1)
        if differing.any():
            raise ValueError(
                f"forest: requests {members[differing].tolist()} of node {index} do not have the "
                f"blocks of request {request} for tokens {begin}..{end}"
            )


def that_pay(
    forest: Forest, rows_per_request: np.ndarray, cost: KernelCost, min_shared_tokens: int
) -> Forest:
    """The nodes that cost least together, all others being left to their children and members.

    Whether a node pays depends on which of its ancestors do, whose ranges it takes over otherwise,
    and on which nodes below it do. So each is looked at from the bottom up for every nearest
    ancestor that may be kept.

    Args:
        forest: as it was found.
        rows_per_request: int [requests].
        cost: of the kernels that will read the ranges.
        min_shared_tokens: ranges that end before this are left alone.
    """
    nodes, parents, depth = forest.nodes, forest.parents, forest.depth
    if not depth:
        return forest
    rows = rows_per_request[forest.order]
    rows_before = starts(rows)
    node_rows = rows_before[nodes[:, LAST]] - rows_before[nodes[:, FIRST]]
    together_ns, start_ns = cost.token_ns(node_rows), cost.start_ns(node_rows)
    # members in no child read a range alone, and go on to a range of their own
    before = starts(cost.token_ns(rows))
    members_ns = before[nodes[:, LAST]] - before[nodes[:, FIRST]]
    alone_ns = members_ns.copy()
    children = np.flatnonzero(parents >= 0)
    np.subtract.at(alone_ns, parents[children], members_ns[children])

    # by node and nearest kept ancestor: none, that on the top level, ..., the node itself
    begins = np.zeros((len(nodes), depth + 1))
    below_ns = np.zeros((len(nodes), depth + 1))
    is_kept = np.zeros((len(nodes), depth), bool)
    by_level = [np.flatnonzero(forest.levels == level) for level in range(depth)]
    for level, at in enumerate(by_level):
        if level:
            begins[at] = begins[parents[at]]
        begins[at, level + 1] = nodes[at, END_TOKENS]
    for level, at in reversed(list(enumerate(by_level))):
        tokens = nodes[at, END_TOKENS, None] - begins[at, : level + 1]
        kept_ns = together_ns[at, None] * tokens + (start_ns[at] + below_ns[at, level + 1])[:, None]
        left_ns = alone_ns[at, None] * tokens + below_ns[at, : level + 1]
        kept_ns[nodes[at, END_TOKENS] < min_shared_tokens] = np.inf
        is_kept[at, : level + 1] = kept_ns < left_ns
        if level:
            least_ns = np.minimum(kept_ns, left_ns)
            np.add.at(below_ns[:, : level + 1], parents[at], least_ns)
    nearest = np.zeros(len(nodes), np.int64)
    keep = np.zeros(len(nodes), bool)
    for level, at in enumerate(by_level):
        above = nearest[parents[at]] if level else nearest[at]
        keep[at] = is_kept[at, above]
        nearest[at] = np.where(keep[at], level + 1, above)
    return forest.without(~keep)


def plan_stats(
    forest: Forest,
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    hidden: HiddenTokens | None,
    planning_time_s: float,
) -> PlanStats:
    """What a step reads, where these groups read their ranges together."""
    active = query_lens > 0
    nodes = forest.nodes
    members = nodes[:, LAST] - nodes[:, FIRST]
    tokens = (nodes[:, END_TOKENS] - nodes[:, BEGIN_TOKENS]).astype(np.int64)
    logical = int(seq_lens[active].sum(dtype=np.int64))
    if hidden is not None:
        logical -= sum(hidden.count(request) for request in np.flatnonzero(active).tolist())
        ranges = nodes[:, BEGIN_TOKENS : REQUEST + 1].tolist()
        counts = [hidden.count(request, begin, end) for begin, end, request in ranges]
        tokens -= np.array(counts, np.int64)
    return PlanStats(
        requests=int(np.count_nonzero(active)),
        requests_shared=int(np.count_nonzero(forest.shared_tokens[active])),
        kv_tokens_logical=logical,
        kv_tokens_read=logical - int((members - 1) @ tokens),
        forest_depth=forest.depth,
        groups=len(nodes),
        planning_time_s=planning_time_s,
    )

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

MAX_DOUBTFUL_IN_A_ROW = 64
"""Nodes, each in the one before, that are chosen from together."""


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
    and on which nodes below it do. Of most this need not be known: what pays between a parent and
    children that are all kept always does, and what does not without them never does. Of the
    others, where more than `MAX_DOUBTFUL_IN_A_ROW` are in one another, some are left out first.

    Args:
        forest: as it was found.
        rows_per_request: int [requests].
        cost: of the kernels that will read the ranges.
        min_shared_tokens: ranges that end before this are left alone.
    """
    nodes = forest.nodes
    if not len(nodes):
        return forest
    ends = nodes[:, END_TOKENS]
    node_rows = forest.sum_over_members(rows_per_request)
    apart_ns = forest.sum_over_members(cost.token_ns(rows_per_request))
    together_ns, start_ns = cost.token_ns(node_rows), cost.start_ns(node_rows)
    kept = ((apart_ns - together_ns) * ends > start_ns) & (ends >= min_shared_tokens)
    while True:
        forest = forest.without(~kept)
        apart_ns, together_ns, start_ns = apart_ns[kept], together_ns[kept], start_ns[kept]
        tokens = forest.range_tokens
        least_ns = apart_ns - forest.sum_of_children(apart_ns - together_ns)  # if they are kept
        pays = together_ns * tokens + start_ns < least_ns * tokens
        (doubtful,) = (~pays).nonzero()
        if not len(doubtful):
            return forest
        parents, in_a_row = _in_a_row(forest.parents, doubtful)
        every = -(-max(in_a_row) // MAX_DOUBTFUL_IN_A_ROW)
        if every == 1:
            break
        kept = pays
        kept[doubtful] = np.array(in_a_row) % every == 0
    # of the members in no child, and of children that pay
    left_ns = apart_ns - forest.sum_of_children(apart_ns - np.where(pays, together_ns, 0.0))
    pay = _doubtful_that_pay(
        forest.nodes[doubtful],
        parents,
        in_a_row,
        together_ns[doubtful, None],
        start_ns[doubtful, None],
        left_ns[doubtful, None],
    )
    pays[doubtful[pay]] = True
    return forest.without(~pays)


def _in_a_row(parents: np.ndarray, doubtful: np.ndarray) -> tuple[list[int], list[int]]:
    """Of each of the doubtful nodes: its place among them of its parent, -1 for one that pays or is
    not there, and how many there are in a row down to itself."""
    place = np.full(len(parents) + 1, -1)
    place[doubtful] = np.arange(len(doubtful))
    above = place[parents[doubtful]].tolist()
    in_a_row: list[int] = []
    for parent in above:
        in_a_row.append(1 if parent < 0 else in_a_row[parent] + 1)
    return above, in_a_row


def _doubtful_that_pay(
    nodes: np.ndarray,
    parents: list[int],
    in_a_row: list[int],
    together_ns: np.ndarray,
    start_ns: np.ndarray,
    left_ns: np.ndarray,
) -> np.ndarray:
    """Which of the doubtful nodes cost least together: bool [nodes].

    Each is looked at from the bottom up for every begin that it may have: the end of its nearest
    ancestor that pays anyway, or of one of the doubtful nodes between them.

    Args:
        nodes: int32 [nodes, 5].
        parents, in_a_row: of `_in_a_row`.
        together_ns, start_ns: float [nodes, 1]: per token, and whatever the tokens, if kept.
        left_ns: float [nodes, 1]: per token, if not, but for the doubtful nodes below.
    """
    tokens = np.empty((len(nodes), max(in_a_row)))
    tokens[:] = nodes[:, BEGIN_TOKENS, None]
    for index, (size, parent) in enumerate(zip(in_a_row, parents, strict=True)):
        if parent >= 0:
            tokens[index, : size - 1] = tokens[parent, : size - 1]
    np.subtract(nodes[:, END_TOKENS, None], tokens, out=tokens)
    kept_ns, stays_ns = together_ns * tokens + start_ns, left_ns * tokens
    below_ns = np.zeros((len(nodes), tokens.shape[1] + 1))
    for index in reversed(range(len(nodes))):
        size, parent = in_a_row[index], parents[index]
        kept, stays, below = kept_ns[index, :size], stays_ns[index, :size], below_ns[index]
        kept += below[size]
        stays += below[:size]
        if parent >= 0:
            below_ns[parent, :size] += np.minimum(kept, stays)
    is_kept = kept_ns < stays_ns
    nearest: list[int] = []
    for kept, size, parent in zip(is_kept, in_a_row, parents, strict=True):
        above = nearest[parent] if parent >= 0 else 0
        nearest.append(size if kept[above] else above)
    return np.array(nearest) == in_a_row


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
    tokens = forest.range_tokens
    logical = int(seq_lens[active].sum(dtype=np.int64))
    if hidden is not None:
        logical -= sum(hidden.count(request) for request in np.flatnonzero(active).tolist())
        ranges = nodes[:, BEGIN_TOKENS : REQUEST + 1].tolist()
        counts = [hidden.count(request, begin, end) for begin, end, request in ranges]
        tokens = tokens - np.array(counts, np.int64)
    return PlanStats(
        requests=int(np.count_nonzero(active)),
        requests_shared=int(np.count_nonzero(forest.shared_tokens[active])),
        kv_tokens_logical=logical,
        kv_tokens_read=logical - int((members - 1) @ tokens),
        forest_depth=forest.depth,
        groups=len(nodes),
        planning_time_s=planning_time_s,
    )

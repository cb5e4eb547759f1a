# SPDX-License-Identifier: Apache-2.0
"""Who computes what of a step: row blocks and their spans, cut by cost into what threads take.

A plan never changes what is computed, only who computes it when.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_relay import _C
from vllm_relay.attention_backends.cost import KernelCost
from vllm_relay.attention_backends.forest import BEGIN_TOKENS, END_TOKENS, FIRST, LAST
from vllm_relay.attention_backends.ragged import starts

SEGMENT_TOKENS = 2048
"""A fold restarts at multiples of this; the C++ side has the same number."""

TILE_TOKENS = 32
"""Scores of a segment are divided at multiples of this."""

ITEMS_PER_THREAD = 4
"""Work is cut until no item is larger than a thread's share divided by this."""

BUSY = 1.1
"""Threads that need at most this times their share are kept busy well enough."""


@dataclass(frozen=True)
class Shape:
    """What the work of a step is multiplied by, and for whom."""

    group_size: int
    num_kv_heads: int
    dim_groups: int
    """Groups of 16 dims of a head."""
    num_threads: int
    may_divide: bool
    """Whether spans have whole tiles of tokens, but for the last, as divided segments need."""

    @property
    def heads_first(self) -> bool:
        """Whether threads finish all items of a KV head first, so that items which read the same
        blocks find them in the cache; else the most expensive items of all heads, so that no thread
        is left with one of them."""
        return self.num_threads <= self.num_kv_heads


@dataclass(eq=False)
class WorkItems:
    """Arrays of int32 as `csrc/attention/problem.h` lays them out; of each kind of item, the most
    expensive come first. All items are there for every KV head."""

    spans: np.ndarray
    """[spans, 5]: first and last entry, begin and end token, block table row."""
    row_blocks: np.ndarray
    """[row blocks, 4]: first and last entry, first and last span."""
    items: np.ndarray
    """[items, 4]: row block, first and last segment, entry of the partial states or -1."""
    divisions: np.ndarray
    """[divisions, 5]: row block, segment, entry of the partial state, first score, scores a row."""
    score_items: np.ndarray
    """[score items, 3]: division, begin and end token."""
    weight_items: np.ndarray
    """[weight items, 3]: division, first and last row of the row block."""
    value_items: np.ndarray
    """[value items, 3]: division, first and last group of 16 dims."""
    merges: np.ndarray
    """[merges, 4]: row block, entry of its first partial state, number of segments, whether some
    are divided."""
    num_partial_entries: int
    num_scores: int
    """Of the divisions, of one KV head."""
    makespan_ns: float
    """What threads need for all of it, as far as costs tell."""


def plan_work(
    entries: np.ndarray,
    spans: np.ndarray,
    row_blocks: np.ndarray,
    shape: Shape,
    cost: KernelCost,
    share_ns: float,
) -> WorkItems:
    """What keeps the threads busy, with as little divided as that takes.

    Args:
        entries: as in `StepPlan`.
        spans, row_blocks: as in `WorkItems`.
        share_ns: what each thread would take if all could be divided evenly and at no cost.
    """
    rows = span_rows(spans, shape)
    span_costs = np.stack(
        (
            cost.start_ns(rows),
            cost.token_ns(rows),
            cost.product_ns(rows),
            rows * cost.weight_ns,
        ),
        axis=1,
    )
    planned = _C.plan_work(
        entries,
        spans,
        row_blocks,
        span_costs,
        cost.merge_ns,
        share_ns,
        share_ns / ITEMS_PER_THREAD,
        BUSY * share_ns,
        shape.group_size,
        shape.num_kv_heads,
        shape.dim_groups,
        shape.num_threads,
        shape.heads_first,
        shape.may_divide,
    )
    return WorkItems(spans=spans, row_blocks=row_blocks, **planned)


def span_rows(spans: np.ndarray, shape: Shape) -> np.ndarray:
    """int [spans]: rows of one KV head."""
    return (spans[:, LAST] - spans[:, FIRST]).astype(np.int64) * shape.group_size


def block_ns(
    spans: np.ndarray, row_blocks: np.ndarray, shape: Shape, cost: KernelCost
) -> np.ndarray:
    """float [row blocks]: cost of a row block for one KV head."""
    tokens = spans[:, END_TOKENS] - spans[:, BEGIN_TOKENS]
    ns = cost.range_ns(span_rows(spans, shape), tokens)
    ns_before = starts(ns)
    return ns_before[row_blocks[:, 3]] - ns_before[row_blocks[:, 2]]

# SPDX-License-Identifier: Apache-2.0
"""The work list of one step: which rows read which KV tokens, in which order, on which thread.

Pure: numpy in, numpy out. The plan never changes what is computed, only who computes it when.
"""

import time
from dataclasses import dataclass

import numpy as np

from vllm_relay.attention_backends.cost import KERNEL_COSTS
from vllm_relay.attention_backends.cpu.work_items import (
    BUSY,
    ITEMS_PER_THREAD,
    SEGMENT_TOKENS,
    Shape,
    WorkItems,
    block_ns,
    plan_work,
)
from vllm_relay.attention_backends.forest import (
    BEGIN_TOKENS,
    END_TOKENS,
    FIRST,
    LAST,
    REQUEST,
    Forest,
)
from vllm_relay.attention_backends.groups import PlanStats, forest_for, plan_stats
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens
from vllm_relay.attention_backends.ragged import starts

MAX_BLOCK_ROWS = 256
"""Rows of one kv head whose state a core keeps in its L2 cache."""


@dataclass(eq=False)
class StepPlan:
    """Arrays of int32 as `csrc/attention/problem.h` lays them out; positions refer to the order of
    execution, in which every group of requests is a contiguous run."""

    kernel: str
    entries: np.ndarray
    """[query tokens, 2]: row of the query, KV tokens it sees."""
    work: WorkItems
    max_block_entries: int
    num_threads: int
    heads_first: bool
    hides_tokens: bool
    """Whether there are tokens before a request's query tokens that these do not see."""
    stats: PlanStats
    native: object = None
    """The C++ view of these arrays, made by whoever runs the plan."""


def plan_step(
    block_table: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    *,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_threads: int,
    kernel: str,
    forest: Forest | str | None = "auto",
    min_shared_tokens: int = 0,
    hidden: HiddenTokens | None = None,
    is_fp8: bool = False,
) -> StepPlan:
    """Plans one step.

    Args:
        block_table: int32 [requests, blocks]; physical block ids, 0 is the null block.
        query_start_loc: int32 [requests + 1]; the query tokens of request r are rows
            query_start_loc[r] .. query_start_loc[r + 1].
        seq_lens: int32 [requests]; KV tokens of each request, its query tokens included.
        forest: "auto" finds what is shared and keeps what pays; None shares nothing; a Forest is
            used as it is.
        min_shared_tokens: "auto" leaves shared ranges below this alone.
        hidden: tokens that the query tokens of a request do not see; a Forest must not put
            requests together that hide different tokens of a range they share.
        is_fp8: of the KV cache, which changes what is worth sharing.

    Raises:
        ValueError: for a Forest which does not describe these requests.
    """
    started_s = time.perf_counter()
    cost = KERNEL_COSTS[kernel].over_fp8() if is_fp8 else KERNEL_COSTS[kernel]
    query_lens = np.diff(query_start_loc)
    group_size = num_heads // num_kv_heads
    kept = forest_for(
        forest,
        block_table,
        query_lens,
        seq_lens,
        block_size=block_size,
        group_size=group_size,
        cost=cost,
        min_shared_tokens=min_shared_tokens,
        hidden=hidden,
    )

    lens = query_lens[kept.order]
    first_entry = starts(lens)
    entries = _entries(kept.order, lens, first_entry, query_start_loc, seq_lens)
    cuts = _row_block_cuts(kept, first_entry, max(1, MAX_BLOCK_ROWS // group_size))
    shape = Shape(group_size, num_kv_heads, head_size // 16, num_threads, hidden is None)
    spans, row_blocks = _spans(kept, first_entry, entries, seq_lens, cuts, hidden)
    ns = block_ns(spans, row_blocks, shape, cost)
    share_ns = float(ns.sum()) * num_kv_heads / num_threads
    works: list[WorkItems] = []
    # cut by rows, parts read shared ranges once each: where that is too dear, larger parts
    for min_rows in (cost.tile_rows, cost.balanced_rows) if num_threads > 1 else ():
        if works and works[-1].makespan_ns <= BUSY * share_ns:
            break
        finer_cuts = _finer_cuts(
            row_blocks,
            ns / _block_segments(row_blocks, entries),
            share_ns / ITEMS_PER_THREAD,
            max(1, min_rows // group_size),
        )
        if len(finer_cuts) > len(cuts):
            finer = _spans(kept, first_entry, entries, seq_lens, finer_cuts, hidden)
            works.append(plan_work(entries, *finer, shape, cost, share_ns))
    if not works or works[-1].makespan_ns > BUSY * share_ns:
        works.append(plan_work(entries, spans, row_blocks, shape, cost, share_ns))
    work = min(works, key=lambda each: each.makespan_ns)
    block_entries = work.row_blocks[:, 1] - work.row_blocks[:, 0]
    return StepPlan(
        kernel=kernel,
        entries=entries,
        work=work,
        max_block_entries=int(block_entries.max(initial=0)),
        num_threads=num_threads,
        heads_first=shape.heads_first,
        hides_tokens=hidden is not None,
        stats=plan_stats(kept, query_lens, seq_lens, hidden, time.perf_counter() - started_s),
    )


def _entries(
    order: np.ndarray,
    lens: np.ndarray,
    first_entry: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
) -> np.ndarray:
    """One row per query token, requests in the order of execution."""
    total = int(first_entry[-1])
    within = np.arange(total) - np.repeat(first_entry[:-1], lens)
    entries = np.empty((total, 2), np.int32)
    entries[:, 0] = within + np.repeat(query_start_loc[order], lens)
    entries[:, 1] = within + np.repeat(seq_lens[order] - lens + 1, lens)
    return entries


def _row_block_cuts(forest: Forest, first_entry: np.ndarray, max_entries: int) -> np.ndarray:
    """Entry offsets at which row blocks begin, and the end of the last.

    Every tree and every request in no tree begins a row block of its own; large ones are cut into
    equal parts.
    """
    num_requests = len(forest.order)
    depth = np.zeros(num_requests + 1, np.int64)
    np.add.at(depth, forest.nodes[:, FIRST], 1)
    np.add.at(depth, forest.nodes[:, LAST], -1)
    depth = np.cumsum(depth)[:num_requests]
    begins = depth == 0
    begins[forest.nodes[forest.nodes[:, BEGIN_TOKENS] == 0, FIRST]] = True
    unit_first = first_entry[:-1][begins]
    unit_entries = np.diff(np.append(unit_first, first_entry[-1]))
    unit_first, unit_entries = unit_first[unit_entries > 0], unit_entries[unit_entries > 0]
    parts = -(-unit_entries // max_entries)
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    offsets = part * np.repeat(unit_entries, parts) // np.repeat(parts, parts)
    return np.append(np.repeat(unit_first, parts) + offsets, first_entry[-1])


def _spans(
    forest: Forest,
    first_entry: np.ndarray,
    entries: np.ndarray,
    seq_lens: np.ndarray,
    cuts: np.ndarray,
    hidden: HiddenTokens | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and private ranges without hidden tokens, cut at the row blocks and sorted by row
    block; within one, parents come before children and private ranges last, so every entry meets
    its tokens in order."""
    order, nodes = forest.order, forest.nodes
    private = np.empty((len(order), 5), np.int64)
    private[:, FIRST], private[:, LAST] = first_entry[:-1], first_entry[1:]
    private[:, BEGIN_TOKENS] = forest.shared_tokens[order]
    private[:, END_TOKENS] = seq_lens[order]
    private[:, REQUEST] = order
    shared = nodes.astype(np.int64)
    shared[:, FIRST], shared[:, LAST] = first_entry[nodes[:, FIRST]], first_entry[nodes[:, LAST]]
    ranges = np.concatenate((shared, private))
    is_private = np.arange(len(ranges)) >= len(shared)
    if hidden is not None:
        ranges, source = _without_hidden(ranges, hidden)
        is_private = is_private[source]
    nonempty = ranges[:, FIRST] < ranges[:, LAST]
    ranges, is_private = ranges[nonempty], is_private[nonempty]

    first_block = np.searchsorted(cuts, ranges[:, FIRST], side="right") - 1
    last_block = np.searchsorted(cuts, ranges[:, LAST], side="left")
    pieces = last_block - first_block
    total = int(pieces.sum())
    piece = np.arange(total) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    row_block = np.repeat(first_block, pieces) + piece
    spans = np.repeat(ranges, pieces, axis=0)
    spans[:, FIRST] = np.maximum(spans[:, FIRST], cuts[row_block])
    spans[:, LAST] = np.minimum(spans[:, LAST], cuts[row_block + 1])
    # earlier query tokens of a request see less than its last one
    last_visible = entries[spans[:, LAST] - 1, 1]
    spans[:, END_TOKENS] = np.where(
        np.repeat(is_private, pieces),
        np.minimum(last_visible, spans[:, END_TOKENS]),
        spans[:, END_TOKENS],
    )
    keep = spans[:, BEGIN_TOKENS] < spans[:, END_TOKENS]
    spans, row_block = spans[keep], row_block[keep]
    by_block = np.argsort(row_block, kind="stable")
    spans, row_block = spans[by_block], row_block[by_block]
    num_blocks = len(cuts) - 1
    bounds = np.searchsorted(row_block, np.arange(num_blocks + 1))
    row_blocks = np.stack((cuts[:-1], cuts[1:], bounds[:-1], bounds[1:]), axis=1)
    return spans.astype(np.int32), row_blocks.astype(np.int32)


def _without_hidden(ranges: np.ndarray, hidden: HiddenTokens) -> tuple[np.ndarray, np.ndarray]:
    """Ranges cut where their request hides tokens, and which range each came from."""
    pieces, sources = [], []
    for index, (first, last, begin, end, request) in enumerate(ranges.tolist()):
        for piece_begin, piece_end in hidden.visible_pieces(request, begin, end):
            pieces.append((first, last, piece_begin, piece_end, request))
            sources.append(index)
    return np.array(pieces, np.int64).reshape(-1, 5), np.array(sources, np.int64)


def _block_segments(row_blocks: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """int [row blocks]: segments up to the last token that any row sees."""
    if not len(row_blocks):
        return np.empty(0, np.int64)
    visible = np.maximum.reduceat(entries[:, 1], row_blocks[:, 0])
    return np.maximum(-(-visible // SEGMENT_TOKENS), 1)


def _finer_cuts(
    row_blocks: np.ndarray, smallest_ns: np.ndarray, largest_ns: float, min_entries: int
) -> np.ndarray:
    """Cuts that also divide, by rows, what is too large for one thread even segment by segment.

    The parts read shared ranges once each, so a part keeps at least the rows of a tile.
    """
    first, last = row_blocks[:, 0].astype(np.int64), row_blocks[:, 1].astype(np.int64)
    entries = last - first
    wanted = np.ceil(smallest_ns / max(largest_ns, 1.0)).astype(np.int64)
    parts = np.clip(wanted, 1, np.maximum(entries // min_entries, 1))
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    offsets = part * np.repeat(entries, parts) // np.repeat(parts, parts)
    return np.append(np.repeat(first, parts) + offsets, last[-1:])

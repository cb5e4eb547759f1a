# SPDX-License-Identifier: Apache-2.0
"""The work list of one step for the Triton kernels: who reads what, cut by cost, dealt to programs.

The words are those of the CPU's plan. An *entry* is a query token; entries are in the order of
execution, in which every group of requests is a run. A *span* is what a run of entries reads
together, or one request alone. Spans are cut at multiples of some number of tokens into *pieces*,
and their rows into tiles; a piece of a tile of rows is an *item*, and an item of one kv head is
*work* for one program. States wait in *slots*, those of an entry one after the other.

What is computed does not depend on the plan, only who computes it: docs/cuda-triton.md, section 2.

Pure: numpy in, numpy out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from vllm_relay.attention_backends.cuda.config import KernelConfig, KernelSetup
from vllm_relay.attention_backends.cuda.plans.plan_cuts import (
    MODE_FOLD,
    Pieces,
    Spans,
    cut_spans,
    finer_cuts,
)
from vllm_relay.attention_backends.forest import (
    FIRST,
    LAST,
    Forest,
)
from vllm_relay.attention_backends.ragged import repeated, starts

ENTRY_FIELDS = 4
"""Row of the query; request; KV tokens seen, less those of the request; first slot."""

ITEM_FIELDS = 8
"""Block table row; first entry of the span; first row of the tile and number of rows of the span;
begin and end token; slot of the first state, counted from the entry's first; mode."""

BEGINS_SEGMENT, BEGINS_SECTION, IS_SECTION = 1, 2, 4
"""Of the state in a slot: where its tokens begin, and whether segments were folded into it."""

ENTRIES, PROGRAM_STARTS, ITEMS, WORKS, SLOT_KINDS = range(5)
"""Places of the numbers that say where each array of a packed plan begins."""

GOOD_BALANCE = 1.05
"""Work is cut finer until no program has more than this times its share."""
ALIKE = 1.05
"""Plans that take at most this times what the fastest takes are about as fast."""
CUTS_COMPARED = 4
"""Of the cuts into as many parts, so many are dealt to see how evenly."""
_NOWHERE = np.int32(np.iinfo(np.int32).max)
"""A position behind all tokens."""


@dataclass(frozen=True, eq=False)
class GpuPlan:
    """All int32. Rows of a span are its entries, each with the query heads of one kv head."""

    entries: np.ndarray
    """[query tokens, ENTRY_FIELDS]"""
    items: np.ndarray
    """[items, ITEM_FIELDS]"""
    works: np.ndarray
    """[works]: item * kv heads + kv head, program by program."""
    program_starts: np.ndarray
    """[2 * programs + 1]: where in `works` each program's items of large tiles and its items of
    small tiles begin."""
    slot_kinds: np.ndarray
    """[slots]"""
    loads: np.ndarray
    """float64 [programs]: what each program's work costs."""

    @property
    def num_slots(self) -> int:
        return len(self.slot_kinds)

    def packed_size(self, num_entries: int) -> int:
        """Of `packed`."""
        arrays = (self.program_starts, self.items, self.works, self.slot_kinds)
        return 5 + (num_entries + 1) * ENTRY_FIELDS + sum(array.size for array in arrays)

    def packed(self, num_entries: int) -> np.ndarray:
        """All of it in one int32 array, for a step of up to so many query tokens, as kernels read
        it: those behind the entries have no slots."""
        entries = np.zeros((num_entries + 1, ENTRY_FIELDS), np.int32)
        entries[: len(self.entries)] = self.entries
        entries[len(self.entries) :, -1] = self.num_slots
        arrays = (entries, self.program_starts, self.items, self.works, self.slot_kinds)
        *begins, _ = accumulate((array.size for array in arrays), initial=len(arrays))
        return np.concatenate((np.array(begins, np.int32), *(a.ravel() for a in arrays)))


def plan_step(
    forest: Forest,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    setup: KernelSetup,
    *,
    least_seq_lens: np.ndarray | None = None,
    window_tokens: int = 0,
    fits: Callable[[GpuPlan], bool] = lambda plan: True,
) -> GpuPlan:
    """The work list for a given forest.

    Args:
        forest: who shares what; ends of ranges are rounded down to whole tiles.
        query_start_loc: int32 [requests + 1].
        seq_lens: int32 [requests]; or upper bounds, as kernels look up how long requests are.
        least_seq_lens: lower bounds, `seq_lens` unless given.
        window_tokens: that every layer sees at most, 0 for all.
        fits: work is cut no finer than fits; whether it does uncut, callers have to see.
    """
    config, lens = setup.config, (query_start_loc[1:] - query_start_loc[:-1])[forest.order]
    seen_from = None
    if window_tokens:
        least = seq_lens if least_seq_lens is None else least_seq_lens
        seen_from = np.maximum(least[forest.order] - lens + 1 - window_tokens, 0)
    spans = _spans(forest, lens, seq_lens, seen_from, config)
    rows = (spans.last - spans.first) * setup.group_size

    def cut(piece_tokens: np.ndarray) -> Pieces:
        return cut_spans(spans, rows, piece_tokens, setup)

    whole = cut(np.full(len(rows), config.section_tokens))
    cuts, finer = [whole], []
    if whole.most > GOOD_BALANCE * whole.mean:
        finer = finer_cuts(spans, rows, whole.mean, setup)
    for piece_tokens in finer[:CUTS_COMPARED]:
        cuts.append(cut(piece_tokens))
        if cuts[-1].most <= GOOD_BALANCE * whole.mean:
            break
    # what costs are is known roughly: of those about as fast, the one whose loads are most alike
    least_ns = min(each.most for each in cuts)
    cuts.sort(key=lambda each: (each.most > ALIKE * least_ns, each.most / max(each.mean, 1e-9)))
    better = cuts[: cuts.index(whole)]
    others = finer[CUTS_COMPARED:] if better else []
    for pieces in chain(better, map(cut, others), [whole]):
        plan = _assembled(spans, rows, pieces, forest, query_start_loc, lens, config)
        if fits(plan):
            break
    return plan


def _spans(
    forest: Forest,
    lens: np.ndarray,
    seq_lens: np.ndarray,
    seen_from: np.ndarray | None,
    config: KernelConfig,
) -> Spans:
    """What is read, cut where a segment ends that others have begun or will go on with."""
    tile, segment = config.tile_tokens, config.segment_tokens
    order, num_nodes, requests = forest.order, len(forest.nodes), np.arange(len(lens))
    # behind the nodes, what requests read alone
    own = (requests, requests + 1, forest.shared_tokens[order], seq_lens[order], order)
    first, last, begin, end, row = np.concatenate((forest.nodes.T, own), axis=1, dtype=np.int64)
    final = np.arange(len(row)) >= num_nodes
    first_entry = starts(lens)
    first, last = first_entry[first], first_entry[last]
    begin = begin // tile * tile
    end[:num_nodes] = end[:num_nodes] // tile * tile
    alone = final & (begin == 0)
    if seen_from is not None:
        seen_from = seen_from // segment * segment
        node_seen_from = _least_of_runs(np.where(lens > 0, seen_from, _NOWHERE), forest.nodes)
        begin = np.maximum(begin, np.concatenate((node_seen_from, seen_from)))
    # the rest of a segment that another span has begun, and what others will go on with
    head_end = np.minimum(-(-begin // segment) * segment, end)
    rest_begin = np.maximum(np.where(final, end, end // segment * segment), head_end)
    bounds = np.array((begin, head_end, rest_begin, end))
    node, part = ((bounds[:-1] < bounds[1:]) & (first < last)).T.nonzero()
    return Spans(
        first[node], last[node], bounds[part, node], bounds[part + 1, node],
        row[node], node, alone[node], final[node],
    )  # fmt: skip


def _least_of_runs(values: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    if not len(nodes):
        return np.empty(0, np.int64)
    runs = nodes[:, [FIRST, LAST]].ravel()
    return np.minimum.reduceat(np.append(values, _NOWHERE), runs)[::2]


def _assembled(
    spans: Spans,
    rows: np.ndarray,
    pieces: Pieces,
    forest: Forest,
    query_start_loc: np.ndarray,
    lens: np.ndarray,
    config: KernelConfig,
) -> GpuPlan:
    """The plan of these pieces, with a place for every state."""
    # slots of an entry: of the nodes above, of the pieces before, of what its request reads alone
    num_nodes = len(forest.nodes)
    node, slots = spans.node[pieces.span], pieces.slots
    slots_of = np.bincount(node, slots, num_nodes + len(lens)).astype(np.int64)
    slots_above = np.empty_like(slots_of)
    slots_above[:num_nodes] = forest.sum_above(slots_of[:num_nodes])
    slots_above[num_nodes:] = forest.sum_over_nodes(slots_of[:num_nodes])
    # pieces are in the order of nodes
    slot = slots.cumsum() - slots + (slots_above - slots_of.cumsum() + slots_of)[node]
    per_entry = (slots_above + slots_of)[num_nodes:].repeat(lens)
    first_slot = per_entry.cumsum() - per_entry
    request, within = repeated(lens)
    requests = forest.order[request]
    entries = np.empty((len(request), ENTRY_FIELDS), np.int32)
    entries[:, 0] = query_start_loc[requests] + within
    entries[:, 1] = requests
    entries[:, 2] = within - lens[request] + 1
    entries[:, 3] = first_slot

    piece, state = repeated(slots)
    state_begin = pieces.begin[piece] + state * pieces.state_tokens[piece]
    kinds = (
        BEGINS_SEGMENT * (state_begin % config.segment_tokens == 0)
        + BEGINS_SECTION * (state_begin % config.section_tokens == 0)
        + IS_SECTION * (pieces.mode[piece] == MODE_FOLD)
    )
    first = spans.first[pieces.span[piece]]
    each, entry = repeated((spans.last - spans.first)[pieces.span[piece]], first)
    slot_kinds = np.zeros(int(per_entry.sum()), np.int32)
    slot_kinds[first_slot[entry] + (slot[piece] + state)[each]] = kinds[each]

    piece = pieces.item_piece
    span = pieces.span[piece]
    items = (
        spans.row[span], spans.first[span], pieces.item_row, rows[span], pieces.begin[piece],
        pieces.end[piece], slot[piece], pieces.mode[piece],
    )  # fmt: skip
    return GpuPlan(
        entries=entries,
        items=np.array(items, np.int32).T,
        works=pieces.works,
        program_starts=pieces.program_starts,
        slot_kinds=slot_kinds,
        loads=pieces.loads,
    )

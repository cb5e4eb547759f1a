# SPDX-License-Identifier: Apache-2.0
"""The work list of one step for the Triton kernels: who reads what, cut by cost, dealt to programs.

The words are those of the CPU's plan. An *entry* is a query token; entries are in the order of
execution, in which every group of requests is a run. A *span* is what a run of entries reads
together, or one request alone. Spans are cut at multiples of some number of tokens into *pieces*,
and their rows into tiles; a piece of a tile of rows is an *item*, and an item of one kv head is
*work* for one program. States wait in *slots*, those of an entry one after the other.

What is computed does not depend on the plan, only who computes it: docs/cuda.md, section 2.

Pure: numpy in, numpy out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from vllm_relay.attention_backends.cuda.config import KernelConfig, KernelSetup
from vllm_relay.attention_backends.forest import (
    BEGIN_TOKENS,
    END_TOKENS,
    FIRST,
    LAST,
    REQUEST,
    Forest,
)
from vllm_relay.attention_backends.ragged import repeated

ENTRY_FIELDS = 4
"""Row of the query; request; KV tokens seen, less those of the request; first slot."""

ITEM_FIELDS = 8
"""Block table row; first entry of the span; first row of the tile and number of rows of the span;
begin and end token; slot of the first state, counted from the entry's first; mode."""

MODE_FOLD = 0
"""One state of all the tokens, segment folded onto segment: for pieces that begin a section."""
MODE_SEGMENTS = 1
"""One state per segment: for pieces that begin another segment."""
MODE_TILES = 2
"""One state per tile of tokens: for pieces that begin inside of a segment."""
MODE_DIRECT = 3
"""The rows see nothing else: the output is written."""

BEGINS_SEGMENT, BEGINS_SECTION, IS_SECTION = 1, 2, 4
"""Of the state in a slot: where its tokens begin, and whether segments were folded into it."""

ENTRIES, PROGRAM_STARTS, ITEMS, WORKS, SLOT_KINDS = range(5)
"""Places of the numbers that say where each array of a packed plan begins."""

GOOD_BALANCE = 1.05
"""Work is cut finer until no program has more than this times its share."""
ALIKE = 1.05
"""Plans that take at most this times what the fastest takes are about as fast."""
PARTS = 2 ** (np.arange(-6, 13) / 3)
"""Into how many items a program's share of the work may be cut."""
CUTS_COMPARED = 4
"""Of the cuts into as many parts, so many are dealt to see how evenly."""


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
        begins = len(arrays) + np.cumsum([0, *(array.size for array in arrays)])
        return np.concatenate((begins[:-1].astype(np.int32), *(a.ravel() for a in arrays)))


@dataclass(frozen=True, eq=False)
class _Spans:
    """Parts of spans, in token order for each entry; arrays of one element for each part."""

    first: np.ndarray
    last: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    row: np.ndarray
    node: np.ndarray
    """Which node of the forest, or behind them which request in the order of execution."""
    alone: np.ndarray
    """Whether the entries read nothing else."""
    final: np.ndarray
    """Whether nobody goes on where it ends."""


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Spans that are cut, in token order, and who does which."""

    span: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    mode: np.ndarray
    state_tokens: np.ndarray
    """Of each state."""
    slots: np.ndarray
    """Of each entry."""
    item_piece: np.ndarray
    item_row: np.ndarray
    """First row of each item."""
    works: np.ndarray
    program_starts: np.ndarray
    loads: np.ndarray

    @property
    def most(self) -> float:
        return float(self.loads.max())

    @property
    def mean(self) -> float:
        return float(self.loads.mean())


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
    config, lens = setup.config, np.diff(query_start_loc)[forest.order]
    least = seq_lens if least_seq_lens is None else least_seq_lens
    seen_from = np.zeros(len(lens), np.int64)
    if window_tokens:
        seen_from = np.maximum(least[forest.order] - lens + 1 - window_tokens, 0)
    spans = _spans(forest, lens, seq_lens, seen_from, config)
    rows = (spans.last - spans.first) * setup.group_size

    def cut(piece_tokens: np.ndarray) -> _Pieces:
        return _cut(spans, rows, piece_tokens, setup)

    whole = cut(np.full(len(rows), config.section_tokens))
    cuts, finer = [whole], []
    if whole.most > GOOD_BALANCE * whole.mean:
        finer = _finer_cuts(spans, rows, whole.mean, setup)
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


def _finer_cuts(
    spans: _Spans, rows: np.ndarray, share_ns: float, setup: KernelSetup
) -> list[np.ndarray]:
    """Tokens of the pieces of each span, in several ways, those first that should keep programs
    busiest: none can end before it has its part of all work, and of the pieces above any size."""
    config, cost = setup.config, setup.cost
    tile, segment, section = config.tile_tokens, config.segment_tokens, config.section_tokens
    sizes = np.append(np.arange(tile, segment, tile), np.arange(segment, section + 1, segment))
    height = _height(rows, config)
    token_ns, row_tiles = cost.token_ns(height), -(-rows // height) * setup.num_kv_heads
    tokens = spans.end - spans.begin
    size = np.searchsorted(sizes, np.outer(share_ns / PARTS, 1 / token_ns), side="right") - 1
    # no span is cut where the size is that of all of it
    steps = np.minimum(np.maximum(size, 0), np.searchsorted(sizes, tokens))
    steps = steps[np.append(True, (steps[1:] != steps[:-1]).any(axis=1))]
    size = sizes[steps]
    # of each span: whole pieces that begin a unit and others, and what is left of units and in all
    unit = np.where(size < segment, segment, section)
    units, rest = tokens // unit, tokens % unit
    first = units + (rest >= size)
    whole = units * (unit // size) + rest // size
    pieces = np.stack((first, whole - first, units, np.ones_like(size)))
    piece_tokens = np.stack((size, size, unit % size, rest % size))
    states = -(-piece_tokens // np.where(size < segment, tile, segment))
    states[0] = 1
    states[3][rest < size] = 1
    piece_ns = piece_tokens * token_ns + cost.start_ns(height)
    piece_ns += (np.minimum(rows, height) * states / 2 - height) * cost.state_ns
    pieces *= piece_tokens > 0
    piece_ns, items = np.hstack(piece_ns), np.hstack(pieces * row_tiles)
    by_cost = np.argsort(-piece_ns, axis=1)
    piece_ns = np.take_along_axis(piece_ns, by_cost, axis=1)
    items = np.take_along_axis(items, by_cost, axis=1)
    at_least_ns = (np.ceil(items.cumsum(axis=1) / setup.num_programs) * piece_ns).max(axis=1)
    least_ns = np.maximum(at_least_ns, (items * piece_ns).sum(axis=1) / setup.num_programs)
    by_time = np.argsort(least_ns, kind="stable")
    every_other = np.arange(len(rows)) % 2 == 0
    finer = np.where(every_other, size, np.append(size[1:], size[-1:], axis=0))
    return list(np.stack((size, finer), axis=1)[by_time].reshape(-1, len(rows)))


def _height(rows: np.ndarray, config: KernelConfig) -> np.ndarray:
    """Rows of the tiles that spans of so many rows take."""
    return np.where(rows > config.small_rows, config.large_rows, config.small_rows)


def _spans(
    forest: Forest,
    lens: np.ndarray,
    seq_lens: np.ndarray,
    seen_from: np.ndarray,
    config: KernelConfig,
) -> _Spans:
    """What is read, cut where a segment ends that others have begun or will go on with."""
    tile, segment = config.tile_tokens, config.segment_tokens
    first_entry = np.concatenate(([0], np.cumsum(lens)))
    order, nodes = forest.order, forest.nodes.astype(np.int64)
    nodes[:, BEGIN_TOKENS : END_TOKENS + 1] //= tile
    nodes[:, BEGIN_TOKENS : END_TOKENS + 1] *= tile
    seen_from = seen_from // segment * segment
    node_seen_from = _least_of_runs(np.where(lens > 0, seen_from, 1 << 40), nodes)
    covered = forest.shared_tokens[order].astype(np.int64) // tile * tile
    requests = np.arange(len(order))
    first = first_entry[np.concatenate((nodes[:, FIRST], requests))]
    last = first_entry[np.concatenate((nodes[:, LAST], requests + 1))]
    begin = np.concatenate((nodes[:, BEGIN_TOKENS], covered))
    begin = np.maximum(begin, np.concatenate((node_seen_from, seen_from)))
    end = np.concatenate((nodes[:, END_TOKENS], seq_lens[order]))
    final = np.arange(len(first)) >= len(nodes)
    alone = np.concatenate((np.zeros(len(nodes), bool), covered == 0))
    # the rest of a segment that another span has begun, and what others will go on with
    head_end = np.minimum(-(-begin // segment) * segment, end)
    rest_begin = np.maximum(np.where(final, end, end // segment * segment), head_end)
    begins = np.stack((begin, head_end, rest_begin), axis=1).ravel()
    ends = np.stack((head_end, rest_begin, end), axis=1).ravel()
    part = np.flatnonzero((begins < ends) & (first < last).repeat(3))
    node = part // 3
    row = np.concatenate((nodes[:, REQUEST], order))
    return _Spans(
        first[node], last[node], begins[part], ends[part], row[node], node, alone[node], final[node]
    )


def _least_of_runs(values: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    if not len(nodes):
        return np.empty(0, np.int64)
    runs = nodes[:, [FIRST, LAST]].ravel()
    return np.minimum.reduceat(np.append(values, 1 << 40), runs)[::2]


def _cut(
    spans: _Spans,
    rows: np.ndarray,
    piece_tokens: np.ndarray,
    setup: KernelSetup,
) -> _Pieces:
    """Segments, or sections, cut into pieces of so many tokens, of each span; and dealt. What is
    left of a segment is cut as if it began there."""
    config, cost = setup.config, setup.cost
    tile, segment, section = config.tile_tokens, config.segment_tokens, config.section_tokens
    unit = np.where(piece_tokens < segment, segment, section)
    per_unit = -(-unit // piece_tokens)

    origin = np.where(spans.begin % segment, spans.begin, 0)

    def piece_of(token: np.ndarray) -> np.ndarray:
        token = token - origin
        return token // unit * per_unit + token % unit // piece_tokens

    first = piece_of(spans.begin)
    span, piece = repeated(piece_of(spans.end - 1) + 1 - first)
    piece += first[span]
    size, unit, per_unit = piece_tokens[span], unit[span], per_unit[span]
    span_begin, span_end = spans.begin[span], spans.end[span]
    begin = piece // per_unit * unit + piece % per_unit * size
    end = np.minimum(begin - begin % unit + unit, begin + size)
    begin = np.maximum(begin + origin[span], span_begin)
    end = np.minimum(end + origin[span], span_end)
    is_whole = (begin == span_begin) & (end == span_end)
    begins_segment = begin % segment == 0
    folds = (end % segment == 0) | (spans.final[span] & (end == span_end))
    mode = np.where((begin % section == 0) & folds, MODE_FOLD, MODE_SEGMENTS)
    mode = np.where(begins_segment, mode, MODE_TILES)
    is_direct = spans.alone[span] & is_whole & begins_segment & (end - begin <= segment)
    mode = np.where(is_direct, MODE_DIRECT, mode)
    state_tokens = np.array([section, segment, tile, segment])[mode]
    slots = np.where(is_direct, 0, -(-(end - begin) // state_tokens))

    height = _height(rows, config)[span]
    piece, row = repeated(-(-rows[span] // height))
    height = height[piece]
    row *= height
    read_tokens = (-(-end // tile) * tile - begin)[piece]
    # the other half of what states cost is read by all programs alike
    written = np.minimum(rows[span][piece] - row, height) * slots[piece] / 2 - height
    item_ns = cost.range_ns(height, read_tokens) + written * cost.state_ns
    is_large = rows[span][piece] > config.small_rows
    works, program_starts, loads = _deal(item_ns, is_large, setup)
    return _Pieces(
        span, begin, end, mode, state_tokens, slots, piece, row, works, program_starts, loads
    )


def _assembled(
    spans: _Spans,
    rows: np.ndarray,
    pieces: _Pieces,
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
    slots_above[:num_nodes] = forest.sum_above(slots_of)
    slots_above[num_nodes:] = forest.sum_over_nodes(slots_of[:num_nodes])
    before = np.cumsum(slots) - slots
    slot = slots_above[node] + before - before[np.searchsorted(node, node)]
    per_entry = np.repeat((slots_above + slots_of)[num_nodes:], lens)
    first_slot = np.cumsum(per_entry) - per_entry
    request, within = repeated(lens)
    requests = forest.order[request]
    entries = np.empty((len(request), ENTRY_FIELDS), np.int32)
    entries[:, 0] = query_start_loc[requests] + within
    entries[:, 1] = requests
    entries[:, 2] = within - lens[request] + 1
    entries[:, 3] = first_slot

    piece, entry = repeated((spans.last - spans.first)[pieces.span] * (slots > 0))
    entry += spans.first[pieces.span[piece]]
    pair, state = repeated(slots[piece])
    piece = piece[pair]
    state_begin = pieces.begin[piece] + state * pieces.state_tokens[piece]
    kinds = (
        BEGINS_SEGMENT * (state_begin % config.segment_tokens == 0)
        + BEGINS_SECTION * (state_begin % config.section_tokens == 0)
        + IS_SECTION * (pieces.mode[piece] == MODE_FOLD)
    )
    slot_kinds = np.zeros(int(per_entry.sum()), np.int32)
    slot_kinds[first_slot[entry[pair]] + slot[piece] + state] = kinds

    piece = pieces.item_piece
    span = pieces.span[piece]
    items = np.empty((len(piece), ITEM_FIELDS), np.int32)
    for field, values in enumerate(
        (
            spans.row[span], spans.first[span], pieces.item_row, rows[span], pieces.begin[piece],
            pieces.end[piece], slot[piece], pieces.mode[piece],
        )
    ):  # fmt: skip
        items[:, field] = values
    return GpuPlan(
        entries=entries,
        items=items,
        works=pieces.works,
        program_starts=pieces.program_starts,
        slot_kinds=slot_kinds,
        loads=pieces.loads,
    )


def _deal(
    item_ns: np.ndarray, is_large: np.ndarray, setup: KernelSetup
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`works`, `program_starts` and `loads`: the largest first, each to a program that has least
    so far (Graham, Bounds on Multiprocessing Timing Anomalies, 1969), as many at once as no other
    of them would change."""
    num_kv_heads, num_programs = setup.num_kv_heads, setup.num_programs
    by_cost = np.argsort(-item_ns, kind="stable")
    works = (by_cost[:, None] * num_kv_heads + np.arange(num_kv_heads)).ravel()
    work_ns = item_ns[by_cost].repeat(num_kv_heads)
    loads = np.zeros(num_programs)
    program = np.empty(len(works), np.int64)
    alike_ends = np.append(np.flatnonzero(work_ns[1:] != work_ns[:-1]) + 1, len(works))
    first = run = 0
    while first < len(works):
        while alike_ends[run] <= first:
            run += 1
        least = loads.argsort(kind="stable")[: len(works) - first]
        ns = work_ns[first]
        if (alike := int(alike_ends[run]) - first) > num_programs:
            # as many as all would get if they could be divided, but whole ones
            sums = loads[least].cumsum() + alike * ns
            level = (sums / np.arange(1, len(sums) + 1)).min()
            counts = np.maximum((level - loads[least]) // ns, 0).astype(np.int64)
            least = least.repeat(counts)
            loads += np.bincount(least, minlength=num_programs) * ns
        else:
            least = least[loads[least] <= loads[least[0]] + ns]
            loads[least] += work_ns[first : first + len(least)]
        program[first : first + len(least)] = least
        first += len(least)
    place = 2 * program + ~is_large[by_cost].repeat(num_kv_heads)
    starts = np.zeros(2 * num_programs + 1, np.int32)
    starts[1:] = np.bincount(place, minlength=2 * num_programs).cumsum()
    return works[place.astype(np.uint16).argsort(kind="stable")].astype(np.int32), starts, loads

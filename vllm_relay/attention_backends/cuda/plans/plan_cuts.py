# SPDX-License-Identifier: Apache-2.0
"""Spans of a step cut into pieces, and these dealt to programs: the part of a plan (`plan.py`) that
costs decide.

Pure: numpy in, numpy out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_relay.attention_backends.cuda.config import KernelSetup
from vllm_relay.attention_backends.ragged import repeated

MODE_FOLD = 0
"""One state of all the tokens, segment folded onto segment: for pieces that begin a section."""
MODE_SEGMENTS = 1
"""One state per segment: for pieces that begin another segment."""
MODE_TILES = 2
"""One state per tile of tokens: for pieces that begin inside of a segment."""
MODE_DIRECT = 3
"""The rows see nothing else: the output is written."""

PARTS = 2 ** (np.arange(-6, 13) / 3)
"""Into how many items a program's share of the work may be cut."""


@dataclass(frozen=True, eq=False)
class Spans:
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
class Pieces:
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

    @cached_property
    def most(self) -> float:
        return float(self.loads.max())

    @cached_property
    def mean(self) -> float:
        return float(self.loads.sum()) / len(self.loads)


def finer_cuts(
    spans: Spans, rows: np.ndarray, share_ns: float, setup: KernelSetup
) -> list[np.ndarray]:
    """Tokens of the pieces of each span, in several ways, those first that should keep programs
    busiest: none can end before it has its part of all work, and of the pieces above any size."""
    config = setup.config
    tile, segment, section = config.tile_tokens, config.segment_tokens, config.section_tokens
    sizes = np.append(np.arange(tile, segment, tile), np.arange(segment, section + 1, segment))
    is_large = (rows > config.small_rows).astype(np.intp)
    height = setup.heights[is_large]
    token_ns, start_ns = (each[is_large] for each in setup.height_costs)
    row_tiles = -(-rows // height) * setup.num_kv_heads
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
    piece_ns = piece_tokens * token_ns + start_ns
    piece_ns += (np.minimum(rows, height) * states / 2 - height) * setup.cost.state_ns
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


def cut_spans(
    spans: Spans,
    rows: np.ndarray,
    piece_tokens: np.ndarray,
    setup: KernelSetup,
) -> Pieces:
    """Segments, or sections, cut into pieces of so many tokens, of each span; and dealt. What is
    left of a segment is cut as if it began there."""
    config = setup.config
    tile, segment, section = config.tile_tokens, config.segment_tokens, config.section_tokens
    unit = np.where(piece_tokens < segment, segment, section)
    per_unit = -(-unit // piece_tokens)
    origin = np.where(spans.begin % segment, spans.begin, 0)
    units, rest = np.divmod(np.array((spans.begin, spans.end - 1)) - origin, unit)
    first, last = units * per_unit + rest // piece_tokens
    span, piece = repeated(last + 1 - first, first)
    units, piece = np.divmod(piece, per_unit[span])
    size, unit = piece_tokens[span], unit[span]
    unit_begin = units * unit + origin[span]
    begin = unit_begin + piece * size
    span_begin, span_end = spans.begin[span], spans.end[span]
    end = np.minimum(np.minimum(begin + size, unit_begin + unit), span_end)
    begin = np.maximum(begin, span_begin)
    ends_span = end == span_end
    begins_segment = begin % segment == 0
    folds = (end % segment == 0) | (spans.final[span] & ends_span)
    mode = np.where((begin % section == 0) & folds, MODE_FOLD, MODE_SEGMENTS)
    mode = np.where(begins_segment, mode, MODE_TILES)
    tokens = end - begin
    is_whole = (begin == span_begin) & ends_span
    mode[spans.alone[span] & is_whole & begins_segment & (tokens <= segment)] = MODE_DIRECT
    state_tokens = np.array([section, segment, tile, segment])[mode]
    slots = np.where(mode == MODE_DIRECT, 0, -(-tokens // state_tokens))

    is_large = (rows > config.small_rows).astype(np.intp)
    piece, row = repeated(-(-rows // setup.heights[is_large])[span])
    item_span = span[piece]
    is_large = is_large[item_span]
    height = setup.heights[is_large]
    token_ns, start_ns = (each[is_large] for each in setup.height_costs)
    row *= height
    read_tokens = (-(-end // tile) * tile - begin)[piece]
    # the other half of what states cost is read by all programs alike
    written = np.minimum(rows[item_span] - row, height) * slots[piece] / 2 - height
    item_ns = token_ns * read_tokens + start_ns + written * setup.cost.state_ns
    works, program_starts, loads = deal(item_ns, is_large, setup)
    return Pieces(
        span, begin, end, mode, state_tokens, slots, piece, row, works, program_starts, loads
    )


def deal(
    item_ns: np.ndarray, is_large: np.ndarray, setup: KernelSetup
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`works`, `program_starts` and `loads`: the largest first, each to a program that has least
    so far (Graham, Bounds on Multiprocessing Timing Anomalies, 1969), as many at once as no other
    of them would change."""
    num_kv_heads, num_programs = setup.num_kv_heads, setup.num_programs
    by_cost = np.argsort(-item_ns, kind="stable")
    work_ns = item_ns[by_cost]
    (alike_ends,) = (work_ns[1:] != work_ns[:-1]).nonzero()
    alike_ends = (alike_ends + 1) * num_kv_heads
    work_ns = work_ns.repeat(num_kv_heads)
    loads = np.zeros(num_programs)
    # works sorted by programs, those of one as they were dealt: in the bits below
    bits = len(work_ns).bit_length()
    dtype = np.min_scalar_type(2 * num_programs << bits)
    program = np.empty(len(work_ns), dtype)
    first = 0
    for end in [*alike_ends.tolist(), len(work_ns)]:
        while first < end:
            least = loads.argsort(kind="stable")[: len(work_ns) - first]
            least_loads, ns = loads[least], work_ns[first]
            if end - first > num_programs:
                # as many as all would get if they could be divided, but whole ones
                sums = least_loads.cumsum() + (end - first) * ns
                level = (sums / np.arange(1, num_programs + 1)).min()
                counts = np.maximum((level - least_loads) // ns, 0).astype(np.int64)
                loads[least] += counts * ns
                least = least.repeat(counts)
            else:
                least = least[: least_loads.searchsorted(least_loads[0] + ns, side="right")]
                loads[least] += work_ns[first : first + len(least)]
            program[first : first + len(least)] = least
            first += len(least)
    place = 2 * program + (1 - is_large[by_cost]).astype(dtype).repeat(num_kv_heads)
    dealt = np.arange(len(place), dtype=dtype)
    by_place = (place << bits) + dealt
    by_place.sort()
    starts = by_place.searchsorted(np.arange(2 * num_programs + 1, dtype=dtype) << bits)
    works = (by_cost[:, None] * num_kv_heads + np.arange(num_kv_heads)).astype(np.int32).ravel()
    by_place &= (1 << bits) - 1
    return works[by_place.astype(np.intp)], starts.astype(np.int32), loads

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
from vllm_relay.attention_backends.cuda.plans.spans import Spans
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
class Pieces:
    """Spans that are cut, in token order, and who does which."""

    spans: Spans
    span: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    mode: np.ndarray
    slots: np.ndarray
    """Of each entry."""

    @property
    def num_slots(self) -> int:
        """Of all entries."""
        return int((self.spans.last - self.spans.first)[self.span] @ self.slots)

    @cached_property
    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """int [items], twice: the piece of each, and its first row."""
        piece, tile = repeated(self.spans.row_tiles[self.span])
        return piece, tile * self.spans.setup.heights[self.spans.height[self.span[piece]]]

    @cached_property
    def dealt(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`works`, `program_starts` and `loads` of a plan."""
        spans, setup, (piece, row) = self.spans, self.spans.setup, self.items
        span, tile = self.span[piece], setup.config.tile_tokens
        height, rows = spans.height[span], spans.rows[span] - row
        read_tokens = (-(-self.end // tile) * tile - self.begin)[piece]
        item_ns = setup.items_ns(height, rows, read_tokens, self.slots[piece])
        return deal(item_ns, height, setup)

    @cached_property
    def most_ns(self) -> float:
        """Of a program."""
        return float(self.dealt[2].max())

    @cached_property
    def mean_ns(self) -> float:
        return float(self.dealt[2].mean())


def finer_cuts(spans: Spans, share_ns: float) -> list[np.ndarray]:
    """Tokens of the pieces of each span, in several ways, those first that should keep programs
    busiest: none can end before it has its part of all work, and of the pieces above any size."""
    setup, tokens = spans.setup, spans.tokens
    config = setup.config
    tile, segment, section = config.tile_tokens, config.segment_tokens, config.section_tokens
    sizes = np.append(np.arange(tile, segment, tile), np.arange(segment, section + 1, segment))
    token_ns = setup.height_costs[0][spans.height]
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
    pieces *= (piece_tokens > 0) * spans.row_tiles * setup.num_kv_heads
    piece_ns = np.hstack(list(setup.items_ns(spans.height, spans.rows, piece_tokens, states)))
    items = np.hstack(list(pieces))
    by_cost = np.argsort(-piece_ns, axis=1)
    piece_ns = np.take_along_axis(piece_ns, by_cost, axis=1)
    items = np.take_along_axis(items, by_cost, axis=1)
    at_least_ns = (np.ceil(items.cumsum(axis=1) / setup.num_programs) * piece_ns).max(axis=1)
    least_ns = np.maximum(at_least_ns, (items * piece_ns).sum(axis=1) / setup.num_programs)
    by_time = np.argsort(least_ns, kind="stable")
    every_other = np.arange(len(tokens)) % 2 == 0
    finer = np.where(every_other, size, np.append(size[1:], size[-1:], axis=0))
    return list(np.stack((size, finer), axis=1)[by_time].reshape(-1, len(tokens)))


def cut_spans(spans: Spans, piece_tokens: np.ndarray) -> Pieces:
    """Segments, or sections, cut into pieces of so many tokens, of each span. What is left of one
    is cut as if it began there."""
    config = spans.setup.config
    tile, segment, section = config.tile_tokens, config.segment_tokens, config.section_tokens
    unit = np.where(piece_tokens < segment, segment, section)
    per_unit = -(-unit // piece_tokens)
    units, rest = np.divmod(spans.tokens - 1, unit)
    span, piece = repeated(units * per_unit + rest // piece_tokens + 1)
    units, piece = np.divmod(piece, per_unit[span])
    size, unit = piece_tokens[span], unit[span]
    span_end = spans.end[span]
    begin = spans.begin[span] + units * unit
    end = np.minimum(begin + unit, span_end)
    begin += piece * size
    end = np.minimum(begin + size, end)
    is_final = (end == span_end) & spans.final[span]
    folds = (begin % section == 0) & ((end % segment == 0) | is_final)
    mode = np.where(folds, MODE_FOLD, MODE_SEGMENTS)
    mode[begin % segment > 0] = MODE_TILES
    tokens = end - begin
    mode[spans.alone[span] & (tokens == spans.tokens[span])] = MODE_DIRECT
    slots = -(-tokens // np.array([section, segment, tile, segment])[mode])
    slots[mode == MODE_DIRECT] = 0
    return Pieces(spans, span, begin, end, mode, slots)


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
            if end - first > 4 * num_programs:
                # many rounds at once: as if works could be divided, but whole ones
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
    first_works = (by_cost * num_kv_heads).astype(np.int32)
    works = (first_works[:, None] + np.arange(num_kv_heads, dtype=np.int32)).ravel()
    by_place &= (1 << bits) - 1
    return works[by_place.astype(np.intp)], starts.astype(np.int32), loads

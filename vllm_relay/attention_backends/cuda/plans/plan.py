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

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from vllm_relay.attention_backends.cuda.config import KernelSetup
from vllm_relay.attention_backends.cuda.plans.plan_cuts import Pieces, cut_spans, finer_cuts
from vllm_relay.attention_backends.cuda.plans.spans import spans_of
from vllm_relay.attention_backends.forest import Forest
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
"""So many of the finer cuts, those that should be fastest, are dealt to see how evenly."""

_KINDS = np.array([BEGINS_SEGMENT | IS_SECTION, BEGINS_SEGMENT, 0, 0])
"""Of the states of a piece, by its mode, but for where sections begin."""


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
    max_slots: int | None = None,
) -> tuple[Forest, GpuPlan]:
    """The work list of a step, and what it shares.

    Args:
        forest: who shares what. Ends of ranges are rounded down to whole tiles; where that takes
            too many slots, to whole segments, or sections, or to nothing.
        query_start_loc: int32 [requests + 1].
        seq_lens: int32 [requests]: KV tokens, query tokens included; or upper bounds, as kernels
            look up how long requests are.
        least_seq_lens: lower bounds, `seq_lens` unless given; windows begin by them.
        window_tokens: that every layer sees at most, 0 for all.
        max_slots: that there is room for. A plan may take more if nothing is shared or cut.
    """
    bounds = (seq_lens if least_seq_lens is None else least_seq_lens, seq_lens)
    spans = spans_of(forest, query_start_loc, bounds, setup, window_tokens, max_slots)
    whole = cut_spans(spans, np.full(len(spans.node), setup.config.section_tokens))
    cuts = [whole]
    if whole.most_ns > GOOD_BALANCE * whole.mean_ns:
        for piece_tokens in finer_cuts(spans, whole.mean_ns):
            pieces = cut_spans(spans, piece_tokens)
            if max_slots is not None and pieces.num_slots > max_slots:
                continue
            cuts.append(pieces)
            if pieces.most_ns <= GOOD_BALANCE * whole.mean_ns or len(cuts) > CUTS_COMPARED:
                break
    # what costs are is known roughly: of those about as fast, the one whose loads are most alike
    least_ns = min(each.most_ns for each in cuts)
    alike = [each for each in cuts if each.most_ns <= ALIKE * least_ns]
    best = min(alike, key=lambda each: each.most_ns / max(each.mean_ns, 1e-9))
    is_all = spans.unit_tokens == setup.config.tile_tokens
    shared = forest if is_all else forest.in_multiples(spans.unit_tokens)
    return shared, _assembled(best, forest, query_start_loc)


def _assembled(pieces: Pieces, forest: Forest, query_start_loc: np.ndarray) -> GpuPlan:
    """The plan of these pieces, with a place for every state."""
    spans, span = pieces.spans, pieces.span
    lens = (query_start_loc[1:] - query_start_loc[:-1])[forest.order]
    # slots of an entry: of the nodes above, of the pieces before, of what its request reads alone
    num_nodes = len(forest.nodes)
    node, slots = spans.node[span], pieces.slots
    slots_of = np.bincount(node, slots, num_nodes + len(lens)).astype(np.int64)
    slots_above = np.empty_like(slots_of)
    slots_above[:num_nodes] = forest.sum_above(slots_of[:num_nodes])
    slots_above[num_nodes:] = forest.sum_over_nodes(slots_of[:num_nodes])
    # pieces are in the order of nodes
    slot = slots.cumsum() - slots + (slots_above - slots_of.cumsum() + slots_of)[node]
    request, within = repeated(lens)
    requests = forest.order[request]
    entries = np.empty((len(request), ENTRY_FIELDS), np.int32)
    entries[:, 0] = query_start_loc[requests] + within
    entries[:, 1] = requests
    entries[:, 2] = within - lens[request] + 1
    first_slot = starts((slots_above + slots_of)[num_nodes:][request])
    entries[:, 3] = first_slot[:-1]

    # sections are begun by what folds, and by the first segment of other pieces
    piece, state = repeated(slots)
    config, mode = spans.setup.config, pieces.mode
    begins_section = pieces.begin % config.section_tokens == 0
    kinds = _KINDS[mode][piece] + BEGINS_SECTION * (begins_section[piece] & (state == 0))
    first = spans.first[span]
    each, entry = repeated((spans.last[span] - first)[piece], first[piece])
    slot_kinds = np.empty(first_slot[-1], np.int32)
    slot_kinds[first_slot[entry] + (slot[piece] + state)[each]] = kinds[each]

    piece, row = pieces.items
    span = span[piece]
    items = (
        spans.row[span], spans.first[span], row, spans.rows[span], pieces.begin[piece],
        pieces.end[piece], slot[piece], mode[piece],
    )  # fmt: skip
    works, program_starts, loads = pieces.dealt
    return GpuPlan(
        entries=entries,
        items=np.array(items, np.int32).T,
        works=works,
        program_starts=program_starts,
        slot_kinds=slot_kinds,
        loads=loads,
    )

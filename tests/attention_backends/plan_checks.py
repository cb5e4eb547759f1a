# SPDX-License-Identifier: Apache-2.0
"""What every work list of the Triton kernels has to be."""

from __future__ import annotations

import numpy as np

from tests.attention_backends.strategies import AttentionProblem
from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.cuda.plans.plan import (
    BEGINS_SECTION,
    BEGINS_SEGMENT,
    IS_SECTION,
    GpuPlan,
)
from vllm_relay.attention_backends.cuda.plans.plan_cuts import MODE_DIRECT, MODE_FOLD, MODE_TILES

State = tuple[int, int, int, int | None]
"""First token, end, block table row, slot or None."""


def states_of(item: list[int], config: KernelConfig) -> list[tuple[int, int]]:
    """The tokens of each state that an item leaves, counted token by token."""
    *_, begin, end, _, mode = item
    if mode in (MODE_FOLD, MODE_DIRECT):
        return [(begin, end)]
    step = config.tile_tokens if mode == MODE_TILES else config.segment_tokens
    cuts = [begin, *(t for t in range(begin + 1, end) if t % step == 0), end]
    return list(zip(cuts, cuts[1:], strict=False))


def reads_of_entries(plan: GpuPlan, config: KernelConfig, group: int) -> dict[int, list[State]]:
    """What items compute for each entry; asserts that every row of an entry gets the same."""
    rows_seen: dict[tuple[int, ...], set[int]] = {}
    for item in plan.items.tolist():
        table_row, first, row, rows, begin, _, slot, mode = item
        is_large = rows > config.small_rows
        tile_rows = config.large_rows if is_large else config.small_rows
        assert row % tile_rows == 0 and row < rows
        assert (mode == MODE_TILES) == (begin % config.segment_tokens != 0)
        for one_row in range(row, min(row + tile_rows, rows)):
            entry, head = divmod(one_row, group)
            own = int(plan.entries[first + entry, 3]) + slot
            for number, (state_begin, state_end) in enumerate(states_of(item, config)):
                place = -1 if mode == MODE_DIRECT else own + number
                key = (first + entry, state_begin, state_end, table_row, place)
                assert head not in rows_seen.setdefault(key, set())
                rows_seen[key].add(head)
                if mode != MODE_DIRECT:
                    kind = int(plan.slot_kinds[place])
                    assert bool(kind & IS_SECTION) == (mode == MODE_FOLD)
                    assert bool(kind & BEGINS_SEGMENT) == (state_begin % config.segment_tokens == 0)
                    assert bool(kind & BEGINS_SECTION) == (state_begin % config.section_tokens == 0)
    reads: dict[int, list[State]] = {}
    for (entry, begin, end, table_row, place), heads in rows_seen.items():
        assert heads == set(range(group))
        reads.setdefault(entry, []).append((begin, end, table_row, None if place < 0 else place))
    return reads


def check_works(plan: GpuPlan, config: KernelConfig, num_kv_heads: int) -> None:
    """Every item is done once for every kv head, those of large tiles first."""
    assert sorted(plan.works.tolist()) == list(range(len(plan.items) * num_kv_heads))
    starts = plan.program_starts.tolist()
    assert starts[0] == 0 and starts[-1] == len(plan.works) and starts == sorted(starts)
    assert len(starts) == 2 * len(plan.loads) + 1
    is_large = plan.items[plan.works // num_kv_heads, 3] > config.small_rows
    for first, second, end in zip(starts[:-1:2], starts[1::2], starts[2::2], strict=True):
        assert is_large[first:second].all() and not is_large[second:end].any()


def check_plan(plan: GpuPlan, problem: AttentionProblem, config: KernelConfig) -> None:
    """Every query token reads the tokens it sees exactly once, in blocks that are its own, into
    slots of its own, in token order; nothing is folded before it is complete."""
    check_works(plan, config, problem.num_kv_heads)
    group = problem.query.shape[1] // problem.num_kv_heads
    reads = reads_of_entries(plan, config, group)
    table, window = problem.block_table.numpy(), problem.features.get("sliding_window") or 0
    starts, seq_lens = problem.query_start_loc.tolist(), problem.seq_lens.tolist()
    assert sorted(plan.entries[:, 0].tolist()) == list(range(starts[-1]))
    first_slots = [*plan.entries[:, 3].tolist(), plan.num_slots]
    for entry, (token, request, offset, first_slot) in enumerate(plan.entries.tolist()):
        query_len = starts[request + 1] - starts[request]
        index = token - starts[request]
        assert 0 <= index < query_len and offset == index - query_len + 1
        visible = seq_lens[request] + offset
        seen_from = max(0, visible - window) if window else 0
        its_reads = sorted(reads.get(entry, []))
        covered = 0
        for begin, end, table_row, _ in its_reads:
            assert covered <= begin < end <= seq_lens[request]
            assert begin == covered or covered < begin <= seen_from, "not read"
            covered = end
            seen = np.arange(max(begin, seen_from), min(end, visible))
            columns = np.unique(seen // problem.block_size)
            np.testing.assert_array_equal(table[table_row, columns], table[request, columns])
        assert covered >= visible
        slots = [place for *_, place in its_reads]
        if slots == [None]:
            (begin, end, *_) = its_reads[0]
            assert first_slots[entry + 1] == first_slot
            assert begin % config.segment_tokens == 0 and end - begin <= config.segment_tokens
        else:
            assert slots == list(range(first_slot, first_slots[entry + 1]))
            check_merging(plan, config, its_reads)


def check_merging(plan: GpuPlan, config: KernelConfig, reads: list[State]) -> None:
    """States are complete segments or sections of what is read, or tiles of a segment begun."""
    segment, section = config.segment_tokens, config.section_tokens
    for number, (begin, end, _, place) in enumerate(reads):
        assert place is not None
        is_last_of_segment = number + 1 == len(reads) or reads[number + 1][0] % segment == 0
        if plan.slot_kinds[place] & IS_SECTION:
            assert begin // section == (end - 1) // section and is_last_of_segment
        else:
            assert begin // segment == (end - 1) // segment
            if begin % segment:
                assert begin % config.tile_tokens == 0 and end - begin <= config.tile_tokens

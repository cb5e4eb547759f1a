# SPDX-License-Identifier: Apache-2.0
"""What every work list of the Triton kernels has to be, wherever it was made."""

from __future__ import annotations

import numpy as np

from tests.attention_backends.strategies import AttentionProblem
from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.cuda.plan import (
    MODE_DIRECT,
    MODE_TILE_STATES,
    GpuPlan,
    pieces,
)


def slot_ranges(begin: int, end: int, config: KernelConfig, folds: bool) -> list[tuple[int, int]]:
    """The tokens of each slot of a range, from the pieces."""
    result = []
    for piece_begin, piece_end, mode, _ in pieces(begin, end, config, folds):
        step = config.tile_tokens if mode == MODE_TILE_STATES else piece_end - piece_begin
        for first in range(piece_begin, piece_end, step):
            result.append((first, min(first + step, piece_end)))
    return result


def reads_of_entries(plan: GpuPlan, config: KernelConfig, group: int) -> dict[int, list[tuple]]:
    """For each query token all (first token, end, table row, slot or None) that items compute for
    it; asserts that every row of an entry gets the same."""
    rows_seen: dict[tuple, set[int]] = {}
    for items, is_large in ((plan.large_items, True), (plan.small_items, False)):
        tile_rows = config.large_rows if is_large else config.small_rows
        for item in items.tolist():
            table_row, first, row, rows, begin, end, slot, slots_per_entry, mode = item
            assert (rows > config.small_rows) == is_large
            assert row % tile_rows == 0 and row < rows
            for one_row in range(row, min(row + tile_rows, rows)):
                entry, head = divmod(one_row, group)
                token = int(plan.members[first + entry])
                step = config.tile_tokens if mode == MODE_TILE_STATES else end - begin
                for offset, state_begin in enumerate(range(begin, end, step)):
                    place = None if mode == MODE_DIRECT else slot + entry * slots_per_entry + offset
                    state_end = min(state_begin + step, end)
                    key = (token, state_begin, state_end, table_row, place)
                    assert head not in rows_seen.setdefault(key, set())
                    rows_seen[key].add(head)
    reads: dict[int, list[tuple]] = {}
    for (token, *read), heads in rows_seen.items():
        assert heads == set(range(group))
        reads.setdefault(token, []).append(tuple(read))
    return reads


def check_plan(
    plan: GpuPlan,
    problem: AttentionProblem,
    config: KernelConfig,
    max_query_len: int | None = None,
) -> None:
    """Every query token reads the tokens it sees exactly once, in blocks that are its own, into
    slots of its own that its chain lists in token order. Requests of more than `max_query_len`
    query tokens read nothing."""
    group = problem.query.shape[1] // problem.num_kv_heads
    reads = reads_of_entries(plan, config, group)
    table, window = problem.block_table.numpy(), problem.features.get("sliding_window") or 0
    starts, seq_lens = problem.query_start_loc.tolist(), problem.seq_lens.tolist()
    places = [place for its_reads in reads.values() for *_, place in its_reads]
    slots_used = [place for place in places if place is not None]
    assert len(set(slots_used)) == len(slots_used)
    assert set(slots_used) <= set(range(plan.num_slots))
    np.testing.assert_array_equal(plan.members[: starts[-1]], np.arange(starts[-1]))
    assert len(plan.visible) == len(plan.token_request) == starts[-1]

    for request in range(problem.num_requests):
        tokens = range(starts[request], starts[request + 1])
        if max_query_len is not None and len(tokens) > max_query_len:
            assert (plan.token_request[tokens.start : tokens.stop] == -1).all()
            assert reads.keys().isdisjoint(tokens)
            continue
        for index, token in enumerate(tokens):
            visible = seq_lens[request] - len(tokens) + index + 1
            seen_from = max(0, visible - window) if window else 0
            assert plan.visible[token] == visible and plan.token_entry[token] == index
            its_reads = sorted(reads.get(token, []))
            covered = 0
            for begin, end, table_row, _ in its_reads:
                assert covered <= begin < end <= seq_lens[request]
                assert begin == covered or covered < begin <= seen_from, "not read"
                covered = end
                seen = np.arange(max(begin, seen_from), min(end, visible))
                columns = np.unique(seen // problem.block_size)
                np.testing.assert_array_equal(table[table_row, columns], table[request, columns])
            assert covered >= visible

            chain = plan.chains[request, : plan.chain_length[request]].tolist()
            slots: list[int] = []
            tokens_of_slots: list[tuple[int, int]] = []
            for range_index, first_entry in chain:
                begin, end, slot, slots_per_entry, folds = plan.ranges[range_index].tolist()
                slots += range(
                    slot + (first_entry + index) * slots_per_entry,
                    slot + (first_entry + index + 1) * slots_per_entry,
                )
                tokens_of_slots += slot_ranges(begin, end, config, bool(folds))
            if plan.token_request[token] < 0:
                (begin, end, _, place), *others = its_reads
                assert place is None and not others and len(chain) == 1
                assert begin % config.segment_tokens == 0 and end - begin <= config.segment_tokens
            else:
                assert plan.token_request[token] == request
                assert [(begin, end, place) for begin, end, _, place in its_reads] == [
                    (*extent, slot) for extent, slot in zip(tokens_of_slots, slots, strict=True)
                ]

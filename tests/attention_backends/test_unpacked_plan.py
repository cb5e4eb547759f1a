# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.attention_backends.cpu.unpacked_plan import (
    MAX_ITEM_ROWS,
    MAX_PARTIAL_ROWS,
    plan_unpacked,
)
from vllm_relay.attention_backends.cpu.work_items import SEGMENT_TOKENS
from vllm_relay.attention_backends.plan import MAX_BLOCK_ROWS

REQUESTS = st.lists(
    st.tuples(st.integers(1, 3000), st.integers(0, 9000), st.integers(0, 200_000)), min_size=1,
    max_size=5,
)  # fmt: skip


@settings(max_examples=cases(100))
@given(REQUESTS, st.sampled_from([1, 3, 4, 7, 300]), st.integers(1, 8), st.integers(1, 40))
def test_every_query_token_meets_every_segment_once(
    requests: list[tuple[int, int, int]], group_size: int, num_kv_heads: int, num_threads: int
) -> None:
    num_queries, begins, ends = (list(each) for each in zip(*requests, strict=True))
    plan = plan_unpacked(
        num_queries, begins, ends,
        group_size=group_size, num_kv_heads=num_kv_heads, num_threads=num_threads,
    )  # fmt: skip
    met = [np.zeros(each, int) for each in num_queries]
    row = 0
    for request, first, last, first_row in plan.blocks.tolist():
        assert first_row == row and first < last
        met[request][first:last] += 1
        row += (last - first) * group_size
        assert (last - first) * group_size <= max(MAX_BLOCK_ROWS, group_size)
    assert all((each == 1).all() for each in met)
    counted = plan_unpacked(
        np.array(num_queries), np.array(begins), np.array(ends),
        group_size=group_size, num_kv_heads=num_kv_heads, num_threads=num_threads,
    )  # fmt: skip
    assert type(counted.splits_segments) is bool  # or the extension does not take it

    segments = np.zeros((len(plan.blocks), plan.num_segments), int)
    rows_before = [*plan.blocks[:, 3].tolist(), row]
    for first_block, last_block, first, last in plan.items.tolist():
        assert first_block < last_block
        segments[first_block:last_block, first:last] += 1
        item_rows = rows_before[last_block] - rows_before[first_block]
        assert item_rows <= plan.max_item_rows
    assert segments.max(initial=0) <= 1
    for block, (request, *_) in enumerate(plan.blocks.tolist()):
        read = segments[block, begins[request] // SEGMENT_TOKENS :]
        assert (read[: max(0, -(-ends[request] // SEGMENT_TOKENS))] == 1).all()
    assert plan.max_item_rows <= MAX_ITEM_ROWS + max(MAX_BLOCK_ROWS, group_size)
    if plan.splits_segments:
        assert row * num_kv_heads * plan.num_segments <= MAX_PARTIAL_ROWS
    if num_threads == 1:
        assert not plan.splits_segments


def test_many_rows_are_divided_and_few_share_the_segments() -> None:
    def items(num_queries: int, num_kv_heads: int, num_threads: int) -> tuple[int, bool]:
        plan = plan_unpacked(
            [num_queries], [0], [131_072],
            group_size=4, num_kv_heads=num_kv_heads, num_threads=num_threads,
        )  # fmt: skip
        return len(plan.items), plan.splits_segments

    assert items(500, 8, 2) == (1, False)  # a kv head for each
    assert items(1, 8, 16) == (8, True)
    assert items(2000, 1, 4) == (16, False)
    assert items(1, 1, 1) == (1, False)

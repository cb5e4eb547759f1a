# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.strategies import random_problem
from tests.support.depth import cases
from vllm_relay.attention_backends.cost import KERNEL_COSTS
from vllm_relay.attention_backends.forest import Forest, build_forest
from vllm_relay.attention_backends.plan import SEGMENT_TOKENS, plan_step

BLOCK_SIZE = 32
NUM_KV_HEADS = 8


def shared_prefix(num_requests, prefix_tokens, own_tokens):
    """block_table, query_start_loc and seq_lens of decodes that share `prefix_tokens`."""
    blocks = -(-(prefix_tokens + own_tokens) // BLOCK_SIZE)
    table = 1 + np.arange(num_requests * blocks, dtype=np.int32).reshape(num_requests, blocks)
    table[:, : prefix_tokens // BLOCK_SIZE] = table[0, : prefix_tokens // BLOCK_SIZE]
    seq_lens = np.full(num_requests, prefix_tokens + own_tokens, np.int32)
    return table, np.arange(num_requests + 1, dtype=np.int32), seq_lens


def plan_of(batch, *, group_size=4, num_threads=1, kernel="avx512_bf16", **keywords):
    return plan_step(
        *batch,
        block_size=BLOCK_SIZE,
        num_heads=NUM_KV_HEADS * group_size,
        num_kv_heads=NUM_KV_HEADS,
        num_threads=num_threads,
        kernel=kernel,
        **keywords,
    )


def check_work_list(plan, query_start_loc, seq_lens):
    """Every entry meets each of its tokens once, in order, in exactly one item per segment."""
    entries, spans, row_blocks = plan.entries, plan.spans, plan.row_blocks
    query_lens = np.diff(query_start_loc)
    rows = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(query_start_loc, query_lens, strict=False)]
        or [np.empty(0, int)]
    )
    visible = np.concatenate(
        [np.arange(n) + s - n + 1 for s, n in zip(seq_lens, query_lens, strict=True)]
        or [np.empty(0, int)]
    )
    by_row = entries[np.argsort(entries[:, 0])]
    np.testing.assert_array_equal(by_row, np.stack((rows, visible), axis=1))

    end = 0
    for first_entry, last_entry, first_span, last_span in row_blocks.tolist():
        assert first_entry == end < last_entry
        end = last_entry
        assert last_entry - first_entry <= plan.max_block_entries
        met = np.zeros(last_entry - first_entry, int)
        for first, last, begin, span_end, _ in spans[first_span:last_span].tolist():
            assert first_entry <= first < last <= last_entry
            members = slice(first - first_entry, last - first_entry)
            assert (met[members] == begin).all() and begin % 32 == 0 and begin < span_end
            met[members] = span_end
        assert (met >= entries[first_entry:last_entry, 1]).all()
    assert end == len(entries)

    segments = [[] for _ in row_blocks]
    partial = np.zeros(plan.num_partial_entries, int)
    for block, first, last, partial_entry in plan.items.tolist():
        segments[block].append((first, last, partial_entry))
        if partial_entry >= 0:
            block_entries = row_blocks[block, 1] - row_blocks[block, 0]
            partial[partial_entry : partial_entry + (last - first) * block_entries] += 1
    assert (partial == 1).all()
    merges = {block: (entry, count) for block, entry, count in plan.merges.tolist()}
    for block, (first_entry, last_entry, _, _) in enumerate(row_blocks.tolist()):
        parts = sorted(segments[block])
        longest = int(entries[first_entry:last_entry, 1].max())
        count = max(1, -(-longest // SEGMENT_TOKENS))
        assert [first for first, _, _ in parts] == [0, *(last for _, last, _ in parts[:-1])]
        assert parts[-1][1] == count
        if len(parts) == 1:
            assert parts[0][2] == -1 and block not in merges
        else:
            # the states of a block's segments lie one after the other, in order
            for begin, _, entry in parts:
                assert entry == parts[0][2] + begin * (last_entry - first_entry)
            assert merges[block] == (parts[0][2], count)


@settings(max_examples=cases(15))
@given(seed=st.integers(0, 2**32 - 1))
def test_work_list_is_complete(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_tokens=int(rng.choice([500, 8000])))
    batch = [t.numpy() for t in (problem.block_table, problem.query_start_loc, problem.seq_lens)]
    plan = plan_step(
        *batch,
        block_size=problem.block_size,
        num_heads=problem.query.shape[1],
        num_kv_heads=problem.num_kv_heads,
        num_threads=int(rng.choice([1, 2, 64])),
        kernel=str(rng.choice(list(KERNEL_COSTS))),
        forest=[None, "auto", problem.forest()][rng.integers(3)],
    )
    check_work_list(plan, *batch[1:])


@pytest.mark.parametrize("num_threads", [1, 4, 64])
@pytest.mark.parametrize("kernel", KERNEL_COSTS)
def test_long_contexts_are_cut_for_threads(kernel, num_threads):
    batch = shared_prefix(20, 4 * SEGMENT_TOKENS, 3 * SEGMENT_TOKENS + 5)
    plan = plan_of(batch, kernel=kernel, num_threads=num_threads)
    check_work_list(plan, *batch[1:])
    assert len(plan.items) * NUM_KV_HEADS >= num_threads


def test_rows_are_cut_where_segments_are_not_enough():
    batch = shared_prefix(32, 1536, 5)
    for kernel, items in [("avx512_bf16", 5), ("amx_bf16", 1)]:
        assert len(plan_of(batch, kernel=kernel, group_size=1, num_threads=64).items) == items


def test_long_prefix_is_read_once_and_a_prefix_nobody_shares_is_not():
    stats = plan_of(shared_prefix(16, 1024, 40)).stats
    assert (stats.groups, stats.requests_shared, stats.forest_depth) == (1, 16, 1)
    assert stats.kv_tokens_logical == 16 * 1064
    assert stats.kv_tokens_read == 1024 + 16 * 40
    stats = plan_of(shared_prefix(16, 0, 40)).stats
    assert (stats.groups, stats.requests_shared, stats.forest_depth) == (0, 0, 0)
    assert stats.kv_tokens_logical == stats.kv_tokens_read == 16 * 40


def test_short_prefixes_are_left_alone_when_asked():
    batch = shared_prefix(16, 1024, 40)
    assert plan_of(batch, min_shared_tokens=1024).stats.groups == 1
    assert plan_of(batch, min_shared_tokens=1025).stats.groups == 0
    assert plan_of(batch, forest=None).stats.groups == 0


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([[0, 2, 0, 48, 0]], "node 0 ends at token 48, expected a multiple of the block size 32"),
        ([[0, 2, 0, 128, 0]], "sees only 104 tokens"),
        ([[0, 3, 0, 96, 0]], r"requests \[1, 2\] of node 0 do not have the blocks of request 0"),
        ([[0, 2, 32, 64, 0]], "begins at token 32"),
    ],
)
def test_forest_of_other_requests_is_refused(nodes, message):
    forest = Forest(np.arange(4, dtype=np.int32), np.array(nodes, np.int32))
    with pytest.raises(ValueError, match=message):
        plan_of(shared_prefix(4, 64, 40), forest=forest)


def test_forest_of_another_batch_size_is_refused():
    table, _, seq_lens = shared_prefix(3, 64, 40)
    with pytest.raises(ValueError, match="orders 3 requests, the batch has 4"):
        plan_of(shared_prefix(4, 64, 40), forest=build_forest(table, seq_lens, BLOCK_SIZE))

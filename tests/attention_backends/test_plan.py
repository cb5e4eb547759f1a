# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.strategies import random_problem
from tests.support.depth import cases
from vllm_relay.attention_backends.cost import KERNEL_COSTS
from vllm_relay.attention_backends.cpu.work_items import SEGMENT_TOKENS, TILE_TOKENS
from vllm_relay.attention_backends.forest import Forest, build_forest
from vllm_relay.attention_backends.plan import plan_step

BLOCK_SIZE = 32
NUM_KV_HEADS, HEAD_SIZE = 8, 128


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
        head_size=HEAD_SIZE,
        num_threads=num_threads,
        kernel=kernel,
        **keywords,
    )


def check_work_list(plan, query_start_loc, seq_lens, *, group_size=4, head_size=HEAD_SIZE):
    """Every entry meets each of its tokens once, in order, in exactly one item per segment, or in
    one score item, for each row in one weight item and for each dim in one value item."""
    work = plan.work
    entries, spans, row_blocks = plan.entries, work.spans, work.row_blocks
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
    partial = np.zeros(work.num_partial_entries, int)
    scores = np.zeros(work.num_scores, int)
    for block, first, last, partial_entry in work.items.tolist():
        segments[block].append((first, last, partial_entry))
    has_divisions = set()
    for index, division in enumerate(work.divisions.tolist()):
        block, segment, partial_entry, first_score, row_scores = division
        segments[block].append((segment, segment + 1, partial_entry))
        has_divisions.add(block)
        first_entry, last_entry, _, _ = row_blocks[block].tolist()
        visible = entries[first_entry:last_entry, 1].max() - segment * SEGMENT_TOKENS
        assert row_scores >= min(visible, SEGMENT_TOKENS)
        rows = (last_entry - first_entry) * group_size
        scores[first_score : first_score + rows * row_scores] += 1
        ranges = sorted(work.score_items[work.score_items[:, 0] == index, 1:].tolist())
        ends = [segment * SEGMENT_TOKENS, *(end for _, end in ranges)]
        assert [begin for begin, _ in ranges] == ends[:-1]
        assert ends[-1] == segment * SEGMENT_TOKENS + row_scores
        assert all(end % TILE_TOKENS == 0 for end in ends) and sorted(set(ends)) == ends
        parts = sorted(work.weight_items[work.weight_items[:, 0] == index, 1:].tolist())
        ends = [0, *(end for _, end in parts)]
        assert [begin for begin, _ in parts] == ends[:-1]
        assert ends[-1] == rows and sorted(set(ends)) == ends
        groups = sorted(work.value_items[work.value_items[:, 0] == index, 1:].tolist())
        ends = [0, *(end for _, end in groups)]
        assert [begin for begin, _ in groups] == ends[:-1]
        assert ends[-1] == head_size // 16 and sorted(set(ends)) == ends
    assert (scores == 1).all()
    merges = {block: (entry, count, flag) for block, entry, count, flag in work.merges.tolist()}
    assert len(merges) == len(work.merges)
    for block, (first_entry, last_entry, _, _) in enumerate(row_blocks.tolist()):
        parts = sorted(segments[block])
        longest = int(entries[first_entry:last_entry, 1].max())
        count = max(1, -(-longest // SEGMENT_TOKENS))
        assert [first for first, _, _ in parts] == [0, *(last for _, last, _ in parts[:-1])]
        assert parts[-1][1] == count
        if len(parts) == 1 and block not in has_divisions:
            assert parts[0][2] == -1 and block not in merges
        else:
            # the states of a block's segments lie one after the other, in order
            block_entries = last_entry - first_entry
            for begin, end, entry in parts:
                assert entry == parts[0][2] + begin * block_entries
                partial[entry : entry + (end - begin) * block_entries] += 1
            assert merges[block] == (parts[0][2], count, block in has_divisions)
    assert (partial == 1).all()


@settings(max_examples=cases(15))
@given(seed=st.integers(0, 2**32 - 1))
def test_work_list_is_complete(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_tokens=int(rng.choice([500, 8000])))
    batch = [t.numpy() for t in (problem.block_table, problem.query_start_loc, problem.seq_lens)]
    _, num_heads, head_size = problem.query.shape
    plan = plan_step(
        *batch,
        block_size=problem.block_size,
        num_heads=num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_size=head_size,
        num_threads=int(rng.choice([1, 2, 64])),
        kernel=str(rng.choice(list(KERNEL_COSTS))),
        forest=[None, "auto", problem.forest()][rng.integers(3)],
    )
    group_size = num_heads // problem.num_kv_heads
    check_work_list(plan, *batch[1:], group_size=group_size, head_size=head_size)


@pytest.mark.parametrize("num_threads", [1, 4, 64])
@pytest.mark.parametrize("kernel", KERNEL_COSTS)
def test_long_contexts_are_cut_for_threads(kernel, num_threads):
    batch = shared_prefix(20, 4 * SEGMENT_TOKENS, 3 * SEGMENT_TOKENS + 5)
    plan = plan_of(batch, kernel=kernel, num_threads=num_threads)
    check_work_list(plan, *batch[1:])
    work = plan.work
    assert (len(work.items) + len(work.score_items)) * NUM_KV_HEADS >= num_threads


@pytest.mark.parametrize(("kernel", "row_blocks"), [("avx512_bf16", 3), ("amx_bf16", 1)])
def test_rows_are_cut_and_segments_divided_where_there_are_not_enough(kernel, row_blocks):
    batch = shared_prefix(32, 1536, 5)
    few = plan_of(batch, kernel=kernel, group_size=1, num_threads=8).work
    assert len(few.row_blocks) == row_blocks and not len(few.divisions)
    many = plan_of(batch, kernel=kernel, group_size=1, num_threads=64).work
    assert len(many.row_blocks) == len(many.divisions) == row_blocks


@pytest.mark.parametrize("kernel", KERNEL_COSTS)
def test_fp8_is_half_the_bytes_and_widened_once_for_all_rows(kernel):
    cost = KERNEL_COSTS[kernel]
    over_fp8, rows = cost.over_fp8(), np.array([1, 100_000])
    assert replace(cost, tile_ns=0, row_ns=0, widen_ns=0).over_fp8().token_ns(rows).tolist() == [
        cost.stream_ns / 2
    ] * len(rows)
    assert (over_fp8.token_ns(rows) - cost.token_ns(rows))[1] == pytest.approx(cost.widen_ns)
    halves = over_fp8.product_ns(rows) * 2 + rows * min(cost.weight_ns, cost.row_ns)
    assert halves[1] == pytest.approx(over_fp8.token_ns(rows)[1])


def test_what_is_widened_once_is_worth_sharing():
    """Two requests that fill tiles of rows of their own, so that they multiply as fast apart."""
    batch = shared_prefix(2, 256, 5)
    assert plan_of(batch, group_size=48).stats.groups == 0
    assert plan_of(batch, group_size=48, is_fp8=True).stats.groups == 1


def test_no_more_is_cut_than_states_have_room():
    batch = shared_prefix(2, 0, 1 << 24)  # the states of the segments of one fill it
    plan = plan_of(batch, num_threads=64)
    check_work_list(plan, *batch[1:])
    assert plan.work.num_partial_entries * 4 * NUM_KV_HEADS == 1 << 18
    assert sorted(np.bincount(plan.work.items[:, 0]).tolist())[0] == 1


def test_long_prefix_is_read_once_and_a_prefix_nobody_shares_is_not():
    stats = plan_of(shared_prefix(16, 1024, 40)).stats
    assert (stats.groups, stats.requests_shared, stats.forest_depth) == (1, 16, 1)
    assert stats.kv_tokens_logical == 16 * 1064
    assert stats.kv_tokens_read == 1024 + 16 * 40
    stats = plan_of(shared_prefix(16, 0, 40)).stats
    assert (stats.groups, stats.requests_shared, stats.forest_depth) == (0, 0, 0)
    assert stats.kv_tokens_logical == stats.kv_tokens_read == 16 * 40


@pytest.mark.parametrize(("prefix_tokens", "groups"), [(192, 0), (224, 1)])
def test_a_prefix_is_shared_where_what_it_saves_is_worth_a_range(prefix_tokens, groups):
    """With 32 rows a request, 64 rows together save 1 ns per token, and a range costs 216 ns."""
    plan = plan_of(shared_prefix(2, prefix_tokens, 50), group_size=32)
    assert plan.stats.groups == groups


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

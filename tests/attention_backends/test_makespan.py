# SPDX-License-Identifier: Apache-2.0
"""How long the threads that carry out a plan would take, by the cost model: against what they would
take if the work of one thread could be divided among them evenly and at no cost."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.test_plan import HEAD_SIZE, NUM_KV_HEADS, plan_of, shared_prefix
from tests.support.depth import cases
from vllm_relay.attention_backends.cost import KERNEL_COSTS
from vllm_relay.attention_backends.cpu.work_items import SEGMENT_TOKENS

GROUP_SIZE = 4
BATCHES = [1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 48, 64]
CONTEXTS_TOKENS = [1024 << i for i in range(8)]


class Costs:
    """What each item of a plan costs for one KV head, by the cost model alone."""

    def __init__(self, plan, group_size=GROUP_SIZE):
        self.work, self.cost, self.group_size = plan.work, KERNEL_COSTS[plan.kernel], group_size

    def _spans(self, block, begin, end):
        """Of each span that has tokens in a range: its rows, how many, and what starting costs."""
        _, _, first_span, last_span = self.work.row_blocks[block]
        spans = self.work.spans[first_span:last_span].astype(np.int64)
        tokens = np.minimum(spans[:, 3], end) - np.maximum(spans[:, 2], begin)
        spans, tokens = spans[tokens > 0], tokens[tokens > 0]
        rows = (spans[:, 1] - spans[:, 0]) * self.group_size
        return rows, tokens, np.where(spans[:, 2] >= begin, self.cost.start_ns(rows), 0.0)

    def item_ns(self, block, first_segment, last_segment, _):
        begin, end = first_segment * SEGMENT_TOKENS, last_segment * SEGMENT_TOKENS
        rows, tokens, start_ns = self._spans(block, begin, end)
        return float((self.cost.token_ns(rows) * tokens + start_ns).sum())

    def score_ns(self, division, begin, end):
        rows, tokens, start_ns = self._spans(self.work.divisions[division, 0], begin, end)
        return float((self.cost.product_ns(rows) * tokens + start_ns / 2).sum())

    def weight_ns(self, division, first_row, last_row):
        rows, tokens, _ = self._segment(division)
        first_entry, last_entry, _, _ = self.work.row_blocks[self.work.divisions[division, 0]]
        share = (last_row - first_row) / ((last_entry - first_entry) * self.group_size)
        return float((rows * tokens).sum()) * share * self.cost.weight_ns

    def value_ns(self, division, first_group, last_group):
        rows, tokens, start_ns = self._segment(division)
        share = (last_group - first_group) / (HEAD_SIZE // 16)
        return float((self.cost.product_ns(rows, share) * tokens + start_ns / 2).sum())

    def _segment(self, division):
        block, segment, *_ = self.work.divisions[division]
        begin = segment * SEGMENT_TOKENS
        return self._spans(block, begin, begin + SEGMENT_TOKENS)

    def merge_ns(self, block, _, num_segments, __):
        first_entry, last_entry, _, _ = self.work.row_blocks[block]
        return (last_entry - first_entry) * self.group_size * num_segments * self.cost.merge_ns


def makespan_ns(plan, group_size=GROUP_SIZE, num_kv_heads=NUM_KV_HEADS):
    """Threads take items as the C++ driver hands them out, each the next one when it is done."""
    work, costs = plan.work, Costs(plan, group_size)

    def of_heads(price, table, heads_first=False):
        ns = [price(*row) for row in table.tolist()]
        return ns * num_kv_heads if heads_first else [x for x in ns for _ in range(num_kv_heads)]

    items = of_heads(costs.item_ns, work.items, plan.heads_first)
    passes = [
        items + of_heads(costs.score_ns, work.score_items),
        of_heads(costs.weight_ns, work.weight_items),
        of_heads(costs.value_ns, work.value_items),
        of_heads(costs.merge_ns, work.merges),
    ]
    total = 0.0
    for each in passes:  # between them, threads wait for one another
        busy_until = [0.0] * plan.num_threads
        for ns in each:
            heapq.heapreplace(busy_until, busy_until[0] + ns)
        total += max(busy_until)
    return total


def over_ideal(batch, num_threads, **keywords):
    alone = makespan_ns(plan_of(batch, num_threads=1, **keywords))
    return makespan_ns(plan_of(batch, num_threads=num_threads, **keywords)) * num_threads / alone


def decodes(lengths):
    """Requests of these numbers of tokens that share nothing."""
    table, starts, _ = shared_prefix(len(lengths), 0, max(lengths))
    return table, starts, np.array(lengths, np.int32)


@pytest.mark.parametrize("kernel", ["amx_bf16", "avx512_bf16", "avx512", "avx2"])
def test_64_threads_are_busy(kernel):
    ratios = {
        (requests, tokens): over_ideal(decodes([tokens] * requests), 64, kernel=kernel)
        for requests, tokens in itertools.product(BATCHES, CONTEXTS_TOKENS)
    }
    worst = max(ratios, key=ratios.get)
    assert ratios[worst] <= 1.25, f"{worst} (requests, tokens)"
    assert np.mean(list(ratios.values())) <= 1.03


@pytest.mark.parametrize("num_threads", [8, 12, 16, 24, 32, 48, 96, 128, 192])
def test_any_number_of_threads_is_busy_with_enough_to_read(num_threads):
    for requests, tokens in itertools.product([1, 2, 5, 7, 17, 33, 64], CONTEXTS_TOKENS[::2]):
        if requests * tokens * NUM_KV_HEADS >= 1024 * num_threads:
            ratio = over_ideal(decodes([tokens] * requests), num_threads)
            assert ratio <= 1.25, f"{requests} requests of {tokens} tokens"


def test_few_threads_divide_no_segment():
    for num_threads, requests in itertools.product([1, 2, 8], [1, 3, 64]):
        for tokens in CONTEXTS_TOKENS[::3]:
            batch = decodes([tokens] * requests)
            assert not len(plan_of(batch, num_threads=num_threads).work.divisions)
            assert over_ideal(batch, num_threads) <= 1.01


@settings(max_examples=cases(25))
@given(
    st.lists(st.floats(10, 16).map(lambda log2: int(2**log2)), min_size=1, max_size=40),
    st.sampled_from([16, 64, 150]),
)
def test_requests_of_different_lengths(lengths, num_threads):
    if sum(lengths) * NUM_KV_HEADS >= 1024 * num_threads:
        assert over_ideal(decodes(lengths), num_threads) <= 1.25


@pytest.mark.parametrize(
    ("requests", "prefix_tokens", "own_tokens"),
    [(32, 2048, 128), (32, 8192, 128), (64, 16384, 512), (32, 1024, 1024), (16, 512, 64)],
)
def test_shared_prefixes_are_divided_too(requests, prefix_tokens, own_tokens):
    batch = shared_prefix(requests, prefix_tokens, own_tokens)
    assert over_ideal(batch, 64) <= 1.25

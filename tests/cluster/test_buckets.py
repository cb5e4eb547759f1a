# SPDX-License-Identifier: Apache-2.0
"""Prompts that stream in, given to replicas by prefix."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.cluster.buckets import BucketPrompt, PrefixBuckets
from vllm_relay.cluster.replica_index import PredictedCaches, chain_of
from vllm_relay.cluster.told_caches import ToldCaches

BLOCK = 16


def prompt(number: int, chain: list[int], own_tokens: int = 8) -> BucketPrompt[int]:
    # blocks are named by their prefixes
    named, name = [], 0
    for block in chain:
        name = hash((name, block)) & 0xFFFF_FFFF_FFFF
        named.append(name)
    return BucketPrompt(number, named, len(chain) * BLOCK + own_tokens)


def filled(prompts: list[BucketPrompt[int]], caches: PredictedCaches) -> PrefixBuckets[int]:
    buckets: PrefixBuckets[int] = PrefixBuckets(caches, BLOCK)
    for each in prompts:
        buckets.add(each)
    return buckets


def drain(
    prompts: list[BucketPrompt[int]], caches: PredictedCaches, max_buffered: int
) -> list[list[int]]:
    """What each replica is given, in turns, where so many are known at a time."""
    buckets: PrefixBuckets[int] = PrefixBuckets(caches, BLOCK)
    given_to: list[list[int]] = [[] for _ in range(caches.held.num_replicas)]
    waiting = deque(prompts)
    while waiting or len(buckets):
        was_given = False
        for replica, items in enumerate(given_to):
            while waiting and len(buckets) < max_buffered:
                buckets.add(waiting.popleft())
            found = buckets.next(replica)
            if found is not None:
                items.append(found.item)
                was_given = True
        assert was_given, "prompts are left that nobody is given"
    return given_to


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=40),
    st.integers(1, 4),
    st.integers(1, 50),
    st.integers(4, 100),
)
def test_every_prompt_is_given_once(
    chains: list[list[int]], replicas: int, max_buffered: int, num_blocks: int
) -> None:
    prompts = [prompt(number, chain) for number, chain in enumerate(chains)]
    given_to = drain(prompts, PredictedCaches([num_blocks] * replicas), max_buffered)
    assert sorted(sum(given_to, [])) == list(range(len(chains)))


@pytest.mark.parametrize(
    ("assumed", "came", "joins"),
    [
        # four prompts are left with 8 tokens of their own and answers, in a prefix of 320 tokens
        (0, [], False),
        (71, [], False),
        (73, [], True),
        (1024, [], True),
        (1024, [1] * 20, False),
        (64, [1, 2, 3], False),
        (64, [200] * 2, True),
        (1, [64, 200], True),
        (1, [64, 140], False),
    ],
)
def test_what_answers_take_is_the_mean_of_those_that_came(
    assumed: int, came: list[int], joins: bool
) -> None:
    buckets: PrefixBuckets[int] = PrefixBuckets(PredictedCaches([64, 64]), BLOCK, assumed)
    for number in range(5):
        buckets.add(prompt(number, list(range(20))))
    assert buckets.next(0) is not None
    for num_tokens in came:
        buckets.answered(num_tokens)
    assert (buckets.next(1) is not None) == joins


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=40),
    st.integers(2, 4),
)
def test_what_a_lost_replica_had_is_given_again(chains: list[list[int]], replicas: int) -> None:
    prompts = [prompt(number, chain) for number, chain in enumerate(chains)]
    buckets = filled(prompts, PredictedCaches([64] * replicas))
    had = [found for _ in range(len(chains) // 2) if (found := buckets.next(0)) is not None]
    buckets.lose(0)
    for each in had:
        buckets.add(each)
    seen: Counter[int] = Counter()
    while len(buckets):
        for replica in range(1, replicas):
            found = buckets.next(replica)
            if found is not None:
                seen[found.item] += 1
    assert seen == Counter(range(len(chains)))


def test_each_replica_has_prefixes_of_its_own() -> None:
    prompts = [prompt(10 * p + n, [p, p, p]) for n in range(10) for p in range(4)]
    given_to = drain(prompts, PredictedCaches([100] * 2), 100)
    homes = [[number // 10 for number in each] for each in given_to]
    assert not set(homes[0]) & set(homes[1])
    for each in homes:
        assert each == sorted(each, key=each.index), "prefix by prefix"


def test_a_prefix_of_many_prompts_is_shared_out_and_one_of_few_is_not() -> None:
    long_prefix = list(range(64))
    few = filled(
        [prompt(number, long_prefix, own_tokens=8) for number in range(4)],
        PredictedCaches([100] * 2),
    )
    assert few.next(0) is not None
    assert few.next(1) is None, "1,024 tokens are not computed again for 24"
    many = filled(
        [prompt(number, long_prefix, own_tokens=800) for number in range(4)],
        PredictedCaches([100] * 2),
    )
    assert many.next(0) is not None
    assert many.next(1) is not None


def test_a_prefix_that_comes_again_goes_where_it_is_held() -> None:
    buckets = filled([prompt(p, [p, p]) for p in range(2)], PredictedCaches([100] * 2))
    first = [buckets.next(0), buckets.next(1)]
    for p in (1, 0):
        buckets.add(prompt(10 + p, [p, p]))
    again = [buckets.next(0), buckets.next(1)]
    for before, after in zip(first, again, strict=True):
        assert before is not None and after is not None
        assert after.item == before.item + 10


def token_prompt(prefix: int, number: int, num_blocks: int) -> BucketPrompt[tuple[int, int]]:
    """Of a prefix of several blocks, and tokens of its own."""
    tokens = [prefix] * BLOCK * num_blocks
    return BucketPrompt((prefix, number), chain_of(tokens, BLOCK), len(tokens) + 8)


def tell(caches: ToldCaches, replica: int, prefix: int, num_blocks: int) -> None:
    names = [1000 * prefix + depth for depth in range(num_blocks)]
    caches.stored(replica, names, None, [prefix] * BLOCK * num_blocks)


@given(
    st.permutations(range(12)),
    st.integers(1, 12),
    st.sets(st.integers(0, 11), min_size=1, max_size=11),
)
def test_what_is_told_while_prompts_wait_counts(
    lengths: list[int], prompts_each: int, told: set[int]
) -> None:
    """All prefixes but one are worth more to a replica that holds none of them."""
    caches = ToldCaches([1000, 1000], BLOCK)
    buckets: PrefixBuckets[tuple[int, int]] = PrefixBuckets(caches, BLOCK)
    for prefix in range(12):
        for number in range(prompts_each):
            buckets.add(token_prompt(prefix, number, 1 + lengths[prefix]))
    for prefix in told:
        tell(caches, 1, prefix, 1 + lengths[prefix])
    other = buckets.next(0)
    assert other is not None and other.item[0] not in told
    visited = []
    for _ in range(len(told) * prompts_each):
        found = buckets.next(1)
        assert found is not None
        visited.append(found.item[0])
    assert set(visited) == told
    assert visited == sorted(visited, key=visited.index), "prefix by prefix"


def test_of_many_that_wait_those_that_came_first_are_looked_at() -> None:
    caches = ToldCaches([1000, 1000], BLOCK)
    buckets: PrefixBuckets[tuple[int, int]] = PrefixBuckets(caches, BLOCK)
    for prefix in range(100):
        buckets.add(token_prompt(prefix, 0, 1))
    tell(caches, 1, 15, 1)
    tell(caches, 1, 99, 1)
    given_to_1 = [found.item[0] for _ in range(85) if (found := buckets.next(1)) is not None]
    # the last is seen when 16 are left
    assert given_to_1 == [15, *(each for each in range(84) if each != 15), 99]


def test_what_is_no_longer_held_is_given_to_anybody() -> None:
    caches = ToldCaches([1000, 1000], BLOCK)
    tell(caches, 1, 0, 4)
    buckets: PrefixBuckets[tuple[int, int]] = PrefixBuckets(caches, BLOCK)
    for prefix in range(2):
        for number in range(3):
            buckets.add(token_prompt(prefix, number, 4 - prefix))
    caches.clear(1)
    tell(caches, 1, 1, 3)
    first = buckets.next(0)
    assert first is not None and first.item[0] == 0

# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive at replicas that come and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.cluster.gateway import MAX_REPLICAS, Gateway, RoutedRequest
from vllm_relay.cluster.requests import BLOCK_SIZE_TOKENS, RoutablePrompt

LONG = RoutablePrompt(range(100), 100 * BLOCK_SIZE_TOKENS, 10)
SHORT = RoutablePrompt((), 8, 10)


def test_a_prefix_stays_and_a_lost_replica_gets_nothing() -> None:
    gateway = Gateway(["a", "b"])
    first = gateway.route(LONG)
    first.answered()
    first.ended()
    second = gateway.route(LONG)
    assert (first.num_cached_tokens, second.replica) == (0, first.replica)
    assert second.num_cached_tokens == 99 * BLOCK_SIZE_TOKENS
    gateway.lost(first.replica)
    elsewhere = gateway.route(LONG)
    assert (elsewhere.replica, elsewhere.num_cached_tokens) == (gateway.replicas[0], 0)
    second.ended()  # long given back
    gateway.add(first.replica)
    again = gateway.route(LONG, among=[first.replica])
    assert (again.replica, again.num_cached_tokens) == (first.replica, 0)


def test_prefixes_that_come_one_after_the_other_are_spread() -> None:
    gateway = Gateway(["a", "b", "c"])
    homes = []
    for number in range(9):
        routed = gateway.route(RoutablePrompt([number], BLOCK_SIZE_TOKENS + 1, 1))
        routed.answered()
        routed.ended()
        homes.append(routed.replica)
    assert sorted(homes) == sorted("abc" * 3)


@given(st.lists(st.tuples(st.sampled_from(["add", "lose", "route", "end"]), st.integers(0, 4))))
def test_loads_are_those_of_requests_that_run(steps: list[tuple[str, int]]) -> None:
    gateway: Gateway[int] = Gateway()
    running: dict[int, list[RoutedRequest[int]]] = {}
    for what, number in steps:
        if what == "add":
            gateway.add(number)
            running.setdefault(number, [])
        elif what == "lose":
            gateway.lost(number)
            running.pop(number, None)
        elif what == "route" and running:
            routed = gateway.route(SHORT)
            running[routed.replica].append(routed)
            fewest = min(map(len, running.values()))
            assert len(running[routed.replica]) <= fewest + 1
        elif running.get(number):
            ended = running[number].pop()
            ended.ended()
            ended.ended()
    assert sorted(gateway.replicas) == sorted(running)
    for number in range(5):
        assert gateway.load_tokens(number) == len(running.get(number, ())) * 18


def test_caches_are_as_large_as_they_are_said_to_be() -> None:
    gateway: Gateway[str] = Gateway(cache_tokens=10 * BLOCK_SIZE_TOKENS)
    for name, cache_tokens in (("small", None), ("large", 200 * BLOCK_SIZE_TOKENS)):
        gateway.add(name, cache_tokens)
        gateway.route(LONG).ended()
        cached = gateway.route(LONG).num_cached_tokens
        assert cached == (10 if name == "small" else 99) * BLOCK_SIZE_TOKENS
        gateway.lost(name)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="no replica can be had"):
        Gateway().route(SHORT)
    with pytest.raises(ValueError, match="cache_tokens=0 given"):
        Gateway(cache_tokens=0)
    for cache_tokens in (-5, 0):
        with pytest.raises(ValueError, match=f"cache_tokens={cache_tokens} given"):
            Gateway[int]().add(1, cache_tokens=cache_tokens)
    gateway = Gateway(range(MAX_REPLICAS))
    gateway.add(3)
    with pytest.raises(ValueError, match="replica 9999 given, expected at most 1024"):
        gateway.add(9999)
    gateway.lost(3)
    gateway.add(9999)

# SPDX-License-Identifier: Apache-2.0
"""Where a request goes that arrives by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.cluster.replica_index import PredictedCaches
from vllm_relay.cluster.routing import Router, ServingCosts

BLOCK = 16
COSTS = ServingCosts(prompt_token=1e-3, output_token=1e-2)


def a_router(replicas: int = 3, num_blocks: int = 100) -> Router:
    return Router(PredictedCaches([num_blocks] * replicas), COSTS, BLOCK, replicas)


def route(router: Router, name: str, chain: list[int], own_tokens: int = 8) -> tuple[int, int]:
    routed = router.route(name, chain, len(chain) * BLOCK + own_tokens, 10)
    return routed.replica, routed.num_cached_tokens


def test_a_prefix_stays_where_it_is_known_until_waiting_costs_more() -> None:
    router = a_router()
    chain = list(range(50))
    homes = [route(router, f"first {n}", chain)[0] for n in range(40)]
    assert homes[0] == homes[1] == homes[2]
    assert len(set(homes)) == 3, "a prefix of many requests has several homes"
    # what others hold counts from the second request of each home on
    assert sum(homes.count(each) > 1 for each in set(homes)) == 3


def test_others_go_elsewhere() -> None:
    router = a_router()
    homes = {route(router, str(n), [100 * n + m for m in range(20)])[0] for n in range(3)}
    assert homes == {0, 1, 2}


@given(
    st.lists(
        st.tuples(st.sampled_from(["route", "answered", "ended"]), st.integers(0, 5)), max_size=60
    )
)
def test_loads_are_the_work_that_is_left(steps: list[tuple[str, int]]) -> None:
    router = a_router()
    open_work: dict[int, list[float]] = {}
    homes: dict[int, int] = {}
    for what, number in steps:
        if what == "route" and number not in open_work:
            replica, cached = route(router, str(number), [number, number + 100])
            tokens = 2 * BLOCK + 8 - cached
            homes[number] = replica
            open_work[number] = [tokens * COSTS.prompt_token, 10 * COSTS.output_token]
        elif what == "answered":
            router.answered(str(number))
            if number in open_work:
                open_work[number][0] = 0.0
        elif what == "ended":
            router.ended(str(number))
            open_work.pop(number, None)
    for replica in range(3):
        left = sum(sum(work) for number, work in open_work.items() if homes[number] == replica)
        assert router.loads[replica] == pytest.approx(left)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # prefix
            st.integers(0, 4),  # blocks of it
            st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True),
            st.booleans(),
        ),
        max_size=40,
    ),
    st.sampled_from([0.0, 0.25]),
)
def test_no_replica_is_better_than_the_one_chosen(
    steps: list[tuple[int, int, list[int] | None, bool]], prompt_token: float
) -> None:
    # powers of two: sums are exact
    costs = ServingCosts(prompt_token, 0.5)
    router = Router(PredictedCaches([8] * 5), costs, BLOCK, 5)
    running: list[list[str]] = [[] for _ in range(5)]
    last_routed = [-1] * 5
    for number, (prefix, depth, among, ends) in enumerate(steps):
        chain = [100 * prefix + level + 1 for level in range(depth)]
        candidates = among or list(range(5))
        keys = {}
        for each in candidates:
            held = 0
            while held < depth and router.index.held.holds(each, chain[held]):
                held += 1
            saved = 2 * prompt_token * BLOCK * held
            expected = router.loads[each] - saved
            keys[each] = (expected, -held, len(running[each]), last_routed[each])
        routed = router.route(str(number), chain, depth * BLOCK + 1, 1, among)
        assert routed.replica == min(candidates, key=keys.__getitem__) or (
            among and keys[routed.replica] == min(keys.values())
        )
        assert routed.num_cached_tokens == -keys[routed.replica][1] * BLOCK
        running[routed.replica].append(str(number))
        last_routed[routed.replica] = number
        if ends:
            router.ended(running[routed.replica].pop(0))


def test_a_lost_replica_gives_its_requests_back_and_is_empty() -> None:
    router = a_router(2)
    chain = list(range(10))
    home, _ = route(router, "a", chain)
    assert router.lost(home) == ["a"]
    assert router.loads[home] == 0
    replica, cached = route(router, "a", chain)
    assert cached == 0
    router.ended("a")
    other, cached = route(router, "b", chain)
    assert (other, cached) == (replica, 160)


def test_only_those_that_can_be_had() -> None:
    router = a_router()
    chain = list(range(10))
    route(router, "a", chain)
    assert router.route("b", chain, 168, 10, among=[2]).replica == 2
    with pytest.raises(ValueError, match="no replica can be had for request 'c'"):
        router.route("c", chain, 168, 10, among=[])
    with pytest.raises(ValueError, match="'a' was routed before"):
        router.route("a", chain, 168, 10)


def test_the_last_token_is_always_computed() -> None:
    router = a_router(1)
    router.route("a", [1, 2], 2 * BLOCK, 1)
    assert router.route("b", [1, 2], 2 * BLOCK, 1).num_cached_tokens == BLOCK


def test_costs_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_token=-1 given"):
        ServingCosts(-1, 0)
    with pytest.raises(ValueError, match="output_token=nan given"):
        ServingCosts(0, float("nan"))

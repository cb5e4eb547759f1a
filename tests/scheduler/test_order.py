# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.scheduler.order import PrefixOrder

Chain = tuple[bytes, ...]


def chain_of(*blocks: int) -> Chain:
    """Chained hashes: each names all blocks up to its own."""
    return tuple(bytes(blocks[: depth + 1]) for depth in range(len(blocks)))


def run_all(order: PrefixOrder[str], resident: set[bytes], chains: dict[str, Chain]) -> list[str]:
    """Takes one request after the other; each leaves its blocks in the cache."""
    ran = []
    while (request := order.first(0.0)) is not None:
        order.take(request, 0.0)
        resident.update(chains[request])
        ran.append(request)
    return ran


def order_of(chains: dict[str, Chain], resident: Sequence[bytes] = ()) -> list[str]:
    cache = set(resident)
    order: PrefixOrder[str] = PrefixOrder(cache.__contains__)
    for position, (request, chain) in enumerate(chains.items()):
        order.add(request, chain, position)
    return run_all(order, cache, chains)


def test_without_shared_blocks_the_order_of_arrival_is_kept() -> None:
    chains = {str(i): chain_of(i, 1, 2) for i in range(9)}
    assert order_of(chains) == list(chains)


def test_prefixes_run_one_after_the_other() -> None:
    chains = {"a1": chain_of(1, 1), "b1": chain_of(2, 1), "a2": chain_of(1, 2), "b2": chain_of(2)}
    assert order_of(chains) == ["a1", "a2", "b2", "b1"]


def test_nested_prefixes_are_used_up_before_the_next() -> None:
    chains = {
        "a": chain_of(1, 1, 1),
        "c": chain_of(1, 2, 1),
        "b": chain_of(1, 1, 2),
        "d": chain_of(1, 2, 2),
        "e": chain_of(1, 1, 3),
    }
    assert order_of(chains) == ["a", "b", "e", "c", "d"]


def test_a_split_prefix_loses_its_place_among_its_former_siblings() -> None:
    chains = {"a": chain_of(1, 1, 1), "b": chain_of(1, 1, 2), "c": chain_of(1)}
    for _ in range(20):
        assert order_of(chains) == ["c", "a", "b"]


def test_resident_prefixes_run_first() -> None:
    chains = {"a1": chain_of(1, 1), "a2": chain_of(1, 2), "a3": chain_of(1, 3), "b": chain_of(2)}
    assert order_of(chains, resident=chain_of(2)) == ["b", "a1", "a2", "a3"]


def test_prefixes_shared_by_more_requests_run_first() -> None:
    chains = {"a": chain_of(1), **{f"b{i}": chain_of(2, i) for i in range(4)}}
    assert order_of(chains) == ["b0", "b1", "b2", "b3", "a"]


def test_evicted_prefixes_lose_their_place() -> None:
    resident = set(chain_of(2))
    order: PrefixOrder[str] = PrefixOrder(resident.__contains__)
    order.add("a", chain_of(1), 0)
    order.add("b", chain_of(2), 1)
    assert order.first(0.0) == "b"
    resident.clear()
    assert order.first(0.0) == "a"


def test_siblings_are_held_until_the_prefix_is_resident() -> None:
    resident: set[bytes] = set()
    order: PrefixOrder[str] = PrefixOrder(resident.__contains__, max_hold_s=2.0)
    for position, request in enumerate(["leader", "sibling", "other"]):
        order.add(request, chain_of(2 if request == "other" else 1, 1, position), position)
    assert order.first(0.0) == "leader"
    order.take("leader", 0.0)
    assert order.first(0.1) == "other"
    order.take("other", 0.1)
    assert order.first(0.2) is None
    assert (len(order), order.held) == (1, 1)
    resident.update(chain_of(1))  # the first chunk is not all that is shared
    assert order.first(0.3) is None
    resident.update(chain_of(1, 1))
    assert order.first(0.4) == "sibling"
    assert order.held == 0


def test_holding_ends() -> None:
    for end in ("time", "release"):
        order: PrefixOrder[str] = PrefixOrder(lambda _: False, max_hold_s=2.0)
        order.add("leader", chain_of(1, 1), 0)
        order.add("sibling", chain_of(1, 2), 1)
        order.take("leader", 0.0)
        assert order.first(1.9) is None
        if end == "release":
            order.release("leader")
        assert order.first(1.9 if end == "release" else 2.0) == "sibling"


def test_a_leader_that_comes_back_holds_nobody() -> None:
    order: PrefixOrder[str] = PrefixOrder(lambda _: False, max_hold_s=2.0)
    order.add("leader", chain_of(1, 1), 0)
    order.add("sibling", chain_of(1, 2), 1)
    order.take("leader", 0.0)
    order.add("leader", chain_of(1, 1), 0)
    assert order.first(0.1) is not None


def test_late_sibling_of_a_part_of_the_prefix_is_held_too() -> None:
    order: PrefixOrder[str] = PrefixOrder(lambda _: False, max_hold_s=2.0)
    order.add("leader", chain_of(1, 1, 1, 1), 0)
    order.add("sibling", chain_of(1, 1, 1, 2), 1)
    order.take("leader", 0.0)
    order.add("late", chain_of(1, 1, 3), 2)  # splits the edge that is being computed
    assert order.first(0.1) is None
    order.release("leader")
    assert order.first(0.1) is not None


def test_a_sibling_that_comes_while_the_only_request_of_a_prefix_runs_is_held() -> None:
    resident: set[bytes] = set()
    order: PrefixOrder[str] = PrefixOrder(resident.__contains__, max_hold_s=5.0)
    order.add("leader", chain_of(1, 1, 1), 0)
    order.take("leader", 0.0)
    order.add("late", chain_of(1, 1, 2), 1)
    assert order.first(0.1) is None
    assert order.held == 1
    order.add("other", chain_of(2), 2)
    assert order.first(0.1) == "other"
    resident.update(chain_of(1, 1))
    order.take("other", 0.1)
    assert order.first(0.1) == "late"


def test_a_prefix_that_was_computed_ranks_before_those_that_were_not() -> None:
    resident: set[bytes] = set()
    order: PrefixOrder[str] = PrefixOrder(resident.__contains__, max_hold_s=5.0)
    order.add("leader", chain_of(1, 1, 1), 0)
    order.take("leader", 0.0)
    resident.update(chain_of(1, 1, 1))
    order.add("other", chain_of(4), 1)
    order.take("other", 0.0)
    order.add("cold", chain_of(3), 2)
    order.add("warm", chain_of(1, 1, 2), 3)
    assert order.first(0.1) == "warm"


def test_a_hold_that_expired_does_not_begin_anew() -> None:
    resident: set[bytes] = set()
    order: PrefixOrder[str] = PrefixOrder(resident.__contains__, max_hold_s=5.0)
    for position, name in enumerate("abc"):
        order.add(name, chain_of(1, position), position)
    order.take("a", 0.0)
    assert order.first(4.0) is None
    assert order.first(5.0) == "b"
    order.take("b", 5.0)
    assert order.first(5.0) == "c"
    resident.update(chain_of(1))
    order.take("c", 6.0)
    resident.clear()
    for position, name in enumerate("de"):
        order.add(name, chain_of(1, 7 + position), 7 + position)
    order.take("d", 7.0)
    assert order.first(7.0) is None  # it was evicted, and is computed anew


def test_nothing_is_kept_of_a_leader_that_is_done() -> None:
    order: PrefixOrder[str] = PrefixOrder(lambda _: False, max_hold_s=5.0)
    order.add("leader", chain_of(1, 1, 1), 0)
    order.take("leader", 0.0)
    order.add("late", chain_of(1, 1, 2), 1)
    order.remove("late")
    order.release("leader")
    assert order.num_records() == 0
    order.add("later", chain_of(1, 1, 2), 2)
    assert order.first(0.1) == "later"


def test_very_deep_trees() -> None:
    order: PrefixOrder[int] = PrefixOrder(lambda _: False)
    depth = 2000
    hashes = [index.to_bytes(4, "big") for index in range(depth)]
    for position in range(depth):
        order.add(position, hashes[: position + 1], position)
    ran = []
    while (request := order.first(0.0)) is not None:
        order.take(request, 0.0)
        ran.append(request)
        if len(ran) > 50:
            break
    assert ran == list(range(51))


chains_strategy = st.lists(
    st.lists(st.integers(0, 2), max_size=6).map(lambda blocks: chain_of(*blocks)), max_size=40
)


@given(chains_strategy, st.data())
@settings(max_examples=cases(75), deadline=None)
def test_any_operations_keep_every_request_once(chains: list[Chain], data: st.DataObject) -> None:
    resident: set[bytes] = set()
    order: PrefixOrder[int] = PrefixOrder(resident.__contains__, data.draw(st.sampled_from([0, 5])))
    waiting: set[int] = set()
    running: set[int] = set()
    now_s = 0.0
    for position, chain in enumerate(chains):
        order.add(position, chain, position)
        waiting.add(position)
        now_s += data.draw(st.sampled_from([0.0, 1.0]))
        action = data.draw(st.sampled_from(["none", "take", "remove", "return", "evict", "finish"]))
        first = order.first(now_s)
        assert first in waiting or (first is None and running)
        if action == "take" and first is not None:
            order.take(first, now_s)
            waiting.remove(first)
            running.add(first)
            if data.draw(st.booleans()):
                resident.update(chains[first])
        elif action == "remove" and waiting:
            victim = data.draw(st.sampled_from(sorted(waiting)))
            order.remove(victim)
            waiting.remove(victim)
        elif action == "return" and running:
            back = data.draw(st.sampled_from(sorted(running)))
            running.remove(back)
            order.add(back, chains[back], back)
            waiting.add(back)
        elif action == "evict":
            resident.clear()
        elif action == "finish" and running:
            done = data.draw(st.sampled_from(sorted(running)))
            running.remove(done)
            order.release(done)
        assert set(order) == waiting
        assert len(order) == len(waiting)
    for request in running:
        order.release(request)
    while waiting:
        first = order.first(now_s)
        assert first in waiting  # with nobody to wait for, somebody runs
        order.take(first, now_s)
        waiting.remove(first)
        order.release(first)
    assert order.first(now_s) is None
    assert order.num_records() == 0


@given(chains_strategy)
@settings(max_examples=cases(75), deadline=None)
def test_every_prefix_runs_in_one_go(chains: list[Chain]) -> None:
    ran = order_of({str(index): chain for index, chain in enumerate(chains)})
    ran_chains = [chains[int(request)] for request in ran]
    for block in {block for chain in chains for block in chain}:
        runs = [block in chain for chain in ran_chains]
        assert runs.count(True) == runs[::-1].index(True) * -1 + len(runs) - runs.index(True)


def test_a_turn_looks_at_few_of_a_hundred_thousand_requests() -> None:
    looked_up = 0

    def is_resident(_: bytes) -> bool:
        nonlocal looked_up
        looked_up += 1
        return False

    order: PrefixOrder[int] = PrefixOrder(is_resident)
    for position in range(100_000):
        prefix = position % 64
        order.add(position, [b"p%d" % prefix, b"q%d" % prefix, b"u%d" % position], position)
    turns, looked_up = 500, 0
    for _ in range(turns):
        request = order.first(0.0)
        assert request is not None
        order.take(request, 0.0)
    assert looked_up < 10 * turns

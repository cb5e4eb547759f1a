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
    while (request := order.first()) is not None:
        order.take(request)
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


def test_a_prefix_that_was_begun_runs_before_a_resident_one_of_more_requests() -> None:
    cache = set(chain_of(2))
    order: PrefixOrder[str] = PrefixOrder(cache.__contains__)
    chains = {"a1": chain_of(1, 1), "a2": chain_of(1, 2)}
    chains |= {f"b{i}": chain_of(2, i) for i in range(4)}
    for position, request in enumerate(("a1", "a2")):
        order.add(request, chains[request], position)
    order.take("a1")
    cache.update(chains["a1"])
    for position in range(4):
        order.add(f"b{position}", chains[f"b{position}"], 2 + position)
    assert run_all(order, cache, chains) == ["a2", "b0", "b1", "b2", "b3"]


def test_the_prefix_of_the_oldest_is_next_however_many_share_another() -> None:
    chains = {"a": chain_of(1), **{f"b{i}": chain_of(2, i) for i in range(4)}, "c": chain_of(1, 1)}
    assert order_of(chains) == ["a", "c", "b0", "b1", "b2", "b3"]


def test_a_prefix_loses_the_place_of_a_request_that_left() -> None:
    order: PrefixOrder[str] = PrefixOrder(set().__contains__)
    for position, (request, chain) in {
        0: ("a0", chain_of(1, 1)),
        5: ("b", chain_of(2)),
        10: ("a1", chain_of(1, 2)),
    }.items():
        order.add(request, chain, position)
    order.remove("a0")
    assert order.first() == "b"


def test_a_request_that_comes_and_goes_leaves_nothing_behind() -> None:
    order: PrefixOrder[str] = PrefixOrder(set().__contains__)
    order.add("stays", chain_of(1, 1), 0)
    for _ in range(1000):
        order.add("comes and goes", chain_of(1, 2), 1)
        order.remove("comes and goes")
    nodes = [order._root, *order._root.children.values()]
    assert all(len(node.arrivals) < 100 and len(node.queue._heap) < 100 for node in nodes)


def test_evicted_prefixes_lose_their_place() -> None:
    resident = set(chain_of(2))
    order: PrefixOrder[str] = PrefixOrder(resident.__contains__)
    order.add("a", chain_of(1), 0)
    order.add("b", chain_of(2), 1)
    assert order.first() == "b"
    resident.clear()
    assert order.first() == "a"


def waiting(
    resident: set[bytes], chains: dict[str, Chain], positions: Sequence[float] = ()
) -> PrefixOrder[str]:
    """All of these wait, in this order unless positions say another one."""
    order: PrefixOrder[str] = PrefixOrder(resident.__contains__)
    for number, (request, chain) in enumerate(chains.items()):
        order.add(request, chain, (positions[number] if positions else number, number))
    return order


def everybody_is_late(request: str) -> bool:
    return True


def test_the_chain_of_a_request_ends_where_its_blocks_do() -> None:
    chains = {"long": chain_of(1, 1, 1), "short": chain_of(1, 1)}
    order = waiting(set(), chains)
    assert {request: order.chain(request) for request in chains} == chains


def test_a_late_request_runs_before_a_resident_prefix() -> None:
    chains = {"late": chain_of(1), "resident": chain_of(2)}
    order = waiting(set(chain_of(2)), chains)
    assert order.first() == "resident"
    assert order.first(is_late=everybody_is_late) == "late"


def test_who_is_late_and_held_keeps_nobody_waiting() -> None:
    order = waiting(set(), {"held": chain_of(1), "runs": chain_of(2)})
    first = order.first(lambda chain, depth: chain == chain_of(1), everybody_is_late)
    assert first == "runs"


def test_the_prefix_of_the_late_gets_a_turn_for_all_of_it_though_it_had_one() -> None:
    order = waiting(set(), {"a0": chain_of(1, 1, 0), "a1": chain_of(1, 1, 1), "b": chain_of(1, 2)})
    order.take("a0")
    for position, request in enumerate(("a2", "a3"), 3):
        order.add(request, chain_of(1, 1, position), (position, position))
    ran = []
    for _ in range(2):
        ran.append(order.first(is_late=everybody_is_late))
        order.take(ran[-1])
    assert ran == ["a1", "b"]  # their turn was for three
    order.add("other", chain_of(2), (10, 10))
    order.add("c", chain_of(1, 3), (20, 20))
    while len(order):
        ran.append(order.first(is_late=everybody_is_late))
        order.take(ran[-1])
    assert ran[2:] == ["a2", "a3", "c", "other"]


def test_a_prefix_that_is_cut_goes_on_with_its_turn() -> None:
    chains = {f"a{number}": chain_of(1, 1, number) for number in range(3)}
    order = waiting(set(), {**chains, "old": chain_of(2)}, positions=[1, 2, 3, 0])
    order.take("a0")
    order.remove("a2")
    order.add("b", chain_of(1, 2), (4, 4))
    ran = []
    while len(order):
        ran.append(order.first(is_late=everybody_is_late))
        order.take(ran[-1])
    assert ran == ["a1", "b", "old"]


def test_blocks_of_those_that_run_count_as_resident() -> None:
    resident: set[bytes] = set()
    chains = {"old": chain_of(1), "a0": chain_of(2, 0), "a1": chain_of(2, 1), "c": chain_of(3)}
    order = waiting(resident, chains)
    order.take("a0")
    resident.update(chain_of(2, 0))
    order.take("c")
    assert order.first() == "a1"


def test_both_ends_of_a_prefix_that_is_cut_are_looked_up() -> None:
    resident: set[bytes] = set()
    order = waiting(resident, {"computed": chain_of(1, 1, 1)}, positions=[5])
    resident.update(chain_of(1, 1))
    order.add("older", chain_of(1, 2), (0, 1))
    assert order.first() == "computed"


def test_held_requests_are_counted_once_however_deep_they_share() -> None:
    chains = {"a": chain_of(1, 2), "b": chain_of(1, 1, 2), "c": chain_of(2)}
    order = waiting(set(), chains)
    leader = chain_of(1, 1, 1)
    assert order.num_held([leader], lambda chain, depth: chain[0] in leader) == 2
    assert order.num_held([leader], lambda chain, depth: depth > 1 and chain[1] in leader) == 1
    assert order.num_held([leader, chain_of(1)], lambda chain, depth: False) == 0


def test_very_deep_trees() -> None:
    order: PrefixOrder[int] = PrefixOrder(lambda _: False)
    depth = 1200  # deeper than Python's stack
    hashes = [index.to_bytes(4, "big") for index in range(depth)]
    for position in range(depth):
        order.add(position, hashes[: position + 1], position)
    ran = []
    while (request := order.first()) is not None:
        order.take(request)
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
    order: PrefixOrder[int] = PrefixOrder(resident.__contains__)
    waiting: set[int] = set()
    running: set[int] = set()
    for position, chain in enumerate(chains):
        order.add(position, chain, (0.0, position))
        waiting.add(position)
        late = data.draw(st.integers(0, 40))
        action = data.draw(st.sampled_from(["none", "take", "remove", "return", "evict"]))
        first = order.first(is_late=lambda request, late=late: request < late)
        assert first in waiting
        if action == "take":
            if data.draw(st.booleans()):  # who is in a hurry need not be the first
                first = data.draw(st.sampled_from(sorted(waiting)))
            assert order.chain(first) == chains[first]
            order.take(first)
            waiting.remove(first)
            running.add(first)
            if data.draw(st.booleans()):
                resident.update(chains[first])
        elif action == "remove":
            victim = data.draw(st.sampled_from(sorted(waiting)))
            order.remove(victim)
            waiting.remove(victim)
        elif action == "return" and running:
            back = data.draw(st.sampled_from(sorted(running)))
            running.remove(back)
            order.add(back, chains[back], (0.0, back))
            waiting.add(back)
        elif action == "evict":
            resident.clear()
        assert list(order) == sorted(waiting)
        assert len(order) == len(waiting)
        check_nodes(order, {each: chains[each] for each in waiting})
    while waiting:
        first = order.first()
        assert first in waiting
        order.take(first)
        waiting.remove(first)
    assert order.first() is None
    assert not order._root.children


def check_nodes(order: PrefixOrder[int], chains: dict[int, Chain]) -> None:
    """What the nodes of the trie count is what a look at all requests gives."""
    nodes = [order._root]
    for node in nodes:
        nodes += node.children.values()
        below = [
            request
            for request, chain in chains.items()
            if node.depth <= len(chain) and (not node.depth or node.chain[node.depth - 1] in chain)
        ]
        assert node.size == len(below)
        if below:
            assert order._oldest(node) == min(below)


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
        request = order.first()
        assert request is not None
        order.take(request)
    assert looked_up < 10 * turns

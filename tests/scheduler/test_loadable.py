# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

from tests.scheduler.test_lanes import wait
from tests.scheduler.test_order import chain_of
from vllm_relay.prefix_cache.chains import BlockName
from vllm_relay.scheduler.fairness import OvertakeLimit
from vllm_relay.scheduler.lanes import Lanes
from vllm_relay.scheduler.order import PrefixOrder
from vllm_relay.scheduler.tenants import Shares, TenantLanes
from vllm_relay.scheduler.warm_up import LoadableBlocks, WarmUp


class Connector:
    """Has blocks, or does not know yet; counts what it is asked."""

    def __init__(self) -> None:
        self.blocks: set[BlockName] = set()
        self.unknown: set[str] = set()
        self.asked: list[str] = []

    def find(self, request: str, chain: Sequence[BlockName]) -> Sequence[BlockName] | None:
        self.asked.append(request)
        return None if request in self.unknown else [each for each in chain if each in self.blocks]


def nothing_is_kept(loadable: LoadableBlocks[str]) -> bool:
    return not any(map(vars(loadable).get, ("_unasked", "_found", "_found_chains", "_names")))


def test_each_request_is_asked_about_once() -> None:
    connector = Connector()
    connector.blocks = set(chain_of(1))
    loadable = LoadableBlocks(connector.find)
    loadable.add("a", chain_of(1, 1))
    loadable.add("b", chain_of(2))
    assert list(loadable.ask()) == ["a"]
    assert list(loadable.ask()) == []
    assert connector.asked == ["a", "b"]
    assert chain_of(1)[0] in loadable
    assert chain_of(1, 1)[1] not in loadable


def test_the_connector_is_asked_again_if_it_did_not_know() -> None:
    connector = Connector()
    connector.blocks, connector.unknown = set(chain_of(1)), {"a"}
    loadable = LoadableBlocks(connector.find)
    loadable.add("a", chain_of(1))
    assert list(loadable.ask()) == []
    connector.unknown.clear()
    assert list(loadable.ask()) == ["a"]


def test_a_block_is_loadable_as_long_as_a_request_waits_for_it() -> None:
    connector = Connector()
    connector.blocks = set(chain_of(1))
    loadable = LoadableBlocks(connector.find)
    for request in "ab":
        loadable.add(request, chain_of(1))
    assert list(loadable.ask()) == ["a"]
    assert list(loadable.ask()) == ["b"]
    loadable.discard("a")
    assert chain_of(1)[0] in loadable
    loadable.discard("b")
    assert chain_of(1)[0] not in loadable
    assert nothing_is_kept(loadable)


def test_what_was_found_is_asked_for_again_when_nothing_is_known_any_more() -> None:
    connector = Connector()
    connector.blocks = set(chain_of(1))
    loadable = LoadableBlocks(connector.find)
    loadable.add("a", chain_of(1))
    assert list(loadable.ask()) == ["a"]
    connector.blocks.clear()
    loadable.add("b", chain_of(2))
    loadable.forget()
    assert chain_of(1)[0] not in loadable
    assert list(loadable.ask()) == [] and connector.asked == ["a", "a", "b"]
    loadable.discard("a")
    assert nothing_is_kept(loadable)


def test_nobody_asks_for_prompts_without_full_blocks() -> None:
    loadable = LoadableBlocks(Connector().find)
    loadable.add("short", ())
    assert list(loadable.ask()) == [] and nothing_is_kept(loadable)


def test_it_asks_about_no_more_than_can_be_loaded_soon() -> None:
    connector = Connector()
    connector.blocks = set(chain_of(1))
    connector.unknown = {f"unknown-{number}" for number in range(40)}
    loadable = LoadableBlocks(connector.find)
    for request in sorted(connector.unknown):
        loadable.add(request, chain_of(1))
    for number in range(40):
        connector.blocks.update(chain_of(2 + number))
        loadable.add(str(number), chain_of(2 + number))
    found = [list(loadable.ask()) for _ in range(6)]
    assert max(map(len, found)) <= 16
    assert found[-1] == []
    assert sum(map(len, found)) == 16  # though some are not known yet that came before
    for each in found:
        for request in each:
            loadable.discard(request)
    assert sum(len(list(loadable.ask())) for _ in range(6)) == 16


def lanes_of(resident: set[BlockName], loadable: set[BlockName]) -> Lanes[str]:
    return Lanes(
        PrefixOrder(lambda name: name in resident or name in loadable),
        WarmUp(resident.__contains__, 5.0, loadable.__contains__),
        OvertakeLimit(1e9, 10**9),
    )


def test_nobody_is_held_for_one_that_computes_what_can_be_loaded() -> None:
    loadable: set[BlockName] = set()
    lanes = lanes_of(set(), loadable)
    for position, request in enumerate("ab"):
        wait(lanes, request, chain_of(1, 1, position), position)
    lanes.run("a", 0.0)
    assert lanes.first(1.0) is None
    loadable.update(chain_of(1))  # not all that is shared
    assert lanes.first(1.0) is None
    loadable.update(chain_of(1, 1))
    assert lanes.first(1.0) == "b"


def test_what_is_loaded_is_loaded_once() -> None:
    resident: set[BlockName] = set()
    lanes = lanes_of(resident, set(chain_of(1, 1)))
    for position, request in enumerate("ab"):
        wait(lanes, request, chain_of(1, 1, position), position)
    lanes.run("a", 0.0)
    assert lanes.first(1.0) is None
    resident.update(chain_of(1, 1))
    assert lanes.first(1.0) == "b"


def test_a_prefix_that_turns_out_to_be_loadable_runs_first() -> None:
    loadable: set[BlockName] = set()
    lanes = lanes_of(set(), loadable)
    for position in range(3):
        wait(lanes, f"cold-{position}", chain_of(1, position), position)
    wait(lanes, "stored", chain_of(2, 1), 3)
    assert lanes.first(0.0) == "cold-0"
    loadable.update(chain_of(2))
    lanes.look_again("stored")
    assert lanes.first(0.0) == "stored"


def test_a_tenant_of_whom_nobody_can_run_is_not_looked_at() -> None:
    lanes = TenantLanes(lambda: lanes_of(set(), set()), lambda request: request[0], Shares(1))
    lanes.look_again("a")
    assert list(lanes._lanes) == []
    lanes.add("b", chain_of(1), (0.0, 0))
    lanes.look_again("b")
    assert lanes.first(0.0) == "b"

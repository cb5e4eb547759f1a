# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.test_order import Chain, chain_of, chains_strategy
from tests.support.depth import cases
from vllm_relay.prefix_cache.chains import BlockName
from vllm_relay.scheduler.fairness import OvertakeLimit
from vllm_relay.scheduler.lanes import Lanes
from vllm_relay.scheduler.order import PrefixOrder
from vllm_relay.scheduler.warm_up import WarmUp


def lanes_of(
    is_resident: Callable[[BlockName], bool],
    max_hold_s: float = 0.0,
    limit: OvertakeLimit[str] | None = None,
) -> Lanes[str]:
    if limit is None:
        limit = OvertakeLimit(1e9, 10**9)
    return Lanes(PrefixOrder(is_resident), WarmUp(is_resident, max_hold_s), limit)


def wait(lanes: Lanes[str], request: str, chain: Chain, position: int) -> None:
    lanes.add(request, chain, (0.0, position))


def test_siblings_are_held_until_the_prefix_is_resident() -> None:
    resident: set[bytes] = set()
    lanes = lanes_of(resident.__contains__, 2.0)
    for position, request in enumerate(["leader", "sibling", "other"]):
        wait(lanes, request, chain_of(2 if request == "other" else 1, 1, position), position)
    assert lanes.first(0.0) == "leader"
    lanes.run("leader", 0.0)
    assert lanes.first(0.1) == "other"
    lanes.run("other", 0.1)
    assert lanes.first(0.2) is None
    assert (len(lanes), lanes.num_held(0.2)) == (1, 1)
    resident.update(chain_of(1))  # the first chunk is not all that is shared
    assert lanes.first(0.3) is None
    resident.update(chain_of(1, 1))
    assert lanes.first(0.4) == "sibling"
    assert lanes.num_held(0.4) == 0


def test_siblings_are_held_while_a_later_block_of_their_prefix_is_not_resident() -> None:
    lanes = lanes_of(set(chain_of(1)).__contains__, 5.0)
    wait(lanes, "a", chain_of(1, 1, 1), 0)
    wait(lanes, "b", chain_of(1, 1, 2), 1)
    lanes.run("a", 0.0)
    assert lanes.first(1.0) is None
    lanes.release("a")
    assert lanes.first(1.0) == "b"


def test_holding_ends() -> None:
    for end in ("time", "release"):
        lanes = lanes_of(lambda _: False, 2.0)
        wait(lanes, "leader", chain_of(1, 1), 0)
        wait(lanes, "sibling", chain_of(1, 2), 1)
        lanes.run("leader", 0.0)
        assert lanes.first(1.9) is None
        if end == "release":
            lanes.release("leader")
        assert lanes.first(1.9 if end == "release" else 2.0) == "sibling"


def test_a_leader_that_comes_back_holds_nobody() -> None:
    lanes = lanes_of(lambda _: False, 2.0)
    wait(lanes, "leader", chain_of(1, 1), 0)
    wait(lanes, "sibling", chain_of(1, 2), 1)
    lanes.run("leader", 0.0)
    wait(lanes, "leader", chain_of(1, 1), 0)
    assert lanes.first(0.1) is not None


def test_late_sibling_of_a_part_of_the_prefix_is_held_too() -> None:
    lanes = lanes_of(lambda _: False, 2.0)
    wait(lanes, "leader", chain_of(1, 1, 1, 1), 0)
    wait(lanes, "sibling", chain_of(1, 1, 1, 2), 1)
    lanes.run("leader", 0.0)
    wait(lanes, "late", chain_of(1, 1, 3), 2)  # splits the edge that is being computed
    assert lanes.first(0.1) is None
    assert (lanes.num_held(0.1), lanes.num_leaders(0.1)) == (2, 1)
    lanes.release("leader")
    assert lanes.first(0.1) is not None


def test_a_sibling_that_comes_while_the_only_request_of_a_prefix_runs_is_held() -> None:
    resident: set[bytes] = set()
    lanes = lanes_of(resident.__contains__, 5.0)
    wait(lanes, "leader", chain_of(1, 1, 1), 0)
    lanes.run("leader", 0.0)
    wait(lanes, "late", chain_of(1, 1, 2), 1)
    assert lanes.first(0.1) is None
    assert lanes.num_held(0.1) == 1
    wait(lanes, "other", chain_of(2), 2)
    assert lanes.first(0.1) == "other"
    resident.update(chain_of(1, 1))
    lanes.run("other", 0.1)
    assert lanes.first(0.1) == "late"


def test_a_prefix_that_was_computed_ranks_before_those_that_were_not() -> None:
    resident: set[bytes] = set()
    lanes = lanes_of(resident.__contains__, 5.0)
    wait(lanes, "leader", chain_of(1, 1, 1), 0)
    lanes.run("leader", 0.0)
    resident.update(chain_of(1, 1, 1))
    wait(lanes, "other", chain_of(4), 1)
    lanes.run("other", 0.0)
    wait(lanes, "cold", chain_of(3), 2)
    wait(lanes, "warm", chain_of(1, 1, 2), 3)
    assert lanes.first(0.1) == "warm"


def test_a_hold_that_expired_does_not_begin_anew() -> None:
    resident: set[bytes] = set()
    lanes = lanes_of(resident.__contains__, 5.0)
    for position, name in enumerate("abc"):
        wait(lanes, name, chain_of(1, position), position)
    lanes.run("a", 0.0)
    assert lanes.first(4.0) is None
    assert lanes.first(5.0) == "b"
    lanes.run("b", 5.0)
    assert lanes.first(5.0) == "c"
    resident.update(chain_of(1))
    lanes.run("c", 6.0)
    resident.clear()
    for position, name in enumerate("de"):
        wait(lanes, name, chain_of(1, 7 + position), 7 + position)
    lanes.run("d", 7.0)
    assert lanes.first(7.0) is None  # it was evicted, and is computed anew


def test_who_shares_all_its_blocks_with_one_that_computes_them_is_held() -> None:
    lanes = lanes_of(lambda _: False, 5.0)
    wait(lanes, "leader", chain_of(1, 1, 1), 0)
    wait(lanes, "shares all", chain_of(1, 1), 1)
    lanes.run("leader", 0.0)
    assert lanes.first(1.0) is None


def test_nobody_is_held_behind_a_hold_that_is_over() -> None:
    lanes = lanes_of(lambda _: False, 5.0)
    wait(lanes, "leader", chain_of(1), 0)
    wait(lanes, "longer", chain_of(1, 2, 3), 1)
    lanes.run("leader", 0.0)
    assert (lanes.num_held(4.0), lanes.num_leaders(4.0)) == (1, 1)
    assert (lanes.num_held(5.0), lanes.num_leaders(5.0)) == (0, 0)


def test_who_computes_nothing_leads_nobody() -> None:
    lanes = lanes_of(set(chain_of(1, 1)).__contains__, 5.0)
    wait(lanes, "finds all", chain_of(1, 1), 0)
    lanes.run("finds all", 0.0)
    assert lanes.num_records() == 0


def test_blocks_are_held_for_again_when_who_held_them_first_gave_up() -> None:
    lanes = lanes_of(lambda _: False, 5.0)
    wait(lanes, "leader", chain_of(1, 1), 0)
    wait(lanes, "impatient", chain_of(1), 1)
    lanes.run("leader", 0.0)
    lanes.run("impatient", 5.0)
    lanes.release("leader")
    for position, request in enumerate(("next", "sibling"), 2):
        wait(lanes, request, chain_of(1, position), position)
    lanes.run("next", 6.0)
    assert lanes.first(6.0) is None


def test_a_hold_that_expired_does_not_begin_anew_whoever_came_between() -> None:
    lanes = lanes_of(lambda _: False, 5.0)
    chains = {"a": chain_of(1, 1, 0), "b": chain_of(1, 2), "c": chain_of(1, 1, 5, 6)}
    for (request, chain), now_s in zip(chains.items(), (0.0, 5.0, 6.0), strict=True):
        wait(lanes, request, chain, 0)
        lanes.run(request, now_s)
    wait(lanes, "d", chain_of(1, 1, 7), 3)
    assert lanes.first(6.0) == "d"


def test_a_hold_ends_when_the_blocks_are_there_though_they_are_evicted_then() -> None:
    resident: set[bytes] = set()
    lanes = lanes_of(resident.__contains__, 5.0)
    for position, request in enumerate(("leader", "sibling")):
        wait(lanes, request, chain_of(1, position), position)
    lanes.run("leader", 0.0)
    resident.update(chain_of(1, 0))
    assert lanes.first(1.0) == "sibling"
    resident.clear()
    assert lanes.first(1.0) == "sibling"


def test_nothing_is_kept_of_a_leader_that_is_done() -> None:
    lanes = lanes_of(lambda _: False, 5.0)
    wait(lanes, "leader", chain_of(1, 1, 1), 0)
    lanes.run("leader", 0.0)
    wait(lanes, "late", chain_of(1, 1, 2), 1)
    lanes.remove("late")
    lanes.release("leader")
    assert lanes.num_records() == 0 and not lanes.warm_up._by_first_block
    wait(lanes, "later", chain_of(1, 1, 2), 2)
    assert lanes.first(0.1) == "later"


def test_who_goes_first_does_so_within_the_limit() -> None:
    lanes = lanes_of(set().__contains__, limit=OvertakeLimit(1e9, 2))
    wait(lanes, "plain", chain_of(1), 0)
    ran = []
    for number in range(1, 8):
        lanes.add_first(f"first {number}")
        request = lanes.first(0.0)
        assert request is not None
        lanes.run(request, 0.0)
        ran.append(request)
    # one of them waits with it, and two may come on top
    assert ran[:4] == ["first 1", "first 2", "first 3", "plain"]


def test_of_those_that_go_first_the_last_one_does() -> None:
    lanes = lanes_of(set().__contains__)
    wait(lanes, "plain", chain_of(1), 0)
    for request in ("first 1", "first 2"):
        lanes.add_first(request)
    assert list(lanes) == ["first 2", "first 1", "plain"]
    assert lanes.first(0.0) == "first 2"


def test_who_came_too_late_does_not_change_the_order_of_those_who_did_not() -> None:
    lanes = lanes_of(set(chain_of(3)).__contains__, limit=OvertakeLimit(1e9, 1))
    wait(lanes, "oldest", chain_of(9), 0)
    wait(lanes, "a1", chain_of(1, 1), 1)
    wait(lanes, "a2", chain_of(1, 2), 2)
    lanes.run("a1", 0.0)
    wait(lanes, "resident", chain_of(3), 3)
    wait(lanes, "a3, too late", chain_of(1, 3), 4)
    ran = []
    for _ in range(4):
        ran.append(lanes.first(0.0))
        lanes.run(ran[-1], 0.0)
    assert ran == ["a2", "resident", "oldest", "a3, too late"]


def test_a_late_request_has_its_prefix_run_when_the_turn_of_another_is_over() -> None:
    lanes = lanes_of(set().__contains__, limit=OvertakeLimit(2.0, 10**6))
    wait(lanes, "hot 0", chain_of(2, 0), 0)
    wait(lanes, "old 0", chain_of(1, 0), 1)
    for number in range(2, 5):
        wait(lanes, f"hot {number}", chain_of(2, number), number)
    ran: list[str] = []
    for number in range(5, 60):
        request = lanes.first(float(number))
        assert request is not None
        lanes.run(request, float(number))
        ran.append(request)
        if number == 6:
            wait(lanes, "old 1", chain_of(1, 1), 100)
        wait(lanes, f"hot {number}", chain_of(2, number), number)
    begin = ran.index("old 0")
    # four others waited with it; then it was late, and those that came meanwhile had no turn
    assert begin <= 4 + 4
    assert ran[begin + 1] == "old 1"  # what shares its prefix runs with it
    assert all(each.startswith("hot") for each in ran[begin + 2 :])


def test_without_late_requests_a_prefix_goes_on_as_long_as_requests_come() -> None:
    lanes = lanes_of(set().__contains__)
    wait(lanes, "hot 0", chain_of(2, 0), 0)
    wait(lanes, "old", chain_of(1), 1)
    for number in range(2, 5):
        wait(lanes, f"hot {number}", chain_of(2, number), number)
    for number in range(5, 50):
        request = lanes.first(0.0)
        assert request is not None
        assert request.startswith("hot")
        lanes.run(request, 0.0)
        wait(lanes, f"hot {number}", chain_of(2, number), number)


def test_the_order_within_a_common_prefix_has_turns_too() -> None:
    """A prefix that all share must not keep one branch of it waiting for all others."""
    lanes = lanes_of(set().__contains__, limit=OvertakeLimit(2.0, 10**6))
    wait(lanes, "old", chain_of(9, 1, 0), 0)
    for number in range(1, 5):
        wait(lanes, f"hot {number}", chain_of(9, 2, number), number)
    ran: list[str] = []
    while "old" not in ran:
        request = lanes.first(float(len(ran)))
        assert request is not None
        lanes.run(request, float(len(ran)))
        ran.append(request)
        wait(lanes, f"hot {5 + len(ran)}", chain_of(9, 2, min(255, len(ran) + 5)), 5 + len(ran))
    assert len(ran) <= 9


def test_who_comes_back_is_not_kept_behind_those_that_came_later() -> None:
    lanes = lanes_of(set().__contains__, limit=OvertakeLimit(1e9, 1))

    def comes(*positions: int) -> None:
        for position in positions:
            wait(lanes, str(position), chain_of(position), position)

    def runs(*positions: int) -> None:
        for position in positions:
            assert lanes.first(0.0) == str(position)
            lanes.run(str(position), 0.0)

    comes(0, 1)
    lanes.set_aside("0")
    runs(1)
    for position in (2, 3):
        comes(position)
        runs(position)
    comes(4)
    lanes.set_aside("4")
    for position in (5, 6, 7):
        comes(position)
        runs(position)
    comes(0, 8, 4)  # those two have been overtaken as often as may be
    runs(0, 4, 8)


def test_who_may_overtake_nobody_waits_behind_one_that_is_held() -> None:
    lanes = lanes_of(set().__contains__, 5.0, OvertakeLimit(2.0, 0))
    wait(lanes, "leader", b"\x01", 0)
    lanes.run("leader", 0.0)
    wait(lanes, "held", b"\x01", 1)
    wait(lanes, "behind", (), 2)
    assert lanes.first(0.5) is None
    assert lanes.num_held(0.5) == 1 and len(lanes) == 2
    lanes.release("leader")
    assert lanes.first(0.5) == "held"


@given(
    chains_strategy,
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(0, 3),
    st.sampled_from([0.0, 5.0]),
    st.data(),
)
@settings(max_examples=cases(75), deadline=None)
def test_the_bound_holds_and_everybody_runs_once(
    chains: list[Chain],
    actions: list[int],
    max_overtakes: int,
    max_hold_s: float,
    data: st.DataObject,
) -> None:
    resident: set[BlockName] = set()
    lanes = lanes_of(resident.__contains__, max_hold_s, OvertakeLimit(2.0, max_overtakes))
    waiting: dict[str, int] = {}
    ran: list[str] = []
    others: dict[str, int] = {}
    overtaken: dict[str, int] = {}
    aside: list[str] = []
    to_come = list(enumerate(chains))
    now_s = 0.0

    def step() -> None:
        request = lanes.first(now_s)
        if request is None:
            # all others came too late to go before one of these
            assert lanes.num_held(now_s) == len(lanes.order) > 0
            return
        for each in waiting:
            others.setdefault(each, len(waiting) - 1)
        if data.draw(st.integers(0, 9)) == 0:
            lanes.set_aside(request)
            aside.append(request)
            del waiting[request]
            return
        position = waiting.pop(request)
        lanes.run(request, now_s)
        ran.append(request)
        if data.draw(st.booleans()):
            resident.update(chains[int(request)])
        else:
            resident.difference_update(data.draw(st.sampled_from(chains)))
        for each, its_position in waiting.items():
            overtaken[each] = overtaken.get(each, 0) + (its_position < position)
            assert overtaken[each] <= others[each] + max_overtakes

    for action in actions:
        now_s += 0.5
        if action == 0 and to_come:
            position, chain = to_come.pop(0)
            wait(lanes, str(position), chain, position)
            waiting[str(position)] = position
        elif action == 1 and aside:
            request = aside.pop(0)
            wait(lanes, request, chains[int(request)], int(request))
            waiting[request] = int(request)
        elif action == 2 and ran:
            lanes.release(data.draw(st.sampled_from(ran)))
        elif waiting:
            step()
    for request in aside:
        wait(lanes, request, chains[int(request)], int(request))
        waiting[request] = int(request)
    aside.clear()
    while waiting:
        now_s += 1.0
        request = lanes.first(now_s)
        if request is not None:
            lanes.run(request, now_s)
            ran.append(request)
            del waiting[request]
    assert len(set(ran)) == len(ran) == len(chains) - len(to_come)
    for request in ran:
        lanes.release(request)
    assert (len(lanes), lanes.num_records()) == (0, 0)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.scheduler.fairness import OvertakeLimit


def limit_of(
    num_waiting: int, max_hold_s: float = 2.0, max_overtakes: int = 2
) -> OvertakeLimit[int]:
    limit: OvertakeLimit[int] = OvertakeLimit(max_hold_s, max_overtakes)
    for request in range(num_waiting):
        limit.arrive(request)
    return limit


def test_those_that_arrive_together_have_no_order() -> None:
    limit = limit_of(100)
    assert limit.is_within(99)
    assert limit.tightest() is None


def test_it_may_be_overtaken_by_as_many_as_waited_with_it_and_a_constant() -> None:
    limit = limit_of(3)
    limit.run(2, 0.0)
    numbers = [limit.arrive(request) for request in range(3, 9)]
    assert numbers == [3, 4, 5, 6, 7, 8]
    # of the first three, two waited with the first one, and two more come on top
    assert [limit.is_within(number) for number in numbers] == [True, True, False, False] + 2 * [
        False
    ]
    assert limit.tightest() == 0
    limit.run(0, 0.0)
    assert [limit.is_within(number) for number in numbers] == 3 * [True] + 3 * [False]


def test_it_is_late_some_time_after_its_turn() -> None:
    limit = limit_of(3, max_overtakes=100)
    limit.run(2, 10.0)
    assert not limit.is_late(0, 99.0)  # its turn is after two others, at the latest
    limit.arrive(3)
    limit.run(3, 11.0)
    assert not limit.is_late(0, 12.9)
    assert limit.is_late(0, 13.0)


def test_it_is_late_when_many_ran_after_its_turn() -> None:
    limit = limit_of(2, max_hold_s=1e9, max_overtakes=3)
    for request in range(2, 7):
        limit.run(limit.arrive(request), 0.0)
        assert limit.is_late(0, 0.0) == (request == 6)


def test_zero_keeps_the_order_of_arrival() -> None:
    for max_hold_s, max_overtakes in ((0.0, 100), (100.0, 0)):
        limit = limit_of(3, max_hold_s, max_overtakes)
        assert [limit.is_within(number) for number in range(3)] == [True, False, False]
        limit.run(0, 0.0)
        assert [limit.is_within(number) for number in (1, 2)] == [True, False]


def test_who_was_set_aside_keeps_its_place() -> None:
    limit = limit_of(4, max_overtakes=1)
    limit.set_aside(0)
    limit.run(2, 0.0)
    for request in range(4, 12):
        limit.run(limit.arrive(request), 0.0)
    assert limit.arrive(0) == 0
    assert limit.tightest() == 0
    assert limit.is_within(3)
    assert not limit.is_within(limit.arrive(12))  # as many have come as may overtake it
    limit.leave(0)
    assert limit.tightest() == 1


def test_those_that_are_set_aside_wait_beside_a_request_too() -> None:
    limit = limit_of(2, max_overtakes=1)
    limit.set_aside(0)
    limit.arrive(2)
    limit.run(1, 0.0)
    assert limit.is_within(5)  # three have come; two waited with it, and one may come on top
    assert not limit.is_within(6)
    assert not limit.is_late(2, 99.0)  # its turn is after two others
    limit.arrive(3)
    limit.run(3, 10.0)
    assert not limit.is_late(2, 11.9)
    assert limit.is_late(2, 12.0)


def test_who_cannot_run_yet_has_its_place_from_when_it_came_first() -> None:
    limit = limit_of(0)
    limit.arrive_aside(0)
    assert limit.arrive(1) == 1
    limit.arrive_aside(0)
    assert limit.arrive(0) == 0


def test_nothing_is_kept_of_those_that_left() -> None:
    limit = limit_of(4)
    limit.set_aside(1)
    limit.run(0, 0.0)
    for request in (1, 2, 3):
        limit.leave(request)
    assert len(limit) == 0
    limit.run(limit.arrive(4), 0.0)
    assert limit.tightest() is None


@given(
    st.lists(st.sampled_from(["arrive", "run", "leave"]), max_size=300),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
@settings(max_examples=cases(150), deadline=None)
def test_bounds_hold_against_an_adversary(
    actions: list[str], max_overtakes: int, seed: int
) -> None:
    """The adversary runs any request it likes, among those that may run."""
    limit: OvertakeLimit[int] = OvertakeLimit(2.0, max_overtakes)
    others: dict[int, int | None] = {}  # how many waited when the first one ran after it arrived
    overtaken: dict[int, int] = {}
    before: dict[int, int] = {}  # how many have run since it arrived
    requests: dict[int, int] = {}  # by number
    for index, action in enumerate(actions):
        if action == "arrive" or not overtaken:
            number = limit.arrive(index)
            overtaken[number], others[number], before[number] = 0, None, 0
            requests[number] = index
            continue
        waiting = sorted(overtaken)
        choice = waiting[(seed + index * 7919) % len(waiting)]
        if action == "run":
            for number in waiting:
                others[number] = len(waiting) - 1 if others[number] is None else others[number]
            if not limit.is_within(choice):
                tightest = limit.tightest()
                assert tightest is not None
                choice = limit.number(tightest)
            overtakes = any(number < choice for number in waiting)
            assert limit.run(requests[choice], 0.0) == overtakes
        else:
            limit.leave(requests[choice])
        del overtaken[choice]
        if action == "run":
            for number in overtaken:
                allowed = max_overtakes + (others[number] or 0)
                overtaken[number] += number < choice
                before[number] += 1
                assert overtaken[number] <= allowed
            assert before[choice] <= 2 * (others[choice] or 0) + max_overtakes


def test_a_request_that_is_set_aside_again_and_again_leaves_nothing_behind() -> None:
    limit: OvertakeLimit[str] = OvertakeLimit(1.0, 5)
    limit.arrive("stays")
    limit.arrive("blocked")
    for _ in range(1000):
        limit.set_aside("blocked")
        limit.arrive("blocked")
    assert len(limit._numbers._heap) < 100 and len(limit._ends._heap) < 100

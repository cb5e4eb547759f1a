# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.scheduler.fairness import OvertakeLimit


def test_nobody_is_urgent_before_being_overtaken() -> None:
    limit: OvertakeLimit[int] = OvertakeLimit(max_hold_s=2.0, max_overtakes=2)
    limit.arrive(0)
    limit.arrive(1)
    assert limit.urgent(1000.0) is None


def test_the_oldest_becomes_urgent_some_time_after_it_was_overtaken() -> None:
    limit: OvertakeLimit[int] = OvertakeLimit(max_hold_s=2.0, max_overtakes=100)
    for position in range(3):
        limit.arrive(position)
    limit.run(2, 10.0)
    assert limit.urgent(11.9) is None
    assert limit.urgent(12.0) == 0
    limit.run(0, 12.0)
    assert limit.urgent(12.0) == 1  # it was overtaken at 10.0 too
    limit.run(1, 12.0)
    assert limit.urgent(12.0) is None


def test_the_oldest_becomes_urgent_when_it_was_overtaken_often() -> None:
    limit: OvertakeLimit[int] = OvertakeLimit(max_hold_s=1e9, max_overtakes=2)
    for position in range(5):
        limit.arrive(position)
    limit.run(2, 0.0)
    assert limit.urgent(0.0) is None
    limit.run(1, 0.0)
    assert limit.urgent(0.0) == 0
    limit.run(0, 0.0)
    assert limit.urgent(0.0) is None  # nobody has overtaken 3


def test_zero_keeps_the_order_of_arrival() -> None:
    for limit in (OvertakeLimit(0.0, 100), OvertakeLimit(100.0, 0)):
        limit.arrive(4)
        limit.arrive(7)
        assert limit.urgent(0.0) == 4


def test_who_comes_back_begins_anew() -> None:
    """It was set aside: it could not have run earlier."""
    limit: OvertakeLimit[int] = OvertakeLimit(max_hold_s=2.0, max_overtakes=1)
    for request in range(4):
        limit.arrive(request)
    limit.leave(0)
    limit.run(2, 10.0)
    limit.arrive(0)
    assert limit.urgent(10.0) == 1
    limit.run(1, 10.0)
    limit.run(3, 10.0)
    assert limit.urgent(20.0) is None


@given(
    st.lists(st.tuples(st.sampled_from(["arrive", "run", "leave"]), st.floats(0, 3)), max_size=200),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
@settings(max_examples=cases(75), deadline=None)
def test_bounds_hold_against_an_adversary(
    actions: list[tuple[str, float]], max_overtakes: int, seed: int
) -> None:
    """The adversary runs any request it likes, as long as nobody is urgent."""
    max_hold_s = 2.0
    limit: OvertakeLimit[int] = OvertakeLimit(max_hold_s, max_overtakes)
    first_overtaken_s: dict[int, float | None] = {}
    overtaken: dict[int, int] = {}
    now_s, arrived = 0.0, 0
    for index, (action, wait_s) in enumerate(actions):
        now_s += wait_s
        if action == "arrive" or not overtaken:
            limit.arrive(arrived)
            overtaken[arrived], first_overtaken_s[arrived] = 0, None
            arrived += 1
            continue
        choice = sorted(overtaken)[(seed + index * 7919) % len(overtaken)]
        if action == "leave":
            limit.leave(choice)
            del overtaken[choice]
            continue
        urgent = limit.urgent(now_s)
        choice = choice if urgent is None else urgent
        assert choice in overtaken
        limit.run(choice, now_s)
        del overtaken[choice]
        for position in overtaken:
            if position < choice:
                since_s = first_overtaken_s[position]
                assert since_s is None or now_s - since_s < max_hold_s
                first_overtaken_s[position] = now_s if since_s is None else since_s
                overtaken[position] += 1
                assert overtaken[position] <= max_overtakes

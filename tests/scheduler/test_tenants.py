# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.test_lanes import lanes_of
from tests.scheduler.test_order import chain_of
from tests.support.depth import cases
from vllm_relay.scheduler.tenants import Shares, TenantLanes


def tenant_lanes(round_tokens: int, resident: set[bytes] | None = None) -> TenantLanes[str]:
    """The tenant of a request is its first letter."""
    found: set[bytes] = set() if resident is None else resident
    return TenantLanes(
        lambda: lanes_of(found.__contains__), lambda request: request[0], Shares(round_tokens)
    )


def wait(lanes: TenantLanes[str], *requests: str) -> None:
    for position, request in enumerate(requests):
        lanes.add(request, chain_of(*map(ord, request)), (0.0, position))


def run(lanes: TenantLanes[str], tokens: int) -> str:
    request = lanes.first(0.0)
    assert request is not None
    lanes.run(request, 0.0)
    lanes.release(request)
    lanes.shares.charge(request[0], tokens)
    return request


def test_a_tenant_runs_until_its_share_is_used() -> None:
    lanes = tenant_lanes(round_tokens=20)
    wait(lanes, "a1", "a2", "a3", "a4", "b1", "b2")
    assert [run(lanes, 10) for _ in range(6)] == ["a1", "a2", "b1", "b2", "a3", "a4"]
    assert (len(lanes), lanes.num_records()) == (0, 0)


def test_one_tenant_alone_does_not_wait_for_its_share() -> None:
    lanes = tenant_lanes(round_tokens=5)
    wait(lanes, "a1", "a2", "a3")
    assert [run(lanes, 1000) for _ in range(3)] == ["a1", "a2", "a3"]


def test_what_was_used_too_much_is_missing_later() -> None:
    lanes = tenant_lanes(round_tokens=10)
    wait(lanes, "a1", "a2", "b1", "b2", "b3", "b4")
    ran = [run(lanes, 30 if request == "a" else 10) for request in "abbbab"]
    assert ran[:4] == ["a1", "b1", "b2", "b3"]  # and now both have used as much


def test_shares_are_forgotten_when_they_are_whole() -> None:
    shares = Shares(10)
    for tenant in range(20_000):
        shares.charge(tenant, 10)
    assert len(shares._left_tokens) == 10_000
    assert shares.may_run(9_999) and not shares.may_run(10_000)  # those charged first are forgotten
    shares.charge("new", 0)
    assert len(shares._left_tokens) == 10_000
    shares.go_on_to([19_999])
    assert len(shares._left_tokens) == 0


def test_a_large_debt_takes_as_many_rounds_as_it_has() -> None:
    shares = Shares(10)
    shares.charge("a", 1_000_010)
    shares.charge("b", 995)
    shares.go_on_to(["a", "b"])
    assert (shares.may_run("a"), shares.may_run("b")) == (False, True)
    shares.go_on_to(["a"])
    assert shares.may_run("a")


def test_what_goes_first_does_so_whoever_it_is_for() -> None:
    lanes = tenant_lanes(round_tokens=10)
    wait(lanes, "a1", "b1")
    lanes.shares.charge("b", 1000)
    lanes.add_first("b9")
    lanes.add_first("c9")
    assert [run(lanes, 1) for _ in range(4)] == ["c9", "b9", "a1", "b1"]


def test_preempted_requests_go_on_first_whoever_they_are() -> None:
    lanes = tenant_lanes(round_tokens=10)
    wait(lanes, "a1", "b1")
    lanes.shares.charge("b", 1000)
    lanes.add_preempted("b9")
    lanes.add_preempted("c9")
    assert list(lanes) == ["c9", "b9", "a1", "b1"]
    lanes.release("c0")
    assert [run(lanes, 1) for _ in range(4)] == ["c9", "b9", "a1", "b1"]


def test_a_tenant_goes_on_with_the_round_that_began_for_it() -> None:
    lanes = TenantLanes(
        lambda: lanes_of(lambda _: False, 5.0), lambda request: request[0], Shares(10)
    )
    for number in (1, 2):
        lanes.add(f"a{number}", chain_of(1, number), (0.0, number))
        lanes.add(f"b{number}", chain_of(2 + number), (0.0, number))
    lanes.run("a1", 0.0)  # the other one is held for it
    lanes.shares.charge("b", 15)
    assert lanes.first(1.0) == "b1"
    lanes.run("b1", 1.0)
    assert lanes.first(6.0) == "b2"


@given(st.integers(2, 5), st.integers(1, 100), st.integers(0, 2**32))
@settings(max_examples=cases(40), deadline=None)
def test_busy_tenants_get_equal_shares(tenants: int, round_tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    lanes = tenant_lanes(round_tokens)
    names = "abcde"[:tenants]
    costs = {name: rng.randint(1, 60) for name in names}
    used = dict.fromkeys(names, 0)
    wait(lanes, *(f"{name}{number}" for name in names for number in range(3)))
    for number in range(300):
        request = lanes.first(0.0)
        assert request is not None
        name = request[0]
        tokens = rng.randint(1, costs[name])
        lanes.run(request, 0.0)
        lanes.release(request)
        lanes.shares.charge(name, tokens)
        used[name] += tokens
        lanes.add(f"{name}{number % 256}x", chain_of(1), (0.0, 100 + number))
        assert max(used.values()) - min(used.values()) <= round_tokens + 2 * max(costs.values())


def test_who_is_set_aside_or_removed_leaves_nothing() -> None:
    lanes = tenant_lanes(round_tokens=10)
    wait(lanes, "a1", "b1", "c1")
    lanes.set_aside("a1")
    assert len(lanes) == 2
    for request in ("a1", "b1", "c1"):
        lanes.remove(request)
        lanes.release(request)
    assert (len(lanes), lanes.num_records()) == (0, 0)

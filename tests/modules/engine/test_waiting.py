# SPDX-License-Identifier: Apache-2.0
"""Waiting requests against a plain list of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.support.records import records_of_waiting
from vllm_relay.modules.engine.waiting import WaitingRequests

MODULES = st.integers(0, 5)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(MODULES, unique=True, max_size=4), MODULES),
        st.tuples(st.just("discard"), st.integers(0, 30)),
        st.tuples(st.just("compute"), st.integers(1, 3)),
        st.tuples(st.just("end"), MODULES, st.booleans()),
        st.tuples(st.just("evict"), MODULES),
        st.tuples(st.just("take"), st.integers(1, 5)),
    ),
    max_size=60,
)


class Waiting:
    """Requests 0, 1, ... and modules b"0", b"1", ..., some of which are there or are computed."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.computed: set[bytes] = set()
        self.keys: list[list[bytes]] = []
        self.expected: dict[int, tuple[int, int]] = {}  # rank of those that wait
        self.waiting: WaitingRequests[int] = WaitingRequests(
            lambda request, index: self.keys[request][index] in self.there
        )

    def add(self, modules: list[int], rank: int) -> None:
        request = len(self.keys)
        self.keys.append([b"%d" % each for each in modules])
        lacks = not self.there.issuperset(self.keys[request])
        assert self.waiting.add(request, self.keys[request], (rank, request)) == lacks
        if lacks:
            self.expected[request] = (rank, request)

    def discard(self, request: int) -> None:
        self.waiting.discard(request)
        self.expected.pop(request, None)

    def compute(self, most: int) -> None:
        for _ in range(most):
            found = self.waiting.wanted()
            if found is not None:
                key = self.keys[found[0]][found[1]]
                assert key not in self.there and found[0] in self.expected
                self.computed.add(key)
                self.waiting.computed(key)

    def end(self, module: int, is_there: bool = True) -> None:
        key = b"%d" % module
        if key in self.computed:
            self.computed.remove(key)
            if is_there:
                self.there.add(key)
            self.waiting.arrived(key)

    def evict(self, module: int) -> None:
        self.there.discard(b"%d" % module)

    def take(self, limit: int) -> None:
        for request in self.waiting.take_able(limit, limit):
            assert self.there.issuperset(self.keys[request])
            del self.expected[request]

    def check(self) -> None:
        assert len(self.waiting._waiters) == len(self.expected)
        assert self.expected or records_of_waiting(self.waiting) == 0
        assert all(request in self.waiting for request in self.expected)
        assert self.waiting.first() == min(
            self.expected, key=lambda request: self.expected[request], default=None
        )
        for request in self.expected:
            lacks = [i for i, key in enumerate(self.keys[request]) if key not in self.there]
            assert self.waiting.missing(request) == lacks


@settings(max_examples=cases(400))
@given(ACTIONS)
def test_nobody_waits_for_ever(actions: list[tuple]) -> None:
    waiting = Waiting()
    for name, *arguments in actions:
        getattr(waiting, name)(*arguments)
        waiting.check()
    for _ in range(20):  # nothing is evicted any more
        waiting.compute(10)
        for module in range(6):
            waiting.end(module)
        waiting.take(100)
    waiting.check()
    assert not waiting.expected


def test_those_of_the_smallest_rank_are_looked_at_first() -> None:
    waiting = Waiting()
    for rank in (5, 3, 4):
        waiting.add([0], rank)
    waiting.there.add(b"0")
    waiting.waiting.arrived(b"0")
    assert waiting.waiting.take_able(2, 1) == [1, 2]
    assert waiting.waiting.take_able(2, 1) == [0]


def test_few_are_looked_at_in_vain() -> None:
    waiting = Waiting()
    for _ in range(20):
        waiting.add([0, 1], 0)
    waiting.there.add(b"0")
    waiting.waiting.arrived(b"0")
    assert not waiting.waiting.take_able(100, 3)
    assert len(waiting.waiting._lists[b"0"]) >= 7


def test_a_request_is_listed_where_the_fewest_are() -> None:
    """When what all need is there, few are looked at."""
    waiting = Waiting()
    for module in (1, 2, 3, 4) * 20:
        waiting.add([0, module], 0)
    waiting.there.add(b"0")
    waiting.waiting.arrived(b"0")
    assert not waiting.waiting.take_able(1000, 1000)
    looked_at = len(waiting.waiting._lists[b"1"])
    assert looked_at >= 20

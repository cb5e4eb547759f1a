# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.prefix_cache.next_use import NextUse

KEYS = [bytes([letter]) for letter in range(6)]

operations = st.lists(
    st.tuples(st.integers(0, 12), st.sets(st.sampled_from(KEYS))), min_size=1, max_size=60
)


@settings(max_examples=cases(125))
@given(operations)
def test_equals_a_naive_model(operations):
    """An operation removes the request at its position, or adds one where there is none."""
    next_use, waiting, told = NextUse(), {}, []
    next_use.listen(told.append)
    for position, keys in operations:
        if position in waiting:
            keys = waiting.pop(position)
            next_use.remove(position, keys)
        else:
            keys = waiting[position] = sorted(keys)
            next_use.add(position, keys)
        assert told.pop() == keys and not told
        assert len(next_use) == len(waiting)
        for key in KEYS:
            expected = min((p for p, needed in waiting.items() if key in needed), default=None)
            assert next_use.next_use(key) == expected
    for position, keys in waiting.items():
        next_use.remove(position, keys)
    assert not next_use._positions


def test_listeners_see_the_state_after_the_change():
    next_use, seen = NextUse(), []
    next_use.listen(lambda keys: seen.append([next_use.next_use(key) for key in keys]))
    next_use.add(7, KEYS[:2])
    next_use.add(-3, KEYS[1:3])
    next_use.remove(-3, KEYS[1:3])
    assert seen == [[7, 7], [-3, -3], [7, None]]


def test_wrong_positions_and_keys_are_refused():
    next_use = NextUse()
    next_use.add(1, KEYS[:1])
    with pytest.raises(ValueError, match="position 1 already"):
        next_use.add(1, KEYS[1:])
    with pytest.raises(KeyError):
        next_use.remove(2, KEYS[:1])
    next_use.add(2, KEYS[1:2])
    with pytest.raises(KeyError):
        next_use.remove(2, KEYS[:1])


def test_positions_that_come_and_go_behind_a_waiting_one_leave_nothing():
    next_use = NextUse()
    next_use.add(0, KEYS)
    next_use.add(1, KEYS)
    for position in range(2, 1000):
        next_use.add(position, KEYS)
        next_use.remove(position, KEYS)
    assert all(len(known._heap) < 8 for known in next_use._positions.values())


def test_many_requests():
    num_requests = 20_000
    shared = [b"system%d" % index for index in range(16)]
    chains = [[*shared, b"of four%d" % (n // 4), b"own%d" % n] for n in range(num_requests)]
    next_use = NextUse()
    for position, chain in enumerate(chains):
        next_use.add(position, chain)
    assert next_use.next_use(shared[0]) == 0 and next_use.next_use(chains[6][16]) == 4
    for position, chain in enumerate(chains[:-1]):
        next_use.remove(position, chain)
    assert next_use.next_use(shared[0]) == num_requests - 1
    assert next_use.next_use(chains[6][16]) is None

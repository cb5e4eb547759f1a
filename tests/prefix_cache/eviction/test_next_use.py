# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.calls import count_calls
from tests.support.depth import cases
from vllm_relay.prefix_cache.eviction.next_use import NextUse


def chain_of(path, group=0):
    """Keys that stand for whole prefixes."""
    return [bytes([group, *path[: end + 1]]) for end in range(len(path))]


PATHS = [[a, b, c] for a in range(2) for b in range(2) for c in range(2)]
KEYS = sorted({key for group in range(2) for path in PATHS for key in chain_of(path, group)})

paths = st.lists(st.integers(0, 1), max_size=3)
ranks = st.tuples(st.integers(-1, 1), st.integers(0, 6))
operations = st.lists(st.tuples(ranks, paths, paths, st.booleans()), min_size=1, max_size=60)


@settings(max_examples=cases(125))
@given(operations)
def test_equals_a_naive_model(operations):
    """An operation removes the request of its rank, or adds one where there is none."""
    next_use, waiting, told = NextUse(), {}, []
    next_use.listen(lambda *what: told.append(what))
    for rank, path, other_path, runs in operations:
        if rank in waiting:
            next_use.remove(rank, runs=runs)
            assert told.pop() == (waiting.pop(rank), runs)
        else:
            waiting[rank] = [chain_of(path), chain_of(other_path, group=1)]
            next_use.add(rank, waiting[rank])
        assert not told
        assert next_use._waiting == waiting
        for key in KEYS:
            needing = [rank for rank, chains in waiting.items() if any(key in c for c in chains)]
            assert next_use.next_use(key) == min(needing, default=None)
    for rank in waiting:
        next_use.remove(rank, runs=False)
    assert not next_use._runs


def test_a_run_that_is_cut_keeps_all_who_wait_for_its_end() -> None:
    next_use = NextUse()
    whole, branch = chain_of([0, 0, 0]), chain_of([0, 0, 1])
    next_use.add((1,), [whole])
    next_use.add((2,), [whole])
    next_use.add((3,), [branch])
    next_use.remove((1,), runs=True)
    assert [next_use.next_use(key) for key in (*whole, branch[-1])] == [(2,), (2,), (2,), (3,)]


def test_listeners_see_the_state_after_the_change():
    next_use, seen = NextUse(), []
    long, short = chain_of([0, 0, 0]), chain_of([0, 0])
    next_use.listen(lambda chains, runs: seen.append([next_use.next_use(key) for key in long]))
    next_use.add((7,), [long])
    next_use.add((-3,), [short])
    next_use.remove((-3,), runs=True)
    next_use.remove((7,), runs=True)
    assert seen == [[(7,)] * 3, [None] * 3]


def test_ranks_that_are_taken_or_unknown_are_refused():
    next_use = NextUse()
    next_use.add((1,), [chain_of([0])])
    with pytest.raises(ValueError, match=r"rank \(1,\) waits already"):
        next_use.add((1,), [chain_of([1])])
    with pytest.raises(KeyError):
        next_use.remove((2,), runs=True)


def test_a_higher_priority_is_needed_sooner():
    next_use, chain = NextUse(), chain_of([0])
    next_use.add((1, 0), [chain])
    next_use.add((0, 9), [chain])
    assert next_use.next_use(chain[0]) == (0, 9)


def test_ranks_that_come_and_go_behind_a_waiting_one_leave_nothing():
    next_use, chain = NextUse(), chain_of([0, 1])
    next_use.add((0,), [chain])
    next_use.add((1,), [chain])
    for position in range(2, 1000):
        next_use.add((position,), [chain])
        next_use.remove((position,), runs=False)
    assert all(len(run.ranks) < 8 for run in next_use._runs.values())


def test_many_requests():
    num_requests = 20_000
    shared = [b"system%d" % index for index in range(16)]
    chains = [[*shared, b"of four%d" % (n // 4), b"own%d" % n] for n in range(num_requests)]
    next_use = NextUse()
    for position, chain in enumerate(chains):
        next_use.add((position,), [chain])
    assert next_use.next_use(shared[0]) == (0,) and next_use.next_use(chains[6][16]) == (4,)
    for position in range(num_requests - 1):
        next_use.remove((position,), runs=True)
    assert next_use.next_use(shared[0]) == (num_requests - 1,)
    assert next_use.next_use(chains[6][16]) is None


@pytest.mark.parametrize("shared_blocks", [0, 4096, 8192])
def test_a_request_costs_no_call_for_every_block(shared_blocks):
    next_use = NextUse()
    chains = [
        [
            b"%d" % block if block < shared_blocks else b"%d.%d" % (name, block)
            for block in range(8192)
        ]
        for name in range(3)
    ]

    def come_and_go():
        for position, chain in enumerate(chains):
            next_use.add((position,), [chain])
        for position in range(len(chains)):
            next_use.remove((position,), runs=True)

    assert count_calls(come_and_go) < 400

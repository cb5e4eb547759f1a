# SPDX-License-Identifier: Apache-2.0
"""Ranked members against a plain dict of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.ranked import Ranked


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 5)), max_size=300))
def test_the_first_has_the_smallest_rank(changes: list[tuple[int, int]]) -> None:
    ranked: Ranked[int] = Ranked()
    expected: dict[int, int] = {}
    for member, rank in changes:
        if rank != expected.get(member):  # with the rank it has it keeps its place
            expected.pop(member, None)
        if rank < 0:
            ranked.discard(member)
        else:
            ranked.add(member, (rank,))
            expected[member] = rank
            assert ranked.rank(member) == (rank,)
        assert len(ranked) == len(expected)
        assert (member in ranked) == (member in expected)
        # of equals the one that was added first
        assert ranked.first() == min(expected, key=expected.__getitem__, default=None)
    assert len(ranked._heap) <= 64 + 2 * 10 + 1


def test_members_need_not_be_comparable() -> None:
    ranked: Ranked[object] = Ranked()
    members = [object() for _ in range(9)]
    for member in members:
        ranked.add(member, 0)
    assert ranked.first() is members[0]

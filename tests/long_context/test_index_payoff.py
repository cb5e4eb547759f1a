# SPDX-License-Identifier: Apache-2.0
"""Whether an index pays, against all ways that a request can go on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.long_context.made_costs import made_costs
from tests.support.depth import cases
from vllm_relay.long_context import index_payoff
from vllm_relay.long_context.index_payoff import IndexPayoff, SavedTime, index_bytes_per_key
from vllm_relay.sparse.search_cost import SHIPPED

NUM_KEYS = 1000


def payoff_of(break_even_tokens: float) -> IndexPayoff:
    """A coarse index that has saved what it costs after so many tokens."""
    scan_s = 1e-9 * 1e5 * NUM_KEYS
    plan_s = 1e-6 * index_payoff.PLAN_US_PER_KEY * NUM_KEYS
    build_us = 1e6 * (break_even_tokens * scan_s - plan_s) / NUM_KEYS
    return IndexPayoff(made_costs(build_us=build_us), group=1, head_size=128, key_bytes=256)


def test_times_are_those_of_the_search_costs() -> None:
    payoff = payoff_of(7.0)
    assert payoff.saved_s("coarse", NUM_KEYS) == pytest.approx(0.1, rel=1e-4)
    assert payoff.cost_s("coarse", NUM_KEYS) == pytest.approx(0.7)
    assert payoff.break_even_tokens("coarse", NUM_KEYS) == pytest.approx(7, rel=1e-4)
    assert payoff.saved_s("graph", NUM_KEYS) == 0
    assert payoff.break_even_tokens("graph", NUM_KEYS) == math.inf


@settings(max_examples=cases(50))
@given(st.floats(1, 60), st.integers(1, 200), st.data())
def test_never_more_than_twice_what_is_necessary(
    break_even: float, max_tokens: int, data: st.DataObject
) -> None:
    """In tokens of what a scan takes longer: wherever the request stops."""
    end = data.draw(st.integers(1, max_tokens))
    payoff = payoff_of(break_even)
    saved, paid = SavedTime(payoff), 0.0
    for token in range(end):
        paid += 1
        saved.count_token(NUM_KEYS)
        if saved.kinds_that_pay(NUM_KEYS, max_tokens - token - 1):
            assert max_tokens - token - 1 >= break_even * 0.999
            paid += break_even
            break
    assert paid <= 2 * min(end, break_even) + 1.01


def test_an_index_is_built_when_scans_have_cost_as_much() -> None:
    saved = SavedTime(payoff_of(6.5))
    built_after = []
    for token in range(1, 20):
        saved.count_token(NUM_KEYS)
        if saved.kinds_that_pay(NUM_KEYS, 100):
            built_after.append(token)
    assert built_after[0] == 7
    assert saved.kinds_that_pay(NUM_KEYS, 7) == ("coarse",)
    assert saved.kinds_that_pay(NUM_KEYS, 6) == ()


@pytest.mark.parametrize("num_keys", [8192, 40_000, 131_072])
@pytest.mark.parametrize("max_tokens", [30_000, 60_000, 120_000, 400_000])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_what_may_pay_is_what_some_request_builds(
    num_keys: int, max_tokens: int, group: int
) -> None:
    payoff = IndexPayoff(SHIPPED, group=group, head_size=128, key_bytes=256)
    saved, step = SavedTime(payoff), 1000
    builds = False
    for token in range(0, max_tokens, step):
        for _ in range(step):
            saved.count_token(num_keys)
        builds |= bool(saved.kinds_that_pay(num_keys, max_tokens - token - step))
    may_pay = payoff.may_pay(num_keys, max_tokens)
    assert may_pay or not builds
    if not payoff.may_pay(num_keys, 2 * max_tokens):
        assert not may_pay


def test_short_answers_never_pay_with_the_costs_that_ship() -> None:
    """The docs say so."""
    payoff = IndexPayoff(SHIPPED, group=4, head_size=128, key_bytes=256)
    assert not payoff.may_pay(131_072, 45_000)
    assert payoff.may_pay(131_072, 60_000)
    assert not payoff.may_pay(32_768, 60_000)


def test_the_memory_of_an_index_and_what_it_learns_from() -> None:
    # a code and 48 edges, and 0.4 queries of 128 elements of 2 bytes
    assert index_bytes_per_key(128, 2, 0.4) == pytest.approx(128 + 4 * 48 + 102.4)

# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.ordering.reference import encode, random_table, tables
from vllm_relay.tables.ordering.cached_tokens import BlockCache, cached_tokens
from vllm_relay.tables.ordering.order import ORDERS, FieldPrompts, choose_order
from vllm_relay.tables.ordering.sequences import TokenSequences
from vllm_relay.tables.ordering.table_order import compose


@settings(max_examples=cases(15))
@given(tables(), st.sampled_from([1, 2, 16]), st.sampled_from([None, 0, 20]))
def test_auto_is_the_best_of_all(table, block_size, spare_blocks):
    columns = encode(table)
    longest = sum(int(column.lengths.max(initial=0)) for column in columns)
    num_blocks = None if spare_blocks is None else longest // block_size + 1 + spare_blocks
    cache = BlockCache(block_size, num_blocks)
    chosen = choose_order(columns, "auto", cache)
    for name, solve in ORDERS.items():
        count = int(cached_tokens(compose(columns, solve(columns)), cache).sum())
        assert chosen.cached_tokens[name] == count <= chosen.cached_tokens[chosen.name]


def test_prompts_hold_what_all_have():
    columns = encode({"a": ["x", "y"]})
    order = ORDERS["keep"](columns)
    [prompts] = FieldPrompts(columns, [1000, 1001], [1002])(order)
    assert prompts[1].tolist() == [1000, 1001, *map(ord, "a: y\n"), 1002]
    cache = BlockCache(2)
    assert (
        choose_order(columns, "auto", cache, FieldPrompts(columns, [1000] * 8)).cached_tokens[
            "keep"
        ]
        == 10
    )


def test_many_prompts_are_made_in_parts(monkeypatch):
    monkeypatch.setattr("vllm_relay.tables.ordering.order._TOKENS_PER_PART", 40)
    columns = encode({"a": [f"{n % 5}" for n in range(30)]})
    parts = list(FieldPrompts(columns)(ORDERS["fixed"](columns)))
    # of five tokens each
    assert [len(part) for part in parts] == [8, 8, 8, 6]


def test_prompts_of_the_caller_are_counted():
    columns = encode(random_table(3))

    def all_different(order):
        yield TokenSequences.from_lists([[row, 1, 2, 3] for row in order.rows.tolist()])

    chosen = choose_order(columns, "auto", BlockCache(1), all_different)
    assert chosen.name == "keep" and set(chosen.cached_tokens.values()) == {0}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_by_name(name):
    columns = encode(random_table(3))
    chosen = choose_order(columns, name)
    expected = ORDERS[name](columns)
    assert chosen.name == name and chosen.cached_tokens == {}
    assert np.array_equal(chosen.order.rows, expected.rows)
    assert np.array_equal(chosen.order.fields, expected.fields)


def test_refused():
    columns = encode({"a": ["x"]})
    with pytest.raises(ValueError, match="order='best' given, expected one of"):
        choose_order(columns, "best")
    with pytest.raises(ValueError, match="without a cache given"):
        choose_order(columns)

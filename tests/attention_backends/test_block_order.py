# SPDX-License-Identifier: Apache-2.0
"""The forest of an order that is kept, against that of the rows as they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.naive_forest import groups_of, naive_groups
from tests.support.depth import cases
from vllm_relay.attention_backends.block_order import BlockOrder
from vllm_relay.attention_backends.forest import NULL_BLOCK

BLOCK_SIZE = 16


def check(
    order: BlockOrder,
    held: dict[int, list[int]],
    rows: list[int],
    limits: list[int] | None = None,
) -> None:
    """`rows` share what `naive_groups` finds, each as many blocks as its limit at most."""
    known = [held.get(row, []) for row in rows]
    tokens = np.array([len(ids) for ids in known] if limits is None else limits) * BLOCK_SIZE
    forest = order.forest(np.array(rows, np.int64), tokens, BLOCK_SIZE)
    forest.validate()
    table = [ids + [10**6 + number] * 50 for number, ids in enumerate(known)]
    for first, last, begin, end, request in forest.nodes.tolist():
        blocks = slice(begin // BLOCK_SIZE, end // BLOCK_SIZE)
        for member in forest.order[first:last].tolist():
            theirs = zip(table[member][blocks], table[request][blocks], strict=True)
            assert all(own in (NULL_BLOCK, read) for own, read in theirs)
    assert groups_of(forest) == naive_groups(table, tokens, BLOCK_SIZE)


@settings(max_examples=cases(60))
@given(seed=st.integers(0, 2**32 - 1), num_begun=st.sampled_from([1, 1, 3, 40]))
def test_requests_that_come_go_and_grow(seed: int, num_begun: int) -> None:
    rng = np.random.default_rng(seed)
    order, free = BlockOrder(), list(range(200))
    held: dict[int, list[int]] = {}
    most_ids = int(rng.choice([3, 300, 2**31 - 1]))  # few: everything begins like something
    has_nulls = rng.random() < 0.2

    def some_ids(most: int) -> list[int]:
        ids = rng.integers(1, most_ids, rng.integers(most + 1)).tolist()
        if has_nulls and ids and rng.random() < 0.2:
            ids[int(rng.integers(len(ids)))] = 0
        return ids

    for _ in range(int(rng.integers(2, 12))):
        for row in list(held):
            if rng.random() < 0.2:
                order.end(row)
                free.append(row)
                del held[row]
            elif rng.random() < 0.3:
                more = some_ids(3)
                order.append(row, more)
                held[row] += more
        for _ in range(num_begun if num_begun + len(held) < 100 else 0):
            row = free.pop(int(rng.integers(len(free))))
            like = held[int(rng.choice(list(held)))] if held else []
            ids = like[: int(rng.integers(len(like) + 1))] + some_ids(5)
            order.begin(row, ids)
            held[row] = ids
        if rng.random() < 0.7:
            rows = [row for row in held if rng.random() < 0.8]
            check(order, held, [int(row) for row in rng.permutation([*rows, -1])])
            check(order, held, rows, [int(rng.integers(len(held[row]) + 1)) for row in rows])


def test_one_that_ends_where_others_go_on() -> None:
    order = BlockOrder()
    held = {0: [7, 8], 1: [7, 8, 3], 2: [7, 8, 9]}
    for row, ids in held.items():
        order.begin(row, ids)
    check(order, held, [0, 1, 2])
    order.append(0, [9, 4])  # as request 2 has gone on, not as its neighbour
    held[0] += [9, 4]
    check(order, held, [0, 1, 2])


@pytest.mark.parametrize("num_rows", [30, 200])
def test_many_that_begin_alike(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    prefix = rng.integers(1, 2**30, 40).tolist()
    held = {
        row: prefix[: int(rng.integers(41))] + rng.integers(1, 600, 3).tolist()
        for row in range(num_rows)
    }
    order = BlockOrder()
    for row, ids in held.items():
        order.begin(row, ids)
    check(order, held, list(held))

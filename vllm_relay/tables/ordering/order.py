# SPDX-License-Identifier: Apache-2.0
"""The order of a table's rows and fields with which the prefix cache is hit most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from vllm_relay.tables.ordering.cached_tokens import BlockCache, cached_tokens
from vllm_relay.tables.ordering.columns import Column
from vllm_relay.tables.ordering.per_row.per_row_order import per_row_order
from vllm_relay.tables.ordering.sequences import TokenSequences
from vllm_relay.tables.ordering.table_order import TableOrder, compose, fixed_order, kept_order

OrderName = Literal["keep", "fixed", "per_row"]
OrderChoice = Literal["auto", "keep", "fixed", "per_row"]
ORDERS: dict[OrderName, Callable[[Sequence[Column]], TableOrder]] = {
    "keep": kept_order,
    "fixed": fixed_order,
    "per_row": per_row_order,
}

MakePrompts = Callable[[TableOrder], Iterator[TokenSequences]]
"""The tokens of the prompts of an order, in parts."""

_TOKENS_PER_PART = 1 << 16
"""About: hashes take several times the memory of the tokens."""


@dataclass(frozen=True)
class FieldPrompts:
    """Prompts that are the tokens of the fields between tokens that all prompts have.

    A template may join tokens of neighboring fields; where that matters, `choose_order` takes a
    function that tokenizes whole prompts.

    Attributes:
        columns: of the table.
        before, after: tokens in front of the fields and behind them.
    """

    columns: Sequence[Column]
    before: Sequence[int] = ()
    after: Sequence[int] = ()

    def __call__(self, order: TableOrder) -> Iterator[TokenSequences]:
        rows = len(order.rows)
        num_tokens = sum(int(each.lengths[each.codes].sum()) for each in self.columns)
        num_tokens += rows * (len(self.before) + len(self.after))
        step = max(1, -(-rows // (num_tokens // _TOKENS_PER_PART + 1)))
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            yield compose(self.columns, order, part, self.before, self.after)


@dataclass(frozen=True)
class ChosenOrder:
    """
    Attributes:
        name: of the order.
        order: of rows and fields.
        cached_tokens: prompt tokens found in the cache with each order that was tried.
    """

    name: OrderName
    order: TableOrder
    cached_tokens: dict[OrderName, int] = field(default_factory=dict)


def choose_order(
    columns: Sequence[Column],
    order: OrderChoice = "auto",
    cache: BlockCache | None = None,
    prompts: MakePrompts | None = None,
) -> ChosenOrder:
    """
    Args:
        columns: of the table; the distinct rows, if equal prompts are asked once.
        order: "keep" leaves rows and fields as they are, "fixed" has one order of fields for all
            rows, "per_row" one for each, "auto" is the one of them that finds most tokens in
            `cache`; of equals the first of these.
        cache: for "auto".
        prompts: the prompts of an order, for "auto"; the fields alone by default.

    Raises:
        ValueError: the order is not known, "auto" has no cache, a prompt does not fit into the
            cache, or the columns are not those of a table.
    """
    if order not in get_args(OrderChoice):
        raise ValueError(f"order={order!r} given, expected one of {list(get_args(OrderChoice))}")
    if order != "auto":
        return ChosenOrder(order, ORDERS[order](columns))
    if cache is None:
        raise ValueError(
            'order="auto" without a cache given: say what it is to be best for, as in '
            "cache=BlockCache(block_size_tokens=16, num_blocks=2000)"
        )
    make = prompts or FieldPrompts(columns)
    found = {name: solve(columns) for name, solve in ORDERS.items()}
    counts = {name: int(np.sum(cached_tokens(make(each), cache))) for name, each in found.items()}
    best = max(counts, key=counts.__getitem__)
    return ChosenOrder(best, found[best], counts)

# SPDX-License-Identifier: Apache-2.0
"""Plain versions of what the package does fast, and tables to try it on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product

import numpy as np
from hypothesis import strategies as st

from vllm_relay.tables.ordering.columns import Column, encode_columns
from vllm_relay.tables.ordering.table_order import TableOrder

Table = Mapping[str, Sequence[object]]


def shared_beginning(a: Sequence[object], b: Sequence[object]) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


def total_shared(prompts: Sequence[Sequence[object]]) -> int:
    """Of each prompt the longest beginning that an earlier one has, summed."""
    return sum(
        max((shared_beginning(prompt, earlier) for earlier in prompts[:number]), default=0)
        for number, prompt in enumerate(prompts)
    )


def prompt_texts(columns: Sequence[Column], order: TableOrder) -> list[str]:
    """Of columns whose tokens are characters."""
    lines = []
    for row, fields in zip(order.rows.tolist(), order.fields.tolist(), strict=True):
        cells = [columns[field].tokens[int(columns[field].codes[row])] for field in fields]
        lines.append("".join(chr(token) for cell in cells for token in cell))
    return lines


def all_orders_of_fields(num_rows: int, num_fields: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    return product(permutations(range(num_fields)), repeat=num_rows)


def most_shared(columns: Sequence[Column]) -> int:
    """Over all orders of the fields of each row. The order of the rows does not matter."""
    rows = len(columns[0].codes)
    best = 0
    for fields in all_orders_of_fields(rows, len(columns)):
        order = TableOrder(np.arange(rows), np.array(fields, np.int16).reshape(rows, -1))
        best = max(best, total_shared(prompt_texts(columns, order)))
    return best


def random_table(seed: int, max_rows: int = 40, max_fields: int = 6) -> dict[str, list[object]]:
    """Few and many values, short and long ones, columns that determine others, None."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, max_rows + 1))
    table: dict[str, list[object]] = {}
    for number in range(int(rng.integers(1, max_fields + 1))):
        num_values = int(rng.choice([1, 2, 3, 8, 1000]))
        values = rng.integers(0, num_values, rows)
        length = int(rng.choice([0, 1, 4, 20]))
        cells: list[object] = [f"{value}" * (1 + length) for value in values.tolist()]
        if table and rng.random() < 0.3:
            source = table[str(rng.choice(list(table)))]
            cells = [f"of {cell!s:.2}" for cell in source]
        if rng.random() < 0.2:
            cells = [None if rng.random() < 0.3 else cell for cell in cells]
        table[f"field {number}"] = cells
    return table


cells = st.one_of(
    st.none(),
    st.just(float("nan")),
    st.integers(-3, 3),
    st.booleans(),
    st.floats(allow_nan=False),
    st.sampled_from(["", "a", "ab", "abc", "b", "é", "日本", "\U0001f37a", "e\u0301", "\x00"]),
    st.text(max_size=4),
)


@st.composite
def tables(draw: st.DrawFn, max_rows: int = 12, max_fields: int = 5) -> dict[str, list[object]]:
    rows = draw(st.integers(0, max_rows))
    fields = draw(st.integers(1, max_fields))
    few = st.sampled_from(["x", "y", "longer"])
    made: dict[str, list[object]] = {}
    for number in range(fields):
        kind = draw(st.sampled_from([cells, few, st.just("same"), st.uuids().map(str)]))
        made[f"f{number}"] = draw(st.lists(kind, min_size=rows, max_size=rows))
    return made


def encode(table: Table) -> list[Column]:
    """Fields as lines with their names, a token a character."""
    return encode_columns(table)

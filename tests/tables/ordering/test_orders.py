# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.ordering.reference import (
    encode,
    most_shared,
    prompt_texts,
    random_table,
    tables,
    total_shared,
)
from vllm_relay.tables.ordering.columns import cell_text, encode_columns, render_field, render_value
from vllm_relay.tables.ordering.order import ORDERS
from vllm_relay.tables.ordering.per_row.per_row_order import _choose_fields, per_row_order
from vllm_relay.tables.ordering.table_order import (
    compose,
    field_scores,
    fixed_order,
    ranked_fields,
    sort_rows,
)


def shared(columns, order):
    return compose(columns, order).total_shared()


def check_order(table, columns, order):
    """Every row once, every cell under its own name."""
    rows = len(columns[0].codes)
    assert order.rows.dtype == np.int64 and order.fields.dtype == np.int16
    assert sorted(order.rows.tolist()) == list(range(rows))
    every_field = list(range(len(columns)))
    assert all(sorted(fields) == every_field for fields in order.fields.tolist())
    texts = prompt_texts(columns, order)
    for text, row, fields in zip(texts, order.rows, order.fields, strict=True):
        names = [columns[field].name for field in fields]
        lines = [f"{name}: {cell_text(table[name][row])}\n" for name in names]
        assert text == "".join(lines)
    composed = compose(columns, order)
    assert ["".join(map(chr, composed[row])) for row in range(rows)] == texts
    assert sorted(order.rows.tolist()) == list(range(rows))


@pytest.mark.parametrize("name", ORDERS)
@given(tables())
def test_rows_and_names_are_kept(name, table):
    columns = encode(table)
    check_order(table, columns, ORDERS[name](columns))


@settings(max_examples=cases(50))
@given(tables(), st.sampled_from([1, 2, 16]))
def test_per_row_is_never_below_fixed(table, width):
    for columns in (encode(table), encode_columns(table, render_value)):
        order = per_row_order(columns, width)
        fixed = fixed_order(columns)
        texts = prompt_texts(columns, order)
        assert total_shared(texts) == shared(columns, order) >= shared(columns, fixed)


def test_per_row_is_never_below_fixed_on_many_tables():
    better, num_tables = 0, cases(250)
    for seed in range(num_tables):
        table = random_table(seed)
        columns = encode_columns(table, render_value if seed % 2 else render_field)
        order = per_row_order(columns)
        gained = shared(columns, order) - shared(columns, fixed_order(columns))
        assert gained >= 0, seed
        better += gained > 0
        if seed % 2 == 0:
            check_order(table, columns, order)
    assert better > 0.3 * num_tables


@pytest.mark.parametrize("seed", range(60))
def test_field_by_field_the_sets_alone_are_never_below_fixed(seed):
    """Without the comparison at the end, which large tables do without."""
    # no two fields begin alike: what is shared is shared field by field
    columns = encode_columns(random_table(seed), lambda name, text: f"{name[-1]}{text}")
    for width in (1, 16):
        order = sort_rows(columns, _choose_fields(columns, ranked_fields(columns), width))
        assert shared(columns, order) >= shared(columns, fixed_order(columns))


def test_how_far_per_row_is_from_the_best_order():
    reached, best, optimal = 0, 0, 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows, fields = (4, 3) if seed % 2 else (7, 2)
        table = {
            f"{number}": [str(x) * int(rng.integers(1, 4)) for x in rng.integers(0, 3, rows)]
            for number in range(fields)
        }
        columns = encode(table)
        most = most_shared(columns)
        found = shared(columns, per_row_order(columns))
        assert found <= most
        reached, best, optimal = reached + found, best + most, optimal + (found == most)
    assert reached >= 0.99 * best
    assert optimal >= 45


def test_each_group_of_rows_has_its_own_order():
    # rows agree in a long field, some in x and some in y
    table = {
        "x": ["same" * 9] * 6 + [f"x{n}" for n in range(6)],
        "y": [f"y{n}" for n in range(6)] + ["alike" * 9] * 6,
    }
    columns = encode(table)
    order = per_row_order(columns)
    first = {int(row): int(fields[0]) for row, fields in zip(order.rows, order.fields, strict=True)}
    assert [first[row] for row in range(12)] == [0] * 6 + [1] * 6


def test_scores_are_those_of_the_paper():
    table = {"a": ["xx", "xx", "yyyy", "xx"], "b": ["1", "2", "3", "4"], "c": ["z"] * 4}
    columns = encode_columns(table, render_value)
    assert field_scores(columns).tolist() == [2.5 * 4 / 2, 1 * 4 / 4, 1 * 4 / 1]
    order = fixed_order(columns)
    assert order.fields.tolist() == [[0, 2, 1]] * 4
    assert order.rows.tolist() == [0, 1, 3, 2]


def test_equal_rows_are_neighbors_and_cost_nothing():
    columns = encode({"a": ["p", "q"] * 50, "b": ["r", "s"] * 50})
    order = per_row_order(columns)
    assert shared(columns, order) >= 98 * 10
    assert np.count_nonzero(np.diff(columns[0].codes[order.rows])) == 1


@pytest.mark.parametrize(
    "table",
    [
        {"a": []},
        {"a": [], "b": []},
        {"a": ["x"]},
        {"a": ["x"], "b": [None]},
        {"a": ["x", "y", "x"]},
        {"a": ["x"] * 20, "b": ["y"] * 20},
        {"a": [str(n) for n in range(50)], "b": [str(-n) for n in range(50)]},
        {"a": [None, float("nan"), "", None], "b": ["é", "日本", "\U0001f37a", "é"]},
        {f"{n}": ["same", "same", str(n)] for n in range(70)},  # more columns than bits
    ],
    ids=["empty", "empty 2", "row", "row 2", "column", "equal", "distinct", "null", "wide"],
)
@pytest.mark.parametrize("name", ORDERS)
def test_edges(table, name):
    columns = encode(table)
    check_order(table, columns, ORDERS[name](columns))


def test_many_distinct_values():
    rows = 20_000
    table = {
        "id": [f"{n * 7919 % rows:x}" for n in range(rows)],
        "kind": [f"kind {n % 3} of things" for n in range(rows)],
        "text": [f"{n} is the number of this row" for n in range(rows)],
    }
    columns = encode(table)
    order = per_row_order(columns)
    check_order(table, columns, order)
    assert set(order.fields[:, 0].tolist()) == {1}


def test_dependencies_stand_behind_what_determines_them():
    rng = np.random.default_rng(0)
    item = rng.integers(0, 5, 60)
    table = {
        "note": [f"{n}" for n in range(60)],
        "name": [f"the name of item {n}" for n in item],
        "number": [f"{n * 31}" for n in item],
    }
    order = per_row_order(encode(table))
    assert order.fields[:, 2].tolist() == [0] * 60


def test_a_wider_search_saves_no_less_on_this_table():
    columns = encode(random_table(5, max_rows=400))
    totals = [shared(columns, per_row_order(columns, width)) for width in (1, 4, 64)]
    assert totals == sorted(totals)


def test_refused():
    with pytest.raises(ValueError, match="width of 0 given"):
        per_row_order(encode({"a": ["x"]}), width=0)
    with pytest.raises(ValueError, match="at least one field"):
        per_row_order([])

# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given

from tests.tables.ordering.reference import encode, tables
from vllm_relay.tables.ordering.columns import cell_text
from vllm_relay.tables.ordering.duplicates import distinct_rows


@given(tables())
def test_equal_rows_are_one(table):
    rows = list(
        zip(*([cell_text(cell) for cell in cells] for cells in table.values()), strict=True)
    )
    kinds = list(dict.fromkeys(rows))
    found = distinct_rows(encode(table))
    assert found.first_rows.tolist() == [rows.index(kind) for kind in kinds]
    assert found.number_of_row.tolist() == [kinds.index(row) for row in rows]
    assert (found.num_equal, found.num_by_rules) == (len(rows) - len(kinds), 0)


def test_fields_that_are_not_used_do_not_tell_rows_apart():
    columns = encode({"text": ["a", "a", "b"], "id": ["1", "2", "3"]})
    assert distinct_rows(columns).num_equal == 0
    assert distinct_rows(columns[:1]).first_rows.tolist() == [0, 2]


def test_cells_do_not_run_into_each_other():
    assert distinct_rows(encode({"a": ["xy", "x"], "b": ["z", "yz"]})).num_equal == 0


def test_rules_are_off_by_default_and_counted():
    columns = encode({"text": ["Apple", "apple ", "Apple", "an  apple", "an apple"]})
    assert distinct_rows(columns).num_equal == 1
    found = distinct_rows(columns, ["strip", "casefold"])
    assert found.number_of_row.tolist() == [0, 0, 0, 1, 2]
    assert (found.num_equal, found.num_by_rules) == (1, 1)
    found = distinct_rows(columns, ["collapse_spaces", "casefold"])
    assert found.first_rows.tolist() == [0, 3]
    assert (found.num_equal, found.num_by_rules) == (1, 2)


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match=r"\['stem'\] given, expected some of \['strip'"):
        distinct_rows(encode({"a": ["x"]}), ["stem"])

# SPDX-License-Identifier: Apache-2.0
import numpy as np
from hypothesis import given

from tests.tables.ordering.reference import encode, tables
from vllm_relay.tables.ordering.columns import cell_text
from vllm_relay.tables.ordering.duplicates import DistinctRows, distinct_rows


def distinct(table) -> DistinctRows:
    return distinct_rows([column.codes for column in encode(table)])


@given(tables())
def test_equal_rows_are_one(table):
    rows = list(
        zip(*([cell_text(cell) for cell in cells] for cells in table.values()), strict=True)
    )
    kinds = list(dict.fromkeys(rows))
    found = distinct(table)
    assert found.first_rows.tolist() == [rows.index(kind) for kind in kinds]
    assert found.number_of_row.tolist() == [kinds.index(row) for row in rows]
    assert found.counts.tolist() == [rows.count(kind) for kind in kinds]


def test_fields_that_are_not_used_do_not_tell_rows_apart():
    assert distinct({"text": ["a", "a", "b"], "id": ["1", "2", "3"]}).counts.tolist() == [1, 1, 1]
    assert distinct({"text": ["a", "a", "b"]}).first_rows.tolist() == [0, 2]


def test_cells_do_not_run_into_each_other():
    assert distinct({"a": ["xy", "x"], "b": ["z", "yz"]}).counts.tolist() == [1, 1]


def test_no_rows_and_many_values():
    assert len(distinct_rows([np.zeros(0, np.int32)]).first_rows) == 0
    codes = np.arange(100_000, dtype=np.int32)
    found = distinct_rows([codes[::-1], codes, codes])
    assert found.first_rows.tolist() == found.number_of_row.tolist() == codes.tolist()

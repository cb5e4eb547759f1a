# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmarks.tables.ggr import Limits, greedy_group_recursion
from tests.tables.ordering.reference import encode, random_table

EVERYTHING = Limits(max_row_depth=100, max_column_depth=100, min_score=1, max_distinct=1)


@pytest.mark.parametrize("limits", [None, EVERYTHING, Limits(min_score=1, chunk_rows=5)])
@pytest.mark.parametrize("seed", range(8))
def test_rows_and_fields_are_kept(seed, limits):
    columns = encode(random_table(seed))
    if len(columns[0].codes) == 0:
        return
    order = greedy_group_recursion(columns, limits=limits)
    assert sorted(order.rows.tolist()) == list(range(len(columns[0].codes)))
    assert all(sorted(line) == list(range(len(columns))) for line in order.fields.tolist())


def test_the_value_with_the_highest_score_comes_first():
    table = {"a": ["x", "x", "x", "y"], "b": ["long" * 5, "p", "long" * 5, "q"]}
    order = greedy_group_recursion(encode(table), limits=EVERYTHING)
    assert order.rows.tolist() == [0, 2, 1, 3]
    assert order.fields[:2].tolist() == [[1, 0]] * 2


def test_columns_that_determine_each_other_stay_together():
    table = {"a": ["x"] * 4, "b": ["long"] * 4, "c": ["12"] * 4}
    order = greedy_group_recursion(encode(table), equivalent=[[0, 2]], limits=EVERYTHING)
    assert {tuple(line) for line in order.fields.tolist()} == {(0, 2, 1)}

# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmarks.tables.data import SOURCES, find_table, made_sales, read_table
from vllm_relay.tables.ordering import encode_columns, find_dependencies


def test_texts_are_those_of_pandas(tmp_path):
    path = tmp_path / "in" / "beer.csv"
    path.parent.mkdir()
    path.write_text('a,b,c,d\n01,1,x,"p, q"\n2,,NA,\n', encoding="utf-8")
    expected = {"a": ["1", "2"], "b": ["1.0", None], "c": ["x", None], "d": ["p, q", None]}
    assert read_table(path) == find_table(SOURCES["beer"], tmp_path) == expected
    assert find_table(SOURCES["marvel"], tmp_path) is None


@pytest.mark.parametrize("name", SOURCES)
def test_made_tables_have_the_given_dependencies(name):
    source = SOURCES[name]
    columns = encode_columns(source.made(300))
    names = [column.name for column in columns]
    determines = find_dependencies(columns)
    assert {len(column.codes) for column in columns} == {300}
    for group in source.equivalent:
        for a in set(group) & set(names):
            for b in set(group) & set(names) - {a}:
                assert determines[names.index(a), names.index(b)]


def test_the_large_table():
    columns = encode_columns(made_sales(200))
    assert len(columns) == 10 and columns[-1].num_values == 200

# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given

from tests.tables.ordering.reference import random_table, shared_beginning, tables
from vllm_relay.tables.ordering.columns import (
    cell_text,
    encode_column,
    encode_columns,
    render_value,
)
from vllm_relay.tables.ordering.duplicates import find_dependencies


@given(tables())
def test_codes_stand_for_texts(table):
    for column, cells in zip(encode_columns(table), table.values(), strict=True):
        assert [column.texts[code] for code in column.codes] == [cell_text(cell) for cell in cells]
        assert len(set(column.texts)) == column.num_values
        rendered = [f"{column.name}: {text}\n" for text in column.texts]
        assert rendered == sorted(rendered)
        assert column.lengths.tolist() == [len(each) for each in rendered]
        for upper in range(1, column.num_values):
            pairs = np.arange(upper), np.full(upper, upper)
            expected = [shared_beginning(each, rendered[upper]) for each in rendered[:upper]]
            assert column.shared_lengths(*pairs).tolist() == expected


def test_values_with_the_same_text_are_the_same():
    column = encode_column("n", [1, "1", 1.0, True, None, float("nan"), ""], render_value)
    assert column.codes[0] == column.codes[1] != column.codes[2]
    assert column.codes[4] == column.codes[5] == column.codes[6]
    assert sorted(column.texts) == ["", "1", "1.0", "True"]
    assert "nothing" in encode_column("n", [None], null_text="nothing").texts


def test_lengths_are_those_of_the_tokenizer():
    def words(texts):
        return [[len(word) for word in text.split()] for text in texts]

    column = encode_column("field", ["a bb", "ccc", "a b"], tokenize=words)
    assert dict(zip(column.texts, column.lengths.tolist(), strict=True)) == {
        "a bb": 3, "ccc": 2, "a b": 3,
    }  # fmt: skip
    assert [column.tokens[code].tolist() for code in column.codes] == [[6, 1, 2], [6, 3], [6, 1, 1]]


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="'a': 1, 'b': 2.*give a cell for every row"):
        encode_columns({"a": [1], "b": [1, 2]})
    with pytest.raises(ValueError, match="at least one field"):
        encode_columns({})


@pytest.mark.parametrize("seed", range(30))
def test_dependencies_are_those_of_the_data(seed):
    table = random_table(seed)
    columns = encode_columns(table)
    found = find_dependencies(columns)
    for a, source in enumerate(table.values()):
        for b, target in enumerate(table.values()):
            pairs = {(cell_text(x), cell_text(y)) for x, y in zip(source, target, strict=True)}
            expected = a != b and len(pairs) == len({x for x, _ in pairs})
            assert found[a, b] == expected


def test_a_dependency_with_one_exception_far_down_is_none():
    rows = 10_000
    source = [str(row % 7) for row in range(rows)]
    target = [str(row % 7 % 3) for row in range(rows)]
    assert find_dependencies(encode_columns({"a": source, "b": target}))[0, 1]
    target[-1] = "2" if target[-1] != "2" else "1"
    assert not find_dependencies(encode_columns({"a": source, "b": target}))[0, 1]

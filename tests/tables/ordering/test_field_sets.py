# SPDX-License-Identifier: Apache-2.0
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.ordering.reference import encode, random_table, shared_beginning, tables
from vllm_relay.tables.ordering.duplicates import find_dependencies
from vllm_relay.tables.ordering.per_row.field_sets import FieldSets
from vllm_relay.tables.ordering.per_row.groups import split


def most_saved(lines, fields):
    """Over all trees in which rows of the same beginning go on with the same field.

    Args:
        lines: of each row the text of each field.
    """
    best = 0
    for field in fields if len(lines) > 1 else ():
        children = defaultdict(list)
        for line in lines:
            children[line[field]].append(line)
        texts = sorted(children)
        saved = sum(shared_beginning(a, b) for a, b in zip(texts, texts[1:], strict=False))
        for text, child in children.items():
            saved += (len(child) - 1) * len(text) + most_saved(child, fields - {field})
        best = max(best, saved)
    return best


def all_sets(columns, determines):
    return FieldSets(columns, determines, range(len(columns)), width=1 << len(columns))


@settings(max_examples=cases(20))
@given(tables(max_rows=10, max_fields=4), st.booleans())
def test_no_tree_saves_more(table, with_dependencies):
    columns = encode(table)
    if len(columns[0].codes) < 2:
        return
    cells = [[f"{c.name}: {c.texts[code]}\n" for code in c.codes] for c in columns]
    determines = find_dependencies(columns)
    if not with_dependencies:
        determines[:] = False
    expected = most_saved(list(zip(*cells, strict=True)), frozenset(range(len(columns))))
    assert all_sets(columns, determines).sets[0].saved.tolist() == [expected]


def test_all_sets_are_followed_if_there_is_room():
    columns = encode({f"{n}": list("aabb") for n in range(3)})
    independent = np.zeros((3, 3), np.bool_)
    assert sorted(all_sets(columns, independent).sets) == list(range(7))
    assert sorted(FieldSets(columns, independent, [2, 1, 0], width=0).sets) == [0, 4, 6]


def test_groups_of_a_set_agree_in_its_fields():
    columns = encode(random_table(5, max_rows=300))
    for fields, one in all_sets(columns, find_dependencies(columns)).sets.items():
        inside = [number for number in range(len(columns)) if fields >> number & 1]
        if not inside:
            assert one.num_groups == 1
            continue
        rows = list(zip(*(columns[number].codes.tolist() for number in inside), strict=True))
        groups = defaultdict(set)
        for row in one.rows.tolist():
            groups[rows[row]].add(int(one.group_of_row[row]))
        assert len(groups) == one.num_groups
        assert all(len(numbers) == 1 for numbers in groups.values())


@pytest.mark.parametrize("num_values", [3, 100_000])
def test_few_and_many_values_are_split_alike(num_values):
    """Counted in an array or sorted."""
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 4, 500)
    codes = rng.integers(0, num_values, 500).astype(np.int32)
    children = split(groups, 4, codes, num_values, with_rows=True)
    pairs = sorted(set(zip(groups.tolist(), codes.tolist(), strict=True)))
    assert list(zip(children.parents.tolist(), children.codes.tolist(), strict=True)) == pairs
    assert children.counts.tolist() == np.bincount(children.of_rows).tolist()
    assert (children.parents[children.of_rows] == groups).all()
    assert (children.codes[children.of_rows] == codes).all()

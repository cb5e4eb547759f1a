# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from os.path import commonprefix

from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.tables.jobs.prompts.set_fields import order_elements

LISTS = st.lists(st.lists(st.sampled_from("abcdef"), max_size=5), max_size=8)


@given(LISTS)
def test_every_list_keeps_its_elements(lists: list[list[str]]) -> None:
    ordered = order_elements(lists)
    assert [Counter(each) for each in ordered] == [Counter(each) for each in lists]


@given(LISTS)
def test_equal_lists_stay_equal(lists: list[list[str]]) -> None:
    ordered = order_elements([*lists, *lists])
    assert ordered[: len(lists)] == ordered[len(lists) :]


@given(LISTS)
def test_an_element_of_most_lists_comes_first_in_all_of_them(lists: list[list[str]]) -> None:
    counts = Counter(element for each in lists for element in set(each))
    most = max(counts.values(), default=0)
    if most > 1:
        begins = Counter(each[0] for each in order_elements(lists) if each)
        assert any(counts[element] == most == begins[element] for element in begins)


def test_the_element_of_most_lists_comes_first_then_that_of_most_of_these() -> None:
    lists = [["x", "a"], ["b", "x"], ["c", "b", "x"], ["d", "e"], ["e", "f"], ["g", "h"]]
    assert order_elements(lists) == [
        ["x", "a"],
        ["x", "b"],
        ["x", "b", "c"],
        ["e", "d"],
        ["e", "f"],
        ["g", "h"],
    ]


def test_elements_may_be_there_several_times() -> None:
    assert order_elements([["a", "a", "b"], ["b", "a", "a"]]) == [["a", "a", "b"]] * 2


def test_many_lists_with_common_elements_share_long_beginnings() -> None:
    lists = [[f"tag{i % 3}", f"own{i}", "all", f"group{i % 6}"] for i in range(60)]
    ordered = order_elements(lists)
    for i in range(60):
        assert ordered[i][0] == "all"
        same = [ordered[j] for j in range(60) if j % 6 == i % 6]
        assert len(commonprefix(same)) == 3

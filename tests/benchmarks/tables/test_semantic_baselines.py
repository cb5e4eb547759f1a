# SPDX-License-Identifier: Apache-2.0
"""What semantic operators are compared with."""

from __future__ import annotations

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tables.semantic.baselines import quickselect, refined, similar_pairs


@given(st.integers(0, 30), st.integers(1, 12), st.integers(0, 5), st.randoms())
def test_quickselect_finds_the_first_in_their_order(
    count: int, k: int, seed: int, source: random.Random
) -> None:
    ranks = list(range(count))
    source.shuffle(ranks)
    compared: list[tuple[int, int]] = []

    def is_before(a: int, b: int) -> bool:
        compared.append((a, b))
        return ranks[a] < ranks[b]

    found = quickselect(list(range(count)), k, is_before, seed)
    assert [ranks[row] for row in found] == list(range(min(k, count)))
    assert all(a != b for a, b in compared)


@given(
    st.lists(st.text("ab ", min_size=5, max_size=12), max_size=12),
    st.sampled_from([0.2, 0.5, 0.9, 1.0]),
)
def test_similar_pairs_are_those_of_sets(shown: list[str], similarity: float) -> None:
    pieces = [{text[i : i + 5] for i in range(len(text) - 4)} for text in shown]
    expected = {
        (i, j)
        for i, own in enumerate(pieces)
        for j in range(i)
        if len(own & pieces[j]) >= similarity * len(own | pieces[j])
    }
    # shares that are equal to the similarity are no matter
    edge = {
        (i, j)
        for i, own in enumerate(pieces)
        for j in range(i)
        if abs(len(own & pieces[j]) - similarity * len(own | pieces[j])) < 1e-4
    }
    assert similar_pairs(shown, similarity) - edge == expected - edge


def test_refined_answers_are_sums_so_far() -> None:
    found = refined(['{"x":1}', '{"x":2}', '{"x":4}'], [1, 2, 4])
    assert [json.loads(each["records"])[0] for each in found] == [0, 1, 3]
    assert [json.loads(each["records"])[1]["x"] for each in found] == [1, 2, 4]

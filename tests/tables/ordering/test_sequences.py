# SPDX-License-Identifier: Apache-2.0
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables.ordering.reference import shared_beginning, total_shared
from vllm_relay.tables.ordering.columns import RangeMinimum
from vllm_relay.tables.ordering.sequences import TokenSequences

token_lists = st.lists(
    st.lists(
        st.one_of(st.integers(0, 2), st.sampled_from([255, 256, 65536, 2**32 - 1])), max_size=6
    ),
    max_size=12,
)


def listed(sequences):
    return [sequences[index].tolist() for index in range(len(sequences))]


@given(token_lists)
def test_order_and_shared_beginnings(lists):
    sequences = TokenSequences.from_lists(lists)
    assert listed(sequences) == lists
    order = sequences.sorted_indices().tolist()
    assert [lists[index] for index in order] == sorted(lists)
    shared = [shared_beginning(a, b) for a, b in zip(lists, lists[1:], strict=False)]
    assert sequences.shared_with_previous().tolist() == ([0] + shared if lists else [])
    assert sequences.total_shared() == total_shared(lists)


@given(token_lists)
def test_taken_sequences_and_copies(lists):
    sequences = TokenSequences.from_lists(lists)
    backwards = sequences.take(range(len(lists))[::-1])
    assert listed(backwards) == lists[::-1]
    # with a gap in front of each
    begins = np.cumsum([0, *(len(each) + 1 for each in lists[::-1])])
    target = np.zeros(begins[-1], np.uint32)
    backwards.copy_to(target, begins[:-1] + 1)
    assert target.tolist() == [token for each in lists[::-1] for token in (0, *each)]
    assert listed(backwards.take(backwards.sorted_indices())) == sorted(lists)


@pytest.mark.parametrize("num_shared", [0, 15, 16, 17, 48, 200])
def test_long_common_beginnings_are_sorted_by_what_follows(num_shared):
    rng = random.Random(num_shared)
    begins = [[rng.choice([1, 255, 256, 70_000]) for _ in range(num_shared)] for _ in range(3)]
    lists = [
        rng.choice(begins)[: rng.choice([num_shared, num_shared // 2])]
        + [rng.randrange(3) for _ in range(rng.randrange(40))]
        for _ in range(3000)
    ]
    order = TokenSequences.from_lists(lists).sorted_indices().tolist()
    # of equals the first comes first
    assert order == sorted(range(len(lists)), key=lists.__getitem__)


@given(st.lists(st.text(max_size=5), max_size=8))
def test_characters_are_tokens(texts):
    assert listed(TokenSequences.from_texts(texts)) == [list(map(ord, text)) for text in texts]


def test_tokens_that_are_none_are_refused():
    with pytest.raises(ValueError, match="tokens from -1 to 3 given"):
        TokenSequences.from_lists([[-1, 3]])
    with pytest.raises(ValueError, match="ids of a vocabulary"):
        TokenSequences.from_lists([[1 << 32]])


@pytest.mark.parametrize("size", [1, 15, 16, 17, 63, 700])
def test_minima_of_ranges(size):
    rng = random.Random(size)
    values = [rng.randrange(1000) for _ in range(size)]
    ranges = [sorted((rng.randrange(size), rng.randrange(size))) for _ in range(400)]
    first, last = np.array(ranges).T
    found = RangeMinimum(np.array(values, np.int16)).query(first, last)
    assert found.tolist() == [min(values[a : b + 1]) for a, b in ranges]

# SPDX-License-Identifier: Apache-2.0
"""The sample of queries that indexes learn from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.sparse.contexts.train_queries import NUM_LAST_TOKENS, TrainQueries

KV_HEADS, GROUP, SIZE = 2, 3, 4


def _queries(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(KV_HEADS, GROUP, num_tokens, SIZE, generator=generator)


@given(
    per_key=st.floats(0, 1),
    num_tokens=st.integers(1, 40),
    crops=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4),
)
def test_what_was_cropped_leaves_no_trace(
    per_key: float, num_tokens: int, crops: list[tuple[int, int]]
) -> None:
    straight, cropped = TrainQueries(per_key), TrainQueries(per_key)
    straight.add(_queries(num_tokens), first_position=0)
    end = 0
    for begin, num_wrong in sorted(crops):
        begin = min(begin, num_tokens)
        cropped.add(_queries(num_tokens)[:, :, end:begin], first_position=end)
        cropped.add(_queries(num_wrong, seed=1), first_position=begin)
        cropped.crop(begin)
        end = begin
    cropped.add(_queries(num_tokens)[:, :, end:], first_position=end)
    wanted, found = straight.sample(), cropped.sample()
    assert (wanted is None) == (found is None)
    if wanted is not None and found is not None:
        assert torch.equal(found, wanted)


def test_tokens_that_are_seen_again_are_skipped() -> None:
    queries = TrainQueries(1.0)
    queries.add(_queries(10), first_position=0)
    queries.add(_queries(10, seed=1), first_position=5)
    sample = queries.sample()
    assert sample is not None and sample.shape == (KV_HEADS, 15, SIZE)
    assert torch.equal(sample[:, 3], _queries(10)[:, 0, 3])
    assert torch.equal(sample[:, 12], _queries(10, seed=1)[:, 0, 7])


@pytest.mark.parametrize(("per_key", "count"), [(0.0, 0), (0.25, 10), (1.0, 40)])
def test_as_many_as_asked_for(per_key: float, count: int) -> None:
    queries = TrainQueries(per_key)
    for i in range(40):
        queries.add(_queries(40)[:, :, i : i + 1], first_position=i)
    sample = queries.sample()
    assert (0 if sample is None else sample.shape[1]) == count


def test_a_copy_goes_on_by_itself() -> None:
    queries = TrainQueries(1.0)
    queries.add(_queries(4), first_position=0)
    twin = queries.copy()
    twin.add(_queries(3), first_position=4)
    assert queries.sample().shape[1] == 4
    assert twin.sample().shape[1] == 7


@given(st.lists(st.integers(1, 150), max_size=8))
def test_the_last_queries_are_those_of_the_last_tokens(chunks: list[int]) -> None:
    num_tokens = sum(chunks)
    queries, taken, end = _queries(num_tokens), TrainQueries(0.4), 0
    for chunk in chunks:
        taken.add(queries[:, :, end : end + chunk], first_position=end)
        end += chunk
    last = taken.last()
    if not num_tokens:
        assert last is None
    else:
        assert last is not None
        assert torch.equal(last, queries[:, :, -NUM_LAST_TOKENS:].transpose(1, 2))


def test_of_forgotten_tokens_there_are_no_last_queries() -> None:
    queries, taken = _queries(30), TrainQueries(0.4)
    taken.add(queries, first_position=0)
    taken.crop(30)
    assert taken.last() is not None
    taken.crop(20)
    assert taken.last() is None
    taken.add(queries[:, :, 20:25], first_position=20)
    last = taken.last()
    assert last is not None and torch.equal(last, queries[:, :, 20:25].transpose(1, 2))

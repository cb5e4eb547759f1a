# SPDX-License-Identifier: Apache-2.0
"""Attention that does not see some tokens; those hold NaN in the problems."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.attention_backends.exactness import assert_exact_enough, assert_same_bits
from tests.attention_backends.strategies import error_bounds, random_problem
from tests.attention_backends.test_ops import SEEDS, bounds_of, every_kernel, valid_arguments
from tests.support.depth import cases
from vllm_relay.attention_backends import ops, reference
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens


@every_kernel
@settings(max_examples=cases(7))
@given(seed=SEEDS)
def test_close_to_float64(kernel, dtype, seed):
    problem = random_problem(np.random.default_rng(seed), dtype=dtype, hides_tokens=True)
    result = problem.solve(ops.relay_attention, kernel=kernel)
    assert_exact_enough(problem, result, bounds_of(problem, kernel))


@every_kernel
@settings(max_examples=cases(7))
@given(seed=SEEDS)
def test_grouped_and_in_any_order_is_alone_to_the_bit(kernel, dtype, seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, dtype=dtype, hides_tokens=True)
    alone = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
    everything = problem.forest()
    some = everything.without(rng.random(len(everything.nodes)) < 0.5)
    for forest in ("auto", everything, some):
        grouped = problem.solve(ops.relay_attention, kernel=kernel, forest=forest)
        assert_same_bits(grouped, alone, problem.description)
    order = rng.permutation(problem.num_requests)
    part, tokens = problem.select(order), problem.token_indices(order)
    result = part.solve(ops.relay_attention, kernel=kernel, forest=part.forest())
    assert_same_bits(result, (alone[0][tokens], alone[1][tokens]), problem.description)


@every_kernel
@settings(max_examples=cases(4))
@given(seed=SEEDS)
def test_any_number_of_threads(kernel, dtype, seed):
    problem = random_problem(np.random.default_rng(seed), dtype=dtype, hides_tokens=True)
    results = []
    for num_threads in (3, 2, 1):
        torch.set_num_threads(num_threads)
        results.append(problem.solve(ops.relay_attention, kernel=kernel, forest=problem.forest()))
    assert_same_bits(results[1], results[0], problem.description)
    assert_same_bits(results[2], results[0], problem.description)


@pytest.mark.parametrize("seed", range(3))
def test_segments_with_holes_at_their_edges(seed):
    """Longer than a segment, with hidden tokens on both sides of its end."""
    rng = np.random.default_rng(seed)
    problem = random_problem(
        rng, max_tokens=8192, max_requests=4, dtype=torch.float32, use_features=False,
        heads=(2, 1), head_size=32, block_size=32,
    )  # fmt: skip
    lens = (problem.seq_lens - problem.query_lens).tolist()
    ranges = {
        request: tuple(
            (begin, min(end, length))
            for begin, end in ((5, 9), (2000, 2048), (2049, 2100), (4090, 4100))
            if begin < length
        )
        for request, length in enumerate(lens)
    }
    hidden = HiddenTokens({request: each for request, each in ranges.items() if each})
    expected = problem.solve(reference.relay_attention, hidden=hidden)
    output, lse = problem.solve(ops.relay_attention, hidden=hidden)
    bound, lse_bound = error_bounds(problem)
    assert ((output - expected[0]).abs() <= bound).all()
    assert ((lse - expected[1]).abs() <= lse_bound)[expected[1] > -torch.inf].all()


def test_what_is_hidden_is_counted():
    hidden = HiddenTokens({1: ((2, 5), (8, 12))})
    assert list(hidden.visible_pieces(1, 0, 20)) == [(0, 2), (5, 8), (12, 20)]
    assert list(hidden.visible_pieces(1, 3, 10)) == [(5, 8)]
    assert list(hidden.visible_pieces(1, 2, 5)) == []
    assert list(hidden.visible_pieces(0, 3, 10)) == [(3, 10)]
    assert hidden.count(1) == 7
    assert hidden.count(1, 4, 9) == 2
    assert hidden.count(0) == 0


def test_blocks_are_equal_where_the_same_is_seen():
    table = np.array([[3, 4, 5], [3, 4, 5], [3, 4, 5], [3, 4, 5]], np.int32)
    hidden = HiddenTokens({0: ((1, 2), (40, 64)), 1: ((40, 70),), 3: ((40, 64),)})
    ids = hidden.visible_block_ids(table, 32)
    assert ids[0, 0] != ids[1, 0] == ids[2, 0] == ids[3, 0] == 3
    assert ids[0, 1] == ids[1, 1] == ids[3, 1] != ids[2, 1] == 4
    assert ids[1, 2] != ids[0, 2] == ids[2, 2] == ids[3, 2] == 5
    assert len({*ids.ravel().tolist()}) == 6


@pytest.mark.parametrize(
    ("hidden", "keywords", "message"),
    [
        ({9: ((0, 1),)}, {}, "request 9 is not one of"),
        ({0: ((0, 10**6),)}, {}, "before its query tokens"),
        ({0: ((2, 3), (1, 2))}, {}, "ascending"),
        ({0: ((2, 2),)}, {}, "ascending"),
        ({}, {"sliding_window": 3}, "sliding_window or alibi_slopes"),
    ],
)
def test_errors_name_what_is_hidden(hidden, keywords, message):
    with pytest.raises(ValueError, match=message):
        ops.relay_attention(**{**valid_arguments(), **keywords}, hidden=HiddenTokens(hidden))

# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.naive_forest import groups_of, naive_groups
from tests.support.depth import cases
from vllm_relay.attention_backends.forest import Forest, build_forest

BLOCK_SIZE = 32


def check(block_table, shareable_tokens):
    block_table = np.asarray(block_table, np.int32)
    shareable_tokens = np.asarray(shareable_tokens)
    forest = build_forest(block_table, shareable_tokens, BLOCK_SIZE)
    forest.validate()
    assert forest.order.dtype == forest.nodes.dtype == np.int32
    groups = naive_groups(block_table, shareable_tokens, BLOCK_SIZE)
    assert len(groups) == len(forest.nodes)
    assert groups_of(forest) == groups

    covered = np.zeros(len(block_table), int)
    levels = np.zeros(len(block_table), int)
    for members, _, end in groups:
        for member in members:
            covered[member] = max(covered[member], end)
            levels[member] += 1
    np.testing.assert_array_equal(forest.shared_tokens, covered)
    assert forest.depth == levels.max(initial=0)

    for first, last, begin, end, request in forest.nodes.tolist():
        columns = slice(begin // BLOCK_SIZE, end // BLOCK_SIZE)
        member_ids = block_table[forest.order[first:last], columns]
        read_ids = np.broadcast_to(block_table[request, columns], member_ids.shape)
        needed = member_ids != 0
        np.testing.assert_array_equal(member_ids[needed], read_ids[needed])
    return forest


def table_of_paths(paths, rng, tail_blocks=2):
    """A block table of requests given as paths of (node, length in blocks), with unique tails."""
    lengths = {node: length for path in paths for node, length in path}
    ids = iter(rng.permutation(np.arange(1, 100_000)))
    blocks = {node: [next(ids) for _ in range(length)] for node, length in lengths.items()}
    rows = [
        [block for node, _ in path for block in blocks[node]] + [next(ids) for _ in range(tail)]
        for path, tail in zip(paths, rng.integers(0, tail_blocks + 1, len(paths)), strict=True)
    ]
    width = max(map(len, rows))
    table = np.array([row + [next(ids)] * (width - len(row)) for row in rows], np.int32)
    return table, np.array([len(row) * BLOCK_SIZE for row in rows])


def paths_of_levels(counts, lengths):
    """Complete trees: `counts[i]` nodes on level i, spread evenly over the level above."""
    num_leaves = counts[-1]
    return [
        [
            ((level, leaf * count // num_leaves), length)
            for level, (count, length) in enumerate(zip(counts, lengths, strict=True))
        ]
        for leaf in range(num_leaves)
    ]


@st.composite
def small_tables(draw):
    """Rows over few ids, so that prefixes, duplicates and equal columns abound; many null heads."""
    num_requests = draw(st.integers(0, 9))
    width = draw(st.integers(0, 7))
    num_ids = draw(st.integers(1, 3))
    ids = st.integers(draw(st.sampled_from([0, 1])), num_ids)
    table = np.array(
        [draw(st.lists(ids, min_size=width, max_size=width)) for _ in range(num_requests)], np.int32
    ).reshape(num_requests, width)
    if draw(st.booleans()):
        for row in table:
            row[: draw(st.integers(0, width))] = 0
    tokens = st.integers(0, (width + 1) * BLOCK_SIZE)
    shareable = draw(st.lists(tokens, min_size=num_requests, max_size=num_requests))
    return table, np.array(shareable, np.int64)


@st.composite
def trees(draw):
    """Forests of unique blocks up to depth 6, in any order, some rows with their heads freed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_roots, depth = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    lengths = {}
    paths = []
    for _ in range(draw(st.integers(1, 16))):
        path = []
        node = (int(rng.integers(num_roots)),)
        for _ in range(rng.integers(depth + 1)):
            path.append((node, lengths.setdefault(node, int(rng.integers(1, 4)))))
            node = (*node, int(rng.integers(3)))
        paths.append(path)
    table, shareable = table_of_paths(paths, rng)
    if draw(st.booleans()):
        for row in table:
            row[: rng.integers(len(row) + 1)] = 0
    if draw(st.booleans()):
        shareable -= rng.integers(0, 2 * BLOCK_SIZE, len(shareable))
    return table, np.maximum(shareable, 0)


@settings(max_examples=cases(250))
@given(small_tables())
def test_equals_naive_groups_of_small_tables(case):
    check(*case)


@settings(max_examples=cases(125))
@given(trees())
def test_equals_naive_groups_of_trees(case):
    check(*case)


@pytest.mark.parametrize(
    ("counts", "lengths", "num_nodes"),
    [
        ([1, 4], [4, 2], 1),  # one system prompt
        ([4, 16], [4, 8], 4),
        ([1, 4, 16], [4, 8, 2], 5),
        ([2, 14, 28], [3, 1, 2], 16),
        ([1, 2, 4, 8, 16, 32], [5, 1, 2, 1, 3, 1], 31),
        ([1, 3, 6, 12, 24, 48, 96], [1, 1, 1, 1, 1, 1, 1], 94),
    ],
)
def test_complete_trees(counts, lengths, num_nodes):
    rng = np.random.default_rng(0)
    table, shareable = table_of_paths(paths_of_levels(counts, lengths), rng)
    shuffled = rng.permutation(len(table))
    forest = check(table[shuffled], shareable[shuffled])
    assert len(forest.nodes) == num_nodes
    assert forest.depth == len(counts) - 1


@pytest.mark.parametrize(
    "tails", [[7, 7], [9, 10, 11, 4], [129, 2, 3, 4, 5, 6, 7, 128], [1, 128, 256]]
)
def test_ragged_tails_of_one_prefix(tails):
    paths = [[("prefix", 16), (tail, tails[tail])] for tail in range(len(tails))]
    forest = check(*table_of_paths(paths, np.random.default_rng(1)))
    assert groups_of(forest) == {(frozenset(range(len(tails))), 0, 16 * BLOCK_SIZE)}


def test_three_level_ragged_tree():
    paths = [
        [("a", 2)],
        [("a", 2), ("b", 1)],
        [("a", 2), ("b", 1), ("c", 5)],
        [("a", 2), ("b", 1), ("c", 5)],
        [("a", 2), ("d", 3), ("e", 1)],
        [("a", 2), ("d", 3)],
        [("f", 1)],
    ]
    forest = check(*table_of_paths(paths, np.random.default_rng(2), tail_blocks=0))
    tokens = BLOCK_SIZE
    assert groups_of(forest) == {
        (frozenset([0, 1, 2, 3, 4, 5]), 0, 2 * tokens),
        (frozenset([1, 2, 3]), 2 * tokens, 3 * tokens),
        (frozenset([2, 3]), 3 * tokens, 8 * tokens),
        (frozenset([4, 5]), 2 * tokens, 5 * tokens),
    }
    assert forest.depth == 3


def test_shared_blocks_across_roots_and_columns():
    forest = check([[0, 1, 5], [0, 2, 6], [3, 4, 7], [3, 4, 8]], [96] * 4)
    assert groups_of(forest) == {(frozenset([2, 3]), 0, 64)}


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("num_requests", [0, 1])
def test_too_few_requests(num_requests, width):
    forest = check(np.ones((num_requests, width), np.int32), [96] * num_requests)
    assert len(forest.nodes) == 0 and forest.depth == 0


def test_identical_rows_share_all_their_whole_blocks():
    forest = check([[4, 9, 2]] * 3, [95, 95, 95])
    assert groups_of(forest) == {(frozenset(range(3)), 0, 64)}


def test_shareable_limits_form_a_chain():
    forest = check([[4, 9, 2]] * 4, [96, 31, 32, 64])
    assert groups_of(forest) == {
        (frozenset([0, 2, 3]), 0, 32),
        (frozenset([0, 3]), 32, 64),
    }


def test_windowed_rows_join_the_row_that_still_has_their_blocks():
    forest = check([[0, 0, 3, 7], [0, 2, 3, 8], [1, 2, 3, 9]], [128] * 3)
    assert groups_of(forest) == {(frozenset(range(3)), 0, 96)}
    assert forest.nodes[0, 4] == 2


def test_windowed_rows_share_among_themselves():
    forest = check([[0, 0, 3, 7], [5, 6, 4, 8], [0, 0, 3, 9]], [128] * 3)
    assert groups_of(forest) == {(frozenset([0, 2]), 0, 96)}


def test_null_in_the_middle_ends_sharing():
    forest = check([[1, 0, 3], [1, 0, 3]], [96, 96])
    assert groups_of(forest) == {(frozenset([0, 1]), 0, 32)}


def test_rows_beyond_the_shareable_tokens_may_hold_anything():
    table = np.array([[5, 6, -1], [5, 6, -(2**31)], [5, 0, 2**31 - 1]], np.int32)
    forest = build_forest(table, np.array([64, 64, 32]), BLOCK_SIZE)
    assert groups_of(forest) == {(frozenset([0, 1]), 32, 64), (frozenset([0, 1, 2]), 0, 32)}


def test_input_is_not_modified_and_may_be_strided():
    wide = np.array([[0, 8, 3, 8, 5], [2, 8, 3, 8, 6], [2, 8, 4, 8, 6]], np.int32)
    before = wide.copy()
    forest = build_forest(wide[:, ::2], np.full(3, 96), BLOCK_SIZE)
    assert groups_of(forest) == {(frozenset([0, 1]), 32, 64), (frozenset([0, 1, 2]), 0, 32)}
    np.testing.assert_array_equal(wide, before)


def test_wrong_shapes():
    with pytest.raises(ValueError, match="shareable_tokens"):
        build_forest(np.zeros((2, 3), np.int32), np.zeros(3, np.int64), BLOCK_SIZE)
    with pytest.raises(ValueError, match="block_table"):
        build_forest(np.zeros(2, np.int32), np.zeros(2, np.int64), BLOCK_SIZE)


@settings(max_examples=cases(75))
@given(trees(), st.integers(0, 2**32 - 1))
def test_without_hands_ranges_down(case, seed):
    forest = build_forest(*case, BLOCK_SIZE)
    remove = np.random.default_rng(seed).random(len(forest.nodes)) < 0.5
    rest = forest.without(remove)
    rest.validate()
    kept = forest.nodes[~remove]
    np.testing.assert_array_equal(rest.order, forest.order)
    np.testing.assert_array_equal(rest.nodes[:, [0, 1, 3, 4]], kept[:, [0, 1, 3, 4]])
    expected = np.zeros(len(forest.order), int)
    for first, last, _, end, _ in kept.tolist():
        expected[forest.order[first:last]] = end
    np.testing.assert_array_equal(rest.shared_tokens, expected)
    assert rest.parents.tolist() == Forest(rest.order, rest.nodes).parents.tolist()


@settings(max_examples=cases(75))
@given(trees(), st.sampled_from([1, 2, 3, 100]))
def test_ranges_in_multiples(case, blocks):
    forest, unit = build_forest(*case, BLOCK_SIZE), blocks * BLOCK_SIZE
    rounded = forest.in_multiples(unit)
    rounded.validate()
    np.testing.assert_array_equal(rounded.shared_tokens, forest.shared_tokens // unit * unit)
    assert rounded.saved_tokens <= forest.saved_tokens


@settings(max_examples=cases(75))
@given(trees(), st.integers(0, 2**32 - 1))
def test_nodes_know_what_they_are_in(case, seed):
    forest = build_forest(*case, BLOCK_SIZE)
    weights = np.random.default_rng(seed).integers(0, 100, len(forest.nodes))
    runs = forest.nodes[:, :2].tolist()
    around = [
        [other for other in range(node) if runs[other][1] > first]
        for node, (first, _) in enumerate(runs)
    ]
    assert forest.levels.tolist() == [len(each) for each in around]
    assert forest.parents.tolist() == [max(each, default=-1) for each in around]
    assert forest.sum_above(weights).tolist() == [sum(weights[each].tolist()) for each in around]
    of_children = [int(weights[forest.parents == node].sum()) for node in range(len(forest.nodes))]
    assert forest.sum_of_children(weights).tolist() == of_children
    members = forest.nodes[:, 1] - forest.nodes[:, 0]
    assert forest.num_memberships == int(members.sum())
    assert forest.depth == max((len(each) + 1 for each in around), default=0)


def test_without_nothing_and_without_everything():
    forest = build_forest(np.array([[1, 2], [1, 3]], np.int32), np.full(2, 64), BLOCK_SIZE)
    assert forest.without(np.zeros(1, bool)) is forest
    assert forest.without(np.ones(1, bool)).nodes.shape == (0, 5)


@pytest.mark.parametrize(
    ("order", "nodes", "message"),
    [
        ([0, 0, 1], [], "permutation"),
        ([1, 2, 3], [], "permutation"),
        ([0, 1, 2], [[0, 2, 0, 32]], "shape"),
        ([0, 1, 2], [[0, 4, 0, 32, 0]], "positions 0..4"),
        ([0, 1, 2], [[1, 1, 0, 32, 1]], "positions 1..1"),
        ([0, 1, 2], [[0, 2, 32, 32, 0]], "begin < end"),
        ([0, 1, 2], [[0, 2, 0, 32, 2]], "request 2"),
        ([0, 1, 2], [[0, 2, 32, 64, 0]], "begins at token 32, expected 0"),
        ([0, 1, 2], [[0, 3, 0, 32, 0], [0, 2, 64, 96, 0]], "expected 32, the end of node 0"),
        ([0, 1, 2], [[0, 2, 0, 32, 0], [1, 3, 0, 32, 1]], "overlaps node 0"),
        ([0, 1, 2], [[0, 2, 0, 32, 0], [0, 3, 0, 32, 0]], "parents before children"),
        ([0, 1, 2], [[1, 3, 0, 32, 1], [0, 1, 0, 32, 0]], "before node 0"),
    ],
)
def test_validate_names_the_inconsistency(order, nodes, message):
    nodes = np.array(nodes, np.int32) if nodes else np.empty((0, 5), np.int32)
    with pytest.raises(ValueError, match=message):
        Forest(np.array(order, np.int32), nodes).validate()


def test_validate_accepts_several_roots_and_equal_runs():
    nodes = [[0, 3, 0, 32, 0], [0, 3, 32, 64, 2], [1, 2, 64, 96, 1], [3, 5, 0, 32, 4]]
    forest = Forest(np.arange(6, dtype=np.int32), np.array(nodes, np.int32))
    forest.validate()
    assert forest.depth == 3

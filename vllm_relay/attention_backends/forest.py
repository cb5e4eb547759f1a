# SPDX-License-Identifier: Apache-2.0
"""Which requests of a batch share which KV blocks.

Equal block ids hold equal keys and values, so two requests share exactly the blocks with which
both of their block tables start. All such groups, at every depth, are the nodes of a forest: the
longest-common-prefix intervals of the sorted block table.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_relay.attention_backends.ragged import starts

FIRST, LAST, BEGIN_TOKENS, END_TOKENS, REQUEST = range(5)
NULL_BLOCK = 0
"""Stands for no block; nobody shares it."""


@dataclass(frozen=True, eq=False)
class Forest:
    """Groups of requests which read the same range of tokens from the same KV blocks.

    A child's range begins where its parent's ends, and roots begin at token 0: a request is
    covered without gaps up to the end of the deepest node it is a member of.
    """

    order: np.ndarray
    """int32 [num_requests]: a permutation of the requests; a node is a contiguous run of it."""
    nodes: np.ndarray
    """int32 [num_nodes, 5], parents before children. The columns are first and last (exclusive) of
    the run, begin and end (exclusive) of the token range, and the request whose row of the block
    table names the blocks of this range."""

    @staticmethod
    def none(num_requests: int) -> "Forest":
        """The forest of requests which share nothing."""
        return Forest(np.arange(num_requests, dtype=np.int32), np.empty((0, 5), np.int32))

    @cached_property
    def levels(self) -> np.ndarray:
        """int [num_nodes]: in how many others each node is."""
        ended = np.bincount(self.nodes[:, LAST], minlength=len(self.order) + 1).cumsum()
        return np.arange(len(self.nodes)) - ended[self.nodes[:, FIRST]]

    @cached_property
    def parents(self) -> np.ndarray:
        """int [num_nodes]: the index of each node's parent, or -1."""
        return _last_before(self.nodes[:, END_TOKENS], self.nodes[:, BEGIN_TOKENS])

    @cached_property
    def depth(self) -> int:
        """Levels of nodes, 0 without nodes."""
        return int(self.levels.max(initial=-1)) + 1

    @cached_property
    def range_tokens(self) -> np.ndarray:
        """int64 [num_nodes]: how many tokens each node reads."""
        return (self.nodes[:, END_TOKENS] - self.nodes[:, BEGIN_TOKENS]).astype(np.int64)

    @cached_property
    def shared_tokens(self) -> np.ndarray:
        """int32 [num_requests]: how many leading tokens of each request nodes cover."""
        shared_tokens = np.empty(len(self.order), np.int32)
        shared_tokens[self.order] = self.sum_over_nodes(self.range_tokens)
        return shared_tokens

    @property
    def num_memberships(self) -> int:
        """In how many nodes each request is, summed up."""
        return int((self.nodes[:, LAST] - self.nodes[:, FIRST]).sum())

    @property
    def saved_tokens(self) -> int:
        """How many tokens fewer are read than if each request read its own."""
        return int(self.shared_tokens.sum(dtype=np.int64) - self.range_tokens.sum())

    def without(self, remove: np.ndarray) -> "Forest":
        """The forest without some of its nodes. The children of a removed node take its range over;
        its other members read that range alone.

        Args:
            remove: bool [num_nodes].
        """
        if not remove.any():
            return self
        forest = Forest(self.order, self.nodes[~remove])
        parents = _last_before(forest.levels + 1, forest.levels)
        vars(forest)["parents"] = parents  # which the cached property would find by ranges
        ends = np.append(forest.nodes[:, END_TOKENS], 0)
        forest.nodes[:, BEGIN_TOKENS] = ends[parents]
        return forest

    def in_multiples(self, tokens: int) -> "Forest":
        """The forest whose ranges end at multiples of `tokens`, rounded down. What is cut off of a
        range is read by the nodes below it, and by its other members alone."""
        nodes = self.nodes.copy()
        ranges = nodes[:, BEGIN_TOKENS : END_TOKENS + 1]
        ranges -= ranges % tokens
        return Forest(self.order, nodes[ranges[:, 0] < ranges[:, 1]])

    def validate(self) -> None:
        """Checks a forest which was not made by `build_forest`.

        Raises:
            ValueError: what the first inconsistency is, and what was expected.
        """
        order, nodes = self.order, self.nodes
        num_requests = len(order)
        if order.ndim != 1 or not np.array_equal(np.sort(order), np.arange(num_requests)):
            raise ValueError(
                f"order must be a permutation of 0..{num_requests - 1} (one entry per request), "
                f"got {order.tolist()}"
            )
        if nodes.ndim != 2 or nodes.shape[1] != 5:
            raise ValueError(f"nodes must have shape [num_nodes, 5], got {list(nodes.shape)}")
        ancestors = [(-1, 0, num_requests, 0)]  # index, first, last, end_tokens
        for index, (first, last, begin, end, request) in enumerate(nodes.tolist()):
            if not 0 <= first < last <= num_requests:
                raise ValueError(
                    f"node {index} covers positions {first}..{last} of order, expected "
                    f"0 <= first < last <= {num_requests}"
                )
            if begin >= end:
                raise ValueError(f"node {index} covers tokens {begin}..{end}, expected begin < end")
            if request not in order[first:last]:
                raise ValueError(
                    f"node {index} reads the blocks of request {request}, expected one of its "
                    f"members {order[first:last].tolist()}"
                )
            if index and first < nodes[index - 1, FIRST]:
                raise ValueError(
                    f"node {index} starts at position {first}, before node {index - 1} at "
                    f"{nodes[index - 1, FIRST]}: sort the nodes by first, parents before children"
                )
            while ancestors[-1][2] <= first:
                ancestors.pop()
            parent, parent_first, parent_last, parent_end = ancestors[-1]
            if last > parent_last:
                nested = first == parent_first
                raise ValueError(
                    f"node {index} at positions {first}..{last} "
                    + ("contains" if nested else "overlaps")
                    + f" node {parent} at {parent_first}..{parent_last}: "
                    + ("put parents before children" if nested else "runs must be nested")
                )
            if begin != parent_end:
                expected = f"the end of node {parent}" if parent >= 0 else "the beginning of a root"
                raise ValueError(
                    f"node {index} begins at token {begin}, expected {parent_end}, {expected}"
                )
            ancestors.append((index, first, last, end))

    def sum_above(self, weights: np.ndarray) -> np.ndarray:
        """[num_nodes]: for each node, the sum of the integers `weights` of those it is in."""
        # of the nodes before it, without those that end before it
        left = np.bincount(self.nodes[:, LAST], weights, minlength=len(self.order) + 1)
        ended = left.cumsum()[self.nodes[:, FIRST]].astype(np.int64)
        return weights.cumsum() - weights - ended

    def sum_of_children(self, weights: np.ndarray) -> np.ndarray:
        """float64 [num_nodes]: for each node, the sum of `weights` of those right below it."""
        return np.bincount(self.parents + 1, weights, len(weights) + 1)[1:]

    def sum_over_members(self, values: np.ndarray) -> np.ndarray:
        """[num_nodes]: for each node, the sum of `values`, one of each request, of its members."""
        before = starts(values[self.order])
        return before[self.nodes[:, LAST]] - before[self.nodes[:, FIRST]]

    def sum_over_nodes(self, weights: np.ndarray) -> np.ndarray:
        """[num_requests]: for each position in `order`, the sum of `weights` of its nodes."""
        size = len(self.order) + 1
        entered = np.bincount(self.nodes[:, FIRST], weights, minlength=size)
        left = np.bincount(self.nodes[:, LAST], weights, minlength=size)
        return np.cumsum(entered - left)[:-1]


def build_forest(
    block_table: np.ndarray,
    shareable_tokens: np.ndarray,
    block_size: int,
) -> Forest:
    """Finds every maximal group of two or more requests whose block tables start alike.

    A row may start with null blocks, as sliding-window models leave them where blocks were freed.
    It is then taken to continue to the left like a row which holds the same block at the column
    where its nulls end. The `request` of a node is the member with the fewest such nulls, so that
    every block which some member has not freed is named.

    Args:
        block_table: int32 [num_requests, max_blocks], block ids >= 0; columns behind the shareable
            ones may hold anything.
        shareable_tokens: int [num_requests], how many leading tokens a request may share; its
            whole blocks among these are looked at.
        block_size: tokens per block.

    Returns:
        The forest, with token ranges in multiples of `block_size`.
    """
    if block_table.ndim != 2 or shareable_tokens.shape != block_table.shape[:1]:
        raise ValueError(
            "block_table must be [num_requests, max_blocks] and shareable_tokens [num_requests], "
            f"got {list(block_table.shape)} and {list(shareable_tokens.shape)}"
        )
    num_requests, max_blocks = block_table.shape
    limits = np.clip(shareable_tokens // block_size, 0, max_blocks).astype(np.int32)
    width = int(limits.max(initial=0))
    first_ids = np.sort(block_table[limits > 0, 0]) if width else np.empty(0, np.int32)
    if NULL_BLOCK not in first_ids and np.all(first_ids[1:] != first_ids[:-1]):
        return Forest.none(num_requests)

    null_heads, limits = _null_heads(block_table[:, :width] == NULL_BLOCK, limits)
    ids = block_table[:, :width]
    if null_heads[limits > 0].any():
        ids = _with_filled_heads(ids, null_heads, limits)
    order, common_blocks = _sort_rows(ids, limits)
    nodes = _runs(common_blocks.tolist())
    nodes = nodes[np.lexsort((-nodes[:, LAST], nodes[:, FIRST]))]
    nodes[:, BEGIN_TOKENS : END_TOKENS + 1] *= block_size
    nodes[:, REQUEST] = order[_argmin_of_runs(null_heads[order], nodes[:, [FIRST, LAST]])]
    return Forest(order.astype(np.int32), nodes)


def _sort_rows(ids: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order of rows in which those with a common beginning are neighbours.

    Args:
        ids: int32 [rows, columns].
        ends: int [rows]: what stands in a row from there on does not matter; up to there no
            `NULL_BLOCK` does.

    Returns:
        order: [rows]: as little-endian bytes ascend, a row before those that go on behind its end.
        common: [rows - 1]: with how many ids each but the last and the one behind it begin.
    """
    num_rows, width = len(ids), int(ends.max(initial=0))
    rows = np.arange(num_rows)
    marked = np.empty((num_rows, width + 1), np.int32)
    marked[:, :width] = ids[:, :width]
    marked[rows, ends] = NULL_BLOCK
    marked[:, width] = rows  # differs at the latest
    order = np.argsort(marked.view(f"V{marked.itemsize * marked.shape[1]}").ravel(), kind="stable")
    marked, ends = marked[order], ends[order]
    common = (marked[1:] != marked[:-1]).argmax(axis=1)
    return order, np.minimum(common, np.minimum(ends[1:], ends[:-1]))


def _runs(common: list[int]) -> np.ndarray:
    """int32 [runs, 5]: the maximal runs of neighbours with a common beginning: first, last, what of
    it a longer run has in common too, its length, and 0.

    Args:
        common: length of the common beginning of rows i and i + 1.
    """
    runs: list[int] = []
    firsts, lengths = [0], [0]  # of the open runs; lengths ascend
    for position, length in enumerate([*common, 0]):
        first = position
        while length < lengths[-1]:
            first, end = firsts.pop(), lengths.pop()
            runs += first, position + 1, max(lengths[-1], length), end, 0
        if length > lengths[-1]:
            firsts.append(first)
            lengths.append(length)
    return np.array(runs, np.int32).reshape(-1, 5)


def _last_before(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """int64 [values]: the last place before each where `values` is what is wanted, -1 for 0. The
    natural numbers `values` are above 0."""
    size, wanted = len(values), wanted.astype(np.int64) * len(values)
    places = np.empty(size + 1, np.int64)
    numbers = np.arange(size)
    places[:size], places[size] = values * np.int64(size) + numbers, -1
    places[:size].sort()
    return places[places[:size].searchsorted(wanted + numbers) - 1] - wanted


def _null_heads(is_null: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many null blocks each row starts with, and its limit cut at the next null block.

    A row with nothing but nulls below its limit gets limit 0.
    """
    null_heads = np.zeros_like(limits)
    windowed = np.flatnonzero(is_null[:, 0])
    if len(windowed):
        heads = is_null[windowed].argmin(axis=1)
        null_heads[windowed] = heads
        is_null[windowed] &= np.arange(is_null.shape[1]) >= heads[:, None]
    next_null = is_null.argmax(axis=1)
    has_null = is_null[np.arange(len(is_null)), next_null]
    limits = np.where(has_null & (next_null < limits), next_null, limits).astype(np.int32)
    return null_heads, np.where(null_heads < limits, limits, np.int32(0))


def _with_filled_heads(ids: np.ndarray, null_heads: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """A copy in which the leading nulls of each row are the blocks of a row that holds the same
    block where they end: the one with the fewest nulls itself. Without another one, ids of no block
    are used."""
    ids = ids.copy()
    donors = np.argsort(null_heads, kind="stable")
    donors = donors[limits[donors] > 0]
    windowed = donors[null_heads[donors] > 0]
    columns = null_heads[windowed]
    fits = ids.take(columns, axis=1)[donors] == ids[windowed, columns]  # [donors, windowed]
    fits &= (null_heads[donors, None] <= columns) & (limits[donors, None] > columns)
    best_donors = donors[fits.argmax(axis=0)]  # a row fits itself, so there always is one
    for row, donor, head in zip(
        windowed.tolist(), best_donors.tolist(), columns.tolist(), strict=True
    ):
        ids[row, :head] = -1 - row if donor == row else ids[donor, :head]
    return ids


def _argmin_of_runs(values: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """[num_runs]: where the smallest of the integers `values` is within each run [first, last)."""
    size = len(values)
    keys = np.append(values.astype(np.int64) * size + np.arange(size), 0)
    return np.minimum.reduceat(keys, runs.ravel())[::2] % size

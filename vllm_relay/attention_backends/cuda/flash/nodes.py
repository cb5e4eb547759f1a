# SPDX-License-Identifier: Apache-2.0
"""The nodes of a forest as a batch for vLLM's kernels.

An *entry* of that batch is a piece of a node: its queries are the query tokens of all requests
below the node, its keys are the node's own blocks. What no node covers, the *tail* of a request,
stays with the ordinary call. A query token has one state of each of its pieces and one of its tail.

Pure: numpy in, numpy out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_relay.attention_backends.cost import KernelCost
from vllm_relay.attention_backends.forest import (
    BEGIN_TOKENS,
    END_TOKENS,
    FIRST,
    LAST,
    REQUEST,
    Forest,
)
from vllm_relay.attention_backends.ragged import repeated, starts

TABLE_ROW, FIRST_BLOCK, TOKENS, ENTRY_FIELDS = 0, 1, 2, 3
"""Of an entry: the block table row that names its blocks, where they begin there, tokens."""

MAX_ENTRIES, MAX_STATES = 64, 8
MIN_PIECE_TOKENS, MAX_WAVES = 256, 4
"""Nodes are cut, so that few long ones keep a GPU busy: it then computes all at once, or nearly."""
NODE_SPLITS = 1
"""FlashAttention's: pieces are what is split. Its splits would take memory for each of their rows,
and a launch that adds them up."""
FLASH_ROWS = 128
"""Of FlashAttention's tiles."""
STATE_TOKENS = 0.02
"""What a row's state costs a whole H100, its query's copy included, in the time in which one
multiprocessor computes so many tokens of a tile: 1 KB at 2.4 TB/s, and 64 KFLOP at 3.4 TFLOP/s."""

FLASH_COST = KernelCost(128, stream_ns=0.15, tile_ns=0.11, row_ns=0.0, start_tokens=128)
"""By counting bytes and FLOPs of an H100, whole: nothing was measured. A state is written, read and
its query is copied, which is most of what starting a range costs."""

CALL_BYTES = 128 << 20
"""What a layer has to save for a second call to pay: the call, the copy of queries and the merge
take 18 us of an H100, in which FlashAttention reads so much, most of it from the L2 cache."""


class NodeSetup(NamedTuple):
    """What nodes are cut for: layers of one shape on one GPU."""

    block_size: int
    """Tokens per block; nodes begin and end at multiples of it."""
    group_size: int
    """Query heads per kv head."""
    num_kv_heads: int
    num_sms: int
    """Multiprocessors of the GPU."""


@dataclass(frozen=True)
class NodeLimits:
    """What the buffers of a step are made for."""

    max_requests: int
    max_tokens: int
    """Query tokens of a step."""
    max_sharing_tokens: int
    """Of these, those of requests that share something."""
    max_entries: int = MAX_ENTRIES
    max_states: int = MAX_STATES
    """Pieces that a query token reads, its tail not counted."""

    @property
    def max_rows(self) -> int:
        """Query tokens of all entries."""
        return self.max_sharing_tokens * self.max_states


class NodeBatch(NamedTuple):
    """All int32, in the order in which buffers hold them."""

    entries: np.ndarray
    """[entries, ENTRY_FIELDS]"""
    row_starts: np.ndarray
    """[entries + 1]: where the query tokens of an entry begin in `rows`."""
    block_starts: np.ndarray
    """[entries + 1]: how many blocks the entries before have."""
    rows: np.ndarray
    """Query tokens, entry by entry."""
    shared_tokens: np.ndarray
    """[requests]: how many leading tokens the nodes of a request cover."""
    states: np.ndarray
    """[query tokens, max_states]: where in `rows` each query token is, -1 for nowhere."""


def balanced_piece_tokens(forest: Forest, query_lens: np.ndarray, setup: NodeSetup) -> int:
    """Into how many tokens nodes are cut for all multiprocessors to be done soon.

    Args:
        query_lens: int [requests].
    """
    num_kv_heads, num_sms = setup.num_kv_heads, setup.num_sms
    rows = forest.sum_over_members(query_lens) * setup.group_size
    tiles = -(-rows // FLASH_ROWS) * num_kv_heads
    tokens = forest.range_tokens
    load = int((tiles * tokens).sum())
    wanted = np.maximum(load // (num_sms * np.arange(1, 1 + MAX_WAVES)), MIN_PIECE_TOKENS)
    if wanted[0] == MIN_PIECE_TOKENS:
        return MIN_PIECE_TOKENS
    pieces = np.minimum(np.maximum(tokens // wanted[:, None], 1), MAX_STATES)
    lengths = -(-tokens // pieces)
    longest_first = (-lengths).argsort(axis=1)
    each = np.arange(MAX_WAVES)[:, None]
    # in the time of a tile's token: of waves of tiles, the longest first, and of states
    begun_waves = -(-(tiles * pieces)[each, longest_first].cumsum(axis=1) // num_sms)
    waves = begun_waves.copy()
    waves[:, 1:] -= begun_waves[:, :-1]
    costs = (lengths[each, longest_first] * waves).sum(axis=1)
    costs = costs + STATE_TOKENS * (pieces @ (rows * num_kv_heads))
    return int(wanted[costs.argmin()])


def node_batch(
    forest: Forest,
    query_start_loc: np.ndarray,
    setup: NodeSetup,
    limits: NodeLimits,
    piece_tokens: int | None = None,
) -> tuple[Forest, NodeBatch]:
    """The batch for a forest, as far as the limits allow.

    Nodes that do not fit are left out, those first that save least; their members read these
    ranges with their tails, or with the nodes below.

    Args:
        forest: who shares what.
        query_start_loc: int32 [requests + 1].
        piece_tokens: nodes are cut into about so many tokens, whole blocks, while there are entries
            and states left; None: `balanced_piece_tokens`.

    Returns:
        The forest that is read, and its batch.

    Raises:
        ValueError: more requests or query tokens than the limits allow.
    """
    num_requests, num_tokens = len(forest.order), int(query_start_loc[-1])
    query_lens, block_size = query_start_loc[1:] - query_start_loc[:-1], setup.block_size
    if piece_tokens is None:
        piece_tokens = balanced_piece_tokens(forest, query_lens, setup)
    forest = _that_fit(forest, query_lens, limits)
    num_sharing = int(query_lens[forest.shared_tokens > 0].sum())
    given = (num_requests, num_tokens, num_sharing)
    expected = (limits.max_requests, limits.max_tokens, limits.max_sharing_tokens)
    if any(one > most for one, most in zip(given, expected, strict=True)):
        raise ValueError(
            f"requests, query tokens and those that share: {given} in a step, expected at most "
            f"{expected}"
        )
    nodes = forest.nodes.astype(np.int64)
    tokens = forest.range_tokens
    cuts = _cuts(forest, limits, piece_tokens)
    length = -(-tokens // (cuts * block_size)) * block_size
    pieces = -(-tokens // length)
    node, piece = repeated(pieces)
    begin = nodes[node, BEGIN_TOKENS] + piece * length[node]
    entries = np.empty((len(node), ENTRY_FIELDS), np.int32)
    entries[:, TABLE_ROW] = nodes[node, REQUEST]
    entries[:, FIRST_BLOCK] = begin // block_size
    entries[:, TOKENS] = np.minimum(length[node], nodes[node, END_TOKENS] - begin)

    # query tokens in the order of the forest, of which every entry asks a run
    lens = query_lens[forest.order]
    request, within = repeated(lens)
    query_tokens = query_start_loc[forest.order][request] + within
    first = starts(lens)
    first, last = first[nodes[:, FIRST]][node], first[nodes[:, LAST]][node]
    entry, row = repeated(last - first, first)
    rows = query_tokens[row]
    states = np.full((num_tokens, limits.max_states), -1, np.int32)
    level = forest.sum_above(pieces)[node] + piece
    states[rows, level[entry]] = np.arange(len(rows))
    return forest, NodeBatch(
        entries=entries,
        row_starts=starts(last - first).astype(np.int32),
        block_starts=starts(-(-entries[:, TOKENS] // block_size)).astype(np.int32),
        rows=rows.astype(np.int32),
        shared_tokens=forest.shared_tokens,
        states=states,
    )


def _that_fit(forest: Forest, query_lens: np.ndarray, limits: NodeLimits) -> Forest:
    """Without nodes that nobody asks, those below the deepest level, and those that save least."""
    forest = forest.without(forest.sum_over_members(query_lens > 0) < 2)
    forest = forest.without(forest.levels >= limits.max_states)
    too_many = len(forest.nodes) - limits.max_entries
    if too_many > 0:
        members = forest.nodes[:, LAST] - forest.nodes[:, FIRST]
        saved = (members - 1) * forest.range_tokens
        remove = np.zeros(len(saved), bool)
        remove[np.argsort(saved, kind="stable")[:too_many]] = True
        forest = forest.without(remove)
    return forest


def _cuts(forest: Forest, limits: NodeLimits, piece_tokens: int) -> np.ndarray:
    """int [nodes]: into how many pieces each is cut: largest first, as long as no query token gets
    more states than there is room for."""
    nodes = forest.nodes
    pieces = np.ones(len(nodes), np.int64)
    states = forest.sum_over_nodes(pieces).astype(np.int64)
    free_entries = limits.max_entries - len(nodes)
    tokens = forest.range_tokens
    wanted = tokens // piece_tokens - 1
    for index in np.argsort(-tokens, kind="stable")[: int((wanted > 0).sum())].tolist():
        members = slice(int(nodes[index, FIRST]), int(nodes[index, LAST]))
        room = limits.max_states - int(states[members].max())
        more = min(int(wanted[index]), room, free_entries)
        if more > 0:
            pieces[index] += more
            states[members] += more
            free_entries -= more
    return pieces

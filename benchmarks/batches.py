# SPDX-License-Identifier: Apache-2.0
"""Batches of requests as block tables, without any keys and values."""

from dataclasses import dataclass

import numpy as np

from vllm_relay.attention_backends.forest import build_forest

BLOCK_SIZE_TOKENS = 128
"""vLLM's default on CPUs."""


@dataclass(frozen=True)
class Batch:
    """The requests of one step."""

    block_table: np.ndarray  # int32 [requests, blocks], 0 past the end of a request
    query_start_loc: np.ndarray  # int32 [requests + 1]
    seq_lens: np.ndarray  # int32 [requests]
    block_size: int
    description: str

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def num_query_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def num_blocks(self) -> int:
        """Blocks a cache needs for it, the null block included."""
        return int(self.block_table.max(initial=0)) + 1

    @property
    def kv_tokens(self) -> int:
        """KV tokens attended to, summed over requests."""
        return int(self.seq_lens.sum(dtype=np.int64))

    @property
    def kv_tokens_unique(self) -> int:
        """The same with whatever is shared counted once."""
        query_lens = np.diff(self.query_start_loc)
        forest = build_forest(self.block_table, self.seq_lens - query_lens + 1, self.block_size)
        first, last, begin, end = forest.nodes[:, :4].astype(np.int64).T
        return self.kv_tokens - int(((last - first - 1) * (end - begin)).sum())

    def attended_pairs(self) -> int:
        """Pairs of a query token and a KV token it sees."""
        query_lens = np.diff(self.query_start_loc).astype(np.int64)
        return int((query_lens * self.seq_lens - query_lens * (query_lens - 1) // 2).sum())


def shared_prefix(
    requests: int, prefix_tokens: int, context_tokens: int, block_size: int = BLOCK_SIZE_TOKENS
) -> Batch:
    """Decoding requests which share their first `prefix_tokens` and have `context_tokens` of their
    own; a prefix that is no multiple of the block size is shared up to its last whole block."""
    seq_len = prefix_tokens + context_tokens
    shared_blocks = prefix_tokens // block_size
    own_blocks = -(-seq_len // block_size) - shared_blocks
    table = np.empty((requests, shared_blocks + own_blocks), np.int32)
    table[:, :shared_blocks] = np.arange(1, shared_blocks + 1)
    own_ids = np.arange(requests * own_blocks, dtype=np.int32) + shared_blocks + 1
    table[:, shared_blocks:] = own_ids.reshape(requests, own_blocks)
    return Batch(
        block_table=table,
        query_start_loc=np.arange(requests + 1, dtype=np.int32),
        seq_lens=np.full(requests, seq_len, np.int32),
        block_size=block_size,
        description=f"{requests} requests, prefix {prefix_tokens}, context {context_tokens}",
    )


def random_batch(
    rng: np.random.Generator, *, num_blocks: int, max_kv_tokens: int, block_size: int
) -> Batch:
    """A batch with 0 to 100 % of its tokens shared by 0 to 64 groups in trees up to 6 levels deep.

    Mostly decoding requests; in one batch of ten some requests check a few speculated tokens, in
    one of ten there is a chunk of a prompt too.

    Args:
        num_blocks: block ids are below it, and not in order.
        max_kv_tokens: most tokens attended to, summed over requests.
    """
    requests = int(np.exp(rng.uniform(0, np.log(129))))
    groups = int(rng.integers(0, 65)) if rng.random() < 0.5 else int(rng.integers(0, 5))
    depth = int(rng.integers(0, 7))
    shared_part = float(rng.choice([0.0, rng.random(), rng.random(), rng.random(), 1.0]))
    mean_tokens = np.exp(rng.uniform(np.log(32), np.log(8192)))
    mean_tokens = max(16.0, min(mean_tokens, max_kv_tokens / requests))
    lengths = np.maximum(1, (mean_tokens * rng.uniform(0.5, 1.5, requests)).astype(np.int64))
    ids = list(rng.permutation(num_blocks - 1) + 1)
    rows: list[list[int]] = [[] for _ in range(requests)]

    def take(count: int) -> list[int]:
        taken = ids[:count]
        del ids[:count]
        return taken

    def grow(members: np.ndarray, levels: int) -> None:
        """One node of a tree, and below it the trees of its children."""
        room = int(lengths[members].min() * shared_part) // block_size - len(rows[members[0]])
        count = (
            room if levels == 1 else int(rng.integers(0, room // levels * 2 + 1)) if room > 0 else 0
        )
        for block in take(max(0, min(count, room))):
            for member in members:
                rows[member].append(block)
        if levels > 1 and len(members) > 1:
            child = rng.integers(0, min(len(members), int(rng.integers(1, 5))), len(members))
            for index in np.unique(child):
                grow(members[child == index], levels - 1)

    if groups and depth:
        group = rng.integers(0, groups, requests)
        for index in np.unique(group):
            grow(np.flatnonzero(group == index), depth)

    query_lens = np.ones(requests, np.int64)
    kind = rng.random()
    if kind < 0.1:
        query_lens = rng.integers(1, 7, requests)
    elif kind < 0.2:
        query_lens[rng.integers(requests)] = int(np.exp(rng.uniform(np.log(16), np.log(512))))
    seq_lens = np.empty(requests, np.int64)
    for request, row in enumerate(rows):
        seq_lens[request] = max(lengths[request], len(row) * block_size) + query_lens[request] - 1
        own = -(-int(seq_lens[request]) // block_size) - len(row)
        if own > len(ids):  # the cache is full: the request ends where its blocks do
            own = len(ids)
            if not row and not own:
                row.append(1)
            seq_lens[request] = (len(row) + own) * block_size
            query_lens[request] = 1
        row.extend(take(own))
    order = rng.permutation(requests)
    table = np.zeros((requests, max(len(row) for row in rows)), np.int32)
    for position, request in enumerate(order):
        table[position, : len(rows[request])] = rows[request]
    batch = Batch(
        block_table=table,
        query_start_loc=np.append(0, np.cumsum(query_lens[order])).astype(np.int32),
        seq_lens=seq_lens[order].astype(np.int32),
        block_size=block_size,
        description="",
    )
    kinds = "decode" if kind >= 0.2 else "speculation" if kind < 0.1 else "prompt chunk"
    description = (
        f"{requests} requests, {kinds}, {groups} groups, depth {depth}, tokens "
        f"{seq_lens.min()}..{seq_lens.max()}, {batch.num_query_tokens} query tokens, "
        f"{batch.kv_tokens_unique} of {batch.kv_tokens} KV tokens unique"
    )
    return Batch(**{**batch.__dict__, "description": description})

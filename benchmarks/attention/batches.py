# SPDX-License-Identifier: Apache-2.0
"""Batches of requests as block tables, without any keys and values."""

from dataclasses import dataclass, replace

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
    rng: np.random.Generator,
    *,
    num_blocks: int,
    max_kv_tokens: int,
    block_size: int,
    kind: str | None = None,
) -> Batch:
    """A batch with 0 to 100 % of its tokens shared by 0 to 64 groups in trees up to 6 levels deep.

    Mostly decoding requests; in one batch of ten requests check a few speculated tokens, in one of
    ten there is a chunk of a prompt too.

    Args:
        num_blocks: block ids are below it, and not in order.
        max_kv_tokens: most tokens attended to, summed over requests, give or take some.
        kind: "decode", "speculation" or "prompt chunk", by chance unless given.
    """
    requests = _log_uniform(rng, rng.choice([1, 8]), 129)
    groups = 0 if rng.random() < 0.1 else _log_uniform(rng, 1, rng.choice([65, 2 + requests // 2]))
    depth = int(rng.integers(0, 7))
    shared_part = float(rng.choice([0.0, rng.random(), rng.random(), 1 - rng.random() / 8, 1.0]))
    mean_tokens = min(
        _log_uniform(rng, rng.choice([32, 512]), 8192), max(32, max_kv_tokens // requests)
    )
    ids = (rng.permutation(num_blocks - 1) + 1).tolist()
    rows: list[list[int]] = [[] for _ in range(requests)]

    def grow(members: np.ndarray, levels: int, blocks: int) -> None:
        """One node of a tree and, below it, the trees of its children."""
        most = min(blocks, len(ids) - requests)
        here = most if levels == 1 else int(rng.integers(0, 2 * most // levels + 1))
        for _ in range(min(here, most)):
            block = ids.pop()
            for member in members:
                rows[member].append(block)
        if levels > 1 and len(members) > 1 and blocks > here:
            children = int(rng.integers(1, 5))
            child_of = rng.integers(0, children, len(members))
            for child in np.unique(child_of):
                grow(members[child_of == child], levels - 1, blocks - here)

    if groups and depth:
        group_of = rng.integers(0, groups, requests)
        for group in np.unique(group_of):
            shared_tokens = mean_tokens * shared_part * rng.uniform(0.5, 1.5)
            grow(np.flatnonzero(group_of == group), depth, round(shared_tokens / block_size))

    query_lens = np.ones(requests, np.int64)
    drawn = rng.choice(["decode", "speculation", "prompt chunk"], p=[0.8, 0.1, 0.1])
    kind = kind or str(drawn)
    if kind == "speculation":
        query_lens = rng.integers(1, 7, requests)
    elif kind == "prompt chunk":
        query_lens[rng.integers(requests)] = _log_uniform(rng, 16, 512)
    own_tokens = mean_tokens * (1 - shared_part) * rng.uniform(0.5, 1.5, requests)
    own_tokens = own_tokens.astype(np.int64) + query_lens
    seq_lens = np.empty(requests, np.int64)
    for request, row in enumerate(rows):
        # a cache that is nearly full leaves every request one block
        most_blocks = max(1, len(ids) - (requests - request - 1))
        own_blocks = min(-(-int(own_tokens[request]) // block_size), most_blocks)
        own = min(int(own_tokens[request]), own_blocks * block_size)
        seq_lens[request] = len(row) * block_size + own
        query_lens[request] = min(query_lens[request], own)
        row.extend(ids.pop() for _ in range(own_blocks))
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
    description = (
        f"{kind}, {requests} requests, {groups} groups, depth {depth}, tokens "
        f"{seq_lens.min()}..{seq_lens.max()}, {batch.num_query_tokens} query tokens, "
        f"{batch.kv_tokens_unique} of {batch.kv_tokens} KV tokens unique"
    )
    return replace(batch, description=description)


def block_tables(requests: int, blocks: int) -> dict[str, np.ndarray]:
    """What can be shared, from nothing to everything; requests are in no order."""
    rng = np.random.default_rng(0)

    def nothing() -> np.ndarray:
        return (rng.permutation(requests * blocks) + 1).astype(np.int32).reshape(requests, blocks)

    tables = {"nothing shared": nothing()}
    table = nothing()
    table[:, :-1] = table[0, :-1]
    tables["all share all but their last block"] = table
    table = nothing()
    groups = np.arange(requests) // 16 * 16
    table[:, : blocks * 3 // 4] = table[groups, : blocks * 3 // 4]
    tables["groups of 16"] = table
    table, level_blocks = nothing(), blocks // 8
    for level in range(7):  # halves of halves of halves ...
        size = max(2, requests >> level)
        columns = slice(level * level_blocks, (level + 1) * level_blocks)
        table[:, columns] = table[np.arange(requests) // size * size, columns]
    tables["binary tree, 7 levels"] = table
    table = nothing()
    for request in range(requests):  # each shares some more with the last
        shared = request * (blocks - 1) // requests
        table[request, :shared] = table[-1, :shared]
    tables["a chain, as deep as there are requests"] = table
    return {name: table[rng.permutation(requests)] for name, table in tables.items()}


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> int:
    """An integer from low to high, exclusive, about as likely below as above sqrt(low * high)."""
    return int(np.exp(rng.uniform(np.log(low), np.log(high))))

# SPDX-License-Identifier: Apache-2.0
"""Batches of trees: nodes per level and tokens per node, as block tables."""

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.attention.batches import Batch


@dataclass(frozen=True)
class Trees:
    """Balanced trees whose leaves are the requests; several nodes on the first level are as many
    trees."""

    nodes: tuple[int, ...]
    """Per level; each a multiple of the one before."""
    tokens: tuple[int, ...]
    """Of every node of a level, multiples of the block size."""

    def __str__(self) -> str:
        return f"{','.join(map(str, self.nodes))} x {','.join(map(str, self.tokens))}"

    @property
    def unique_tokens(self) -> int:
        return sum(n * t for n, t in zip(self.nodes, self.tokens, strict=True))

    def batch(self, block_size: int) -> Batch:
        """Decoding requests, one per leaf."""
        requests = self.nodes[-1]
        columns, first_id = [], 1
        for nodes, tokens in zip(self.nodes, self.tokens, strict=True):
            blocks = tokens // block_size
            ids = np.arange(nodes * blocks, dtype=np.int32).reshape(nodes, blocks) + first_id
            columns.append(np.repeat(ids, requests // nodes, axis=0))
            first_id += nodes * blocks
        return Batch(
            block_table=np.concatenate(columns, axis=1),
            query_start_loc=np.arange(requests + 1, dtype=np.int32),
            seq_lens=np.full(requests, sum(self.tokens), np.int32),
            block_size=block_size,
            description=f"trees {self}",
        )


def shuffled(batch: Batch, seed: int = 0) -> Batch:
    """The same batch with block ids in no order, and its requests too."""
    rng = np.random.default_rng(seed)
    ids = np.append(0, rng.permutation(batch.num_blocks - 1) + 1).astype(np.int32)
    order = rng.permutation(batch.num_requests)
    query_lens = np.diff(batch.query_start_loc)[order]
    return replace(
        batch,
        block_table=ids[batch.block_table[order]],
        query_start_loc=np.append(0, np.cumsum(query_lens)).astype(np.int32),
        seq_lens=batch.seq_lens[order],
    )


TREES = (
    Trees((1,), (8192,)),
    Trees((64,), (2048,)),
    Trees((1, 8), (4096, 256)),
    Trees((1, 64), (2048, 128)),
    Trees((1, 256), (8192, 128)),
    Trees((1, 1024), (4096, 64)),
    Trees((4, 16), (4096, 256)),
    Trees((16, 256), (1024, 128)),
    Trees((8, 1024), (2048, 128)),
    Trees((1, 4, 16), (8192, 1024, 128)),
    Trees((1, 8, 64), (2048, 512, 128)),
    Trees((2, 16, 128), (16384, 1024, 256)),
    Trees((1, 32, 512), (1024, 512, 64)),
    Trees((64, 128, 512), (512, 256, 128)),
    Trees((1, 2, 8, 32), (4096, 2048, 512, 128)),
    Trees((1, 4, 16, 64, 256), (1024, 512, 256, 128, 64)),
    Trees((2, 4, 8, 16, 32, 64), (1024,) * 6),
    Trees((1, 2, 4, 8, 16, 32, 64), (512,) * 7),
    Trees((1, 2, 4, 8, 16, 32, 64, 128), (256,) * 8),
    Trees((1, 2, 4, 8, 16, 32, 64, 128, 256), (128,) * 9),
)
"""1 to 9 levels, 1 to 1,024 leaves, 1 to 64 roots."""

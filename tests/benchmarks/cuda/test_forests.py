# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from benchmarks.cuda.forests import TREES, Trees, shuffled


@pytest.mark.parametrize("trees", TREES, ids=str)
def test_trees_share_what_their_nodes_say(trees: Trees) -> None:
    batch = trees.batch(16)
    assert batch.num_requests == trees.nodes[-1]
    assert batch.num_blocks == trees.unique_tokens // 16 + 1
    assert (batch.block_table > 0).all()
    tokens = np.cumsum(trees.tokens)
    for nodes, end in zip(trees.nodes, tokens, strict=True):
        assert len(np.unique(batch.block_table[:, end // 16 - 1])) == nodes


def test_trees_are_those_that_are_promised() -> None:
    assert len(TREES) == 20
    assert {len(trees.nodes) for trees in TREES} >= {1, 9}
    assert {trees.nodes[-1] for trees in TREES} >= {1, 1024}


def test_shuffling_keeps_what_is_shared() -> None:
    batch = Trees((2, 4), (64, 32)).batch(16)
    other = shuffled(batch, seed=3)
    assert other.kv_tokens_unique == batch.kv_tokens_unique == 2 * 64 + 4 * 32
    assert sorted(np.unique(other.block_table)) == list(range(1, batch.num_blocks))

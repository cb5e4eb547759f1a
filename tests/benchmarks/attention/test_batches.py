# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from benchmarks.attention.batches import random_batch, shared_prefix


@pytest.mark.parametrize("seed", range(40))
def test_random_batch_is_one_that_vllm_could_schedule(seed: int) -> None:
    batch = random_batch(
        np.random.default_rng(seed), num_blocks=300, max_kv_tokens=20000, block_size=32
    )
    query_lens = np.diff(batch.query_start_loc)
    assert (query_lens >= 1).all()
    assert (query_lens <= batch.seq_lens).all()
    assert batch.num_blocks <= 300
    for row, seq_len in zip(batch.block_table, batch.seq_lens, strict=True):
        needed = -(-int(seq_len) // batch.block_size)
        assert (row[:needed] > 0).all()
        assert len(set(row[:needed].tolist())) == needed
        assert (row[needed:] == 0).all()


def test_random_batches_share_everything_from_nothing_to_nearly_all() -> None:
    batches = [
        random_batch(
            np.random.default_rng(seed), num_blocks=300, max_kv_tokens=20000, block_size=32
        )
        for seed in range(200)
    ]
    shares = np.array([batch.kv_tokens_unique / batch.kv_tokens for batch in batches])
    assert (shares == 1).any()
    assert (shares < 0.2).any()
    assert ((shares > 0.4) & (shares < 0.9)).any()


@pytest.mark.parametrize(
    ("prefix_tokens", "context_tokens", "unique_tokens"),
    [(0, 5, 20), (64, 1, 64 + 4), (70, 10, 64 + 4 * 16), (96, 0, 96)],
)
def test_shared_prefix_counts_whole_shared_blocks_once(
    prefix_tokens: int, context_tokens: int, unique_tokens: int
) -> None:
    batch = shared_prefix(4, prefix_tokens, context_tokens, block_size=32)
    assert batch.kv_tokens == 4 * (prefix_tokens + context_tokens)
    assert batch.kv_tokens_unique == unique_tokens
    assert batch.attended_pairs() == batch.kv_tokens

# SPDX-License-Identifier: Apache-2.0
import torch

from benchmarks.attention.batches import shared_prefix
from benchmarks.cuda.caches import poisoned_cache, used_slots
from benchmarks.cuda.geometry import Geometry


def test_slots_of_no_token_are_unused() -> None:
    used = used_slots(shared_prefix(2, 32, 5, block_size=16))
    # the null block, two shared blocks, and one block of five tokens for each request
    assert used.sum(1).tolist() == [0, 16, 16, 5, 5]


def test_unused_slots_are_nan_and_others_are_not() -> None:
    batch = shared_prefix(2, 32, 5, block_size=16)
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        cache = poisoned_cache(batch, Geometry(2, 1, 16, kv_dtype=kv_dtype), "cpu", seed=0)
        is_nan = cache.float().isnan().all(-1)[:, 0]
        assert torch.equal(is_nan, torch.from_numpy(~used_slots(batch)))
        assert torch.equal(is_nan, cache.float().isnan().any(-1)[:, 0])
